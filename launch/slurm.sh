#!/usr/bin/env bash
# Submits a run to SLURM: one process a node, which uses all its GPUs. It is requeued, and resumes, until it is done.
#
#   bash launch/slurm.sh --nodes N [flags] -- train --config FILE.py --workdir DIR [--config.KEY=VALUE ...]
#
#   --nodes N          how many nodes
#   --gpus N           GPUs of a node (default 8; 0 for nodes without any)
#   --cpus N           CPU cores of a node, for verifiers and data (default 16)
#   --time LIMIT       of one stay in the queue's nodes (default 24:00:00)
#   --notice N         seconds before the limit at which the run saves and goes back into the queue (default 600)
#   --partition NAME   of the cluster
#   --account NAME     to be charged
#   --name NAME        of the job (default rlvr)
#   --dry-run          print the batch script instead of submitting it
#
# The nodes share this folder and --workdir. The log is rlvr-JOBID.log in the current folder.
set -euo pipefail
submitted_from="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
# shellcheck source=launch/commands.sh
source launch/commands.sh

nodes="" gpus=8 cpus=16 time=24:00:00 notice=600 partition="" account="" name=rlvr
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            usage_of launch/slurm.sh
            exit
            ;;
        --nodes | --gpus | --cpus | --time | --notice | --partition | --account | --name)
            printf -v "${1#--}" '%s' "$(value "$@")"
            shift
            ;;
        --dry-run) dry_run=true ;;
        --)
            shift
            break
            ;;
        *)
            die "unknown flag $1; known: --nodes, --gpus, --cpus, --time, --notice, --partition, --account, --name," \
                "--dry-run, --help; what rlvr is to do comes after --"
            ;;
    esac
    shift
done
need --nodes "$nodes"
a_number --nodes "$nodes"
[ "$gpus" = 0 ] || a_number --gpus "$gpus"
a_number --cpus "$cpus"
a_number --notice "$notice"
check_training "$@"
need_program sbatch "run this on a login node of the cluster"

# batch_script ARGUMENTS_OF_RLVR...
batch_script() {
    cat <<SCRIPT
#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=$cpus
#SBATCH --time=$time
#SBATCH --signal=B:TERM@$notice
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$submitted_from/rlvr-%j.log
SCRIPT
    [ "$gpus" = 0 ] || echo "#SBATCH --gpus-per-node=$gpus"
    [ -z "$partition" ] || echo "#SBATCH --partition=$partition"
    [ -z "$account" ] || echo "#SBATCH --account=$account"
    cat <<SCRIPT
set -euo pipefail
cd $(quoted "$PWD")
hosts="\$(scontrol show hostnames "\$SLURM_JOB_NODELIST")"
export JAX_COORDINATOR_ADDRESS="\${hosts%%\$'\n'*}:\$((20000 + SLURM_JOB_ID % 20000))"
export JAX_NUM_PROCESSES="\$SLURM_JOB_NUM_NODES"
export RLVR_PREEMPTED_STATUS=75 # tells a run that was interrupted from one that is done

srun --kill-on-bad-exit=0 bash -c 'JAX_PROCESS_ID="\$SLURM_PROCID" exec "\$@"' bash $(quoted .venv/bin/rlvr "$@") &
step=\$!
trap 'kill -TERM "\$step"' TERM # srun hands it to every process: they save and stop
status=0
while kill -0 "\$step" 2>/dev/null; do
    status=0
    wait "\$step" || status=\$?
done
if [ "\$status" = 75 ]; then
    scontrol requeue "\$SLURM_JOB_ID"
fi
exit "\$status"
SCRIPT
}

if [ "$gpus" = 0 ]; then
    execute setup_venv quickstart quickstart
else
    execute setup_venv gpu quickstart,cuda13
fi
if "$dry_run"; then
    echo "+ sbatch <<SCRIPT"
    batch_script "$@"
    echo SCRIPT
else
    batch_script "$@" | sbatch
fi
