#!/usr/bin/env bash
# Rents a Cloud TPU slice, trains on all of its hosts, and goes on after a preemption.
#
#   bash launch/tpu_vm.sh COMMAND --name NAME --zone ZONE [flags] [-- train --config FILE.py --workdir DIR ...]
#
# Commands, in the order in which they are used:
#   create   asks for the slice (a queued resource) and waits until it is there; needs --type
#   install  copies this folder to all hosts, installs it, mounts --nfs; again after a change
#   run      starts what comes after -- on all hosts and returns; the runs go on without this machine
#   logs     follows the log of a host (--worker)
#   stop     the preemption notice: the run saves a checkpoint after the step at hand and ends
#   resume   when the slice is gone or stopped: delete, create, install and run; needs what these need
#   delete   gives the slice back
#
# Flags:
#   --name NAME        of the slice
#   --zone ZONE        where it is, or is to be, such as us-west4-a
#   --project NAME     (default: that of gcloud)
#   --type TYPE        such as v5litepod-16, v5p-128, v6e-64
#   --runtime VERSION  of the machines' software (default by type: v2-alpha-tpuv5-lite, -tpuv5, -tpuv6e, tpu-ubuntu2204-base)
#   --spot             cheaper, and may be taken away at any time
#   --nfs HOST:/SHARE  mounted at /mnt/rlvr on all hosts: --workdir has to be where all of them can reach it
#   --worker N         whose log (default 0, which writes it all)
#   --wait SECONDS     how long create waits for the slice (default 86400)
#   --dry-run          print what would be done
#
# Needs the gcloud command, logged in, with the TPU API enabled in the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
# shellcheck source=launch/commands.sh
source launch/commands.sh

commands="create, install, run, logs, stop, resume, delete"
case "${1:-}" in
    -h | --help)
        usage_of launch/tpu_vm.sh
        exit
        ;;
    create | install | run | logs | stop | resume | delete) command="$1" ;;
    *) die "expected a command first, got '${1:-}'; known: $commands (--help says what they do)" ;;
esac
shift

name="" zone="" project="" type="" runtime="" nfs="" worker=0 wait=86400 spot=false
while [ $# -gt 0 ]; do
    case "$1" in
        --name | --zone | --project | --type | --runtime | --nfs | --worker | --wait)
            printf -v "${1#--}" '%s' "$(value "$@")"
            shift
            ;;
        --spot) spot=true ;;
        --dry-run) dry_run=true ;;
        -h | --help)
            usage_of launch/tpu_vm.sh
            exit
            ;;
        --)
            shift
            break
            ;;
        *)
            die "unknown flag $1; known: --name, --zone, --project, --type, --runtime, --spot, --nfs, --worker, --wait," \
                "--dry-run, --help; what rlvr is to do comes after --"
            ;;
    esac
    shift
done
need --name "$name"
need --zone "$zone"
a_number --wait "$wait"
need_program gcloud "see https://cloud.google.com/sdk/docs/install"
case "$command" in create | resume) need --type "$type" ;; esac
case "$command" in run | resume) check_training "$@" ;; esac

if [ -z "$runtime" ]; then
    case "$type" in
        v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
        v5p-*) runtime=v2-alpha-tpuv5 ;;
        v6e-*) runtime=v2-alpha-tpuv6e ;;
        *) runtime=tpu-ubuntu2204-base ;;
    esac
fi
where=("--zone=$zone")
[ -z "$project" ] || where+=("--project=$project")
tpus=(gcloud compute tpus)

# on_hosts WORKER COMMAND_LINE
on_hosts() { execute "${tpus[@]}" tpu-vm ssh "$name" "${where[@]}" "--worker=$1" "--command=$2"; }

# Prints the state of the request: ACTIVE, WAITING_FOR_RESOURCES, SUSPENDED, ...; NONE when there is none.
state() {
    "${tpus[@]}" queued-resources describe "$name" "${where[@]}" '--format=value(state.state)' 2>/dev/null || echo NONE
}

create() {
    local found deadline=$((SECONDS + wait))
    local request=("$name" "${where[@]}" "--node-id=$name" "--accelerator-type=$type" "--runtime-version=$runtime")
    if "$spot"; then request+=(--spot); fi
    execute "${tpus[@]}" queued-resources create "${request[@]}"
    if "$dry_run"; then
        say "(then waits up to $wait s until it is ACTIVE)"
        return
    fi
    while true; do
        found="$(state)"
        case "$found" in
            ACTIVE) return ;;
            FAILED | SUSPENDING | SUSPENDED | NONE)
                die "the request for $type in $zone is $found; gcloud compute tpus queued-resources describe $name" \
                    "--zone=$zone says why. Delete it before you try again"
                ;;
        esac
        [ "$SECONDS" -lt "$deadline" ] || die "$name is still $found after $wait s; it stays in the queue:" \
            "delete it, or wait longer (--wait) with resume"
        say "$name is $found"
        sleep 30
    done
}

install() {
    local archive remote
    if "$dry_run"; then
        archive=rlvr_jax.tar.gz
        say "(packs what git knows of in this folder into $archive)"
    else
        archive="$(mktemp -d)/rlvr_jax.tar.gz"
        git ls-files -z --cached --others --exclude-standard | tar --null --ignore-failed-read -T - -czf "$archive"
    fi
    execute "${tpus[@]}" tpu-vm scp "$archive" "$name:rlvr_jax.tar.gz" "${where[@]}" --worker=all
    remote='set -e; mkdir -p rlvr_jax; tar xzf rlvr_jax.tar.gz -C rlvr_jax; cd rlvr_jax'
    remote+='; command -v python3.12 >/dev/null || command -v python3.11 >/dev/null ||'
    remote+=' { sudo apt-get update -qq; sudo apt-get install -y -qq python3.11 python3.11-venv; }'
    remote+='; source launch/setup_venv.sh; setup_venv tpu quickstart,tpu'
    if [ -n "$nfs" ]; then
        remote+='; sudo apt-get install -y -qq nfs-common; sudo mkdir -p /mnt/rlvr'
        remote+="; mountpoint -q /mnt/rlvr || sudo mount -t nfs -o rw,hard $(quoted "$nfs") /mnt/rlvr"
        remote+="; sudo chown \$(id -u) /mnt/rlvr"
    fi
    on_hosts all "bash -c $(quoted "$remote")"
}

run() {
    local remote
    # Started in a session of its own: it outlives the connection. A run that is there already is left alone.
    remote="set -e; cd rlvr_jax; if [ -e rlvr.pid ] && kill -0 \$(cat rlvr.pid) 2>/dev/null; then"
    remote+=" echo 'a run is going on; stop it first' >&2; exit 1; fi"
    remote+="; setsid nohup $(quoted .venv/bin/rlvr "$@") >>rlvr.log 2>&1 </dev/null & echo \$! >rlvr.pid"
    on_hosts all "bash -c $(quoted "$remote")"
}

case "$command" in
    create) create ;;
    install) install ;;
    run) run "$@" ;;
    logs) on_hosts "$worker" 'tail -n 100 -F rlvr_jax/rlvr.log' ;;
    stop) on_hosts all "kill -TERM \$(cat rlvr_jax/rlvr.pid)" ;;
    resume)
        if ! "$dry_run" && [ "$(state)" = ACTIVE ]; then
            say "$name is there"
        else
            execute "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet || true
            create
        fi
        install
        run "$@"
        ;;
    delete) execute "${tpus[@]}" queued-resources delete "$name" "${where[@]}" --force --quiet ;;
esac
