#!/usr/bin/env bash
# Trains SmolLM2-135M-Instruct by reinforcement learning with verifiable rewards, on what this machine has.
#
#   bash launch/quickstart.sh [--seed N] [--fresh] [--workdir DIR] [--config.KEY=VALUE ...]
#
#   --seed N       another seed
#   --fresh        start over; without it, a run that was stopped goes on
#   --workdir DIR  where the run is kept (default runs/quickstart)
#
# Needs Python 3.11 or newer; everything else is installed into .venv. About 15 minutes on 2 CPU cores.
set -euo pipefail
started_in="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

workdir="$PWD/runs/quickstart"
train_args=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            sed -n '2,11s/^# \{0,1\}//p' launch/quickstart.sh
            exit
            ;;
        --workdir)
            workdir="${2:?--workdir needs a folder}"
            shift
            ;;
        --workdir=*) workdir="${1#*=}" ;;
        *) train_args+=("$1") ;;
    esac
    shift
done
case "$workdir" in /*) ;; *) workdir="$started_in/$workdir" ;; esac

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
extras=quickstart
if command -v nvidia-smi >/dev/null && driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)"; then
    if [ "${driver%%.*}" -ge 580 ]; then
        extras=quickstart,cuda13
    else
        say "the NVIDIA driver ($driver) is older than CUDA 13 needs (580): running on the CPU"
    fi
fi
setup_venv quickstart "$extras"

exec .venv/bin/rlvr train --config configs/rl_quickstart.py --workdir "$workdir" "${train_args[@]}"
