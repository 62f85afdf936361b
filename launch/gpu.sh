#!/usr/bin/env bash
# Trains on the GPUs of this machine, or of several machines over ssh. Run it again to resume.
#
#   bash launch/gpu.sh [flags] -- train --config FILE.py --workdir DIR [--config.KEY=VALUE ...]
#
#   --hosts A,B,...  one process on each, started over ssh; the first is the coordinator. Without it: this machine.
#                    They reach this folder and --workdir under the same path, and one another on --port
#   --port N         of the coordinator (default 8476)
#   --dry-run        print what would be done
#
# A process uses all GPUs of its machine. Ctrl-C or SIGTERM here is the preemption notice to all of them: they save a
# checkpoint after the step at hand and end with status 0. When one of them fails, the others are ended too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
# shellcheck source=launch/commands.sh
source launch/commands.sh

hosts="" port=8476
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            usage_of launch/gpu.sh
            exit
            ;;
        --hosts)
            hosts="$(value "$@")"
            shift
            ;;
        --port)
            port="$(value "$@")"
            shift
            ;;
        --dry-run) dry_run=true ;;
        --)
            shift
            break
            ;;
        *) die "unknown flag $1; known: --hosts, --port, --dry-run, --help; what rlvr is to do comes after --" ;;
    esac
    shift
done
a_number --port "$port"
check_training "$@"

execute setup_venv gpu quickstart,cuda13
if [ -z "$hosts" ]; then
    if "$dry_run"; then
        execute .venv/bin/rlvr "$@"
        exit
    fi
    exec .venv/bin/rlvr "$@"
fi

need_program ssh "install OpenSSH's client"
IFS=, read -ra host_list <<<"$hosts"
pid_file="/tmp/rlvr-$(id -un)-$port" # .INDEX
ssh_to=(ssh -o BatchMode=yes -o ServerAliveInterval=30)
processes=()

# What a machine runs. Its process id goes into a file, so that it can be sent a signal from here.
remote() {
    printf '%s && ' "cd $(quoted "$PWD")" "echo \$\$ >$pid_file.$1"
    quoted exec env "JAX_COORDINATOR_ADDRESS=${host_list[0]}:$port" "JAX_NUM_PROCESSES=${#host_list[@]}" \
        "JAX_PROCESS_ID=$1" .venv/bin/rlvr "${@:2}"
}

notify_all() {
    local index
    for index in "${!host_list[@]}"; do
        "${ssh_to[@]}" "${host_list[index]}" "kill -TERM \$(cat $pid_file.$index) 2>/dev/null" || true
    done
}

for index in "${!host_list[@]}"; do
    command="$(remote "$index" "$@")"
    if "$dry_run"; then
        execute "${ssh_to[@]}" "${host_list[index]}" "$command"
        continue
    fi
    "${ssh_to[@]}" "${host_list[index]}" "$command" > >(sed -u "s/^/[${host_list[index]}] /") 2>&1 &
    processes+=($!)
done
"$dry_run" && exit

trap 'say "notifying ${host_list[*]}: save and stop"; notify_all' INT TERM
status=0
while [ "${#processes[@]}" -gt 0 ]; do
    code=0
    wait -n "${processes[@]}" || code=$?
    left=()
    for process in "${processes[@]}"; do
        if kill -0 "$process" 2>/dev/null; then left+=("$process"); fi
    done
    if [ "${#left[@]}" -lt "${#processes[@]}" ] && [ "$code" != 0 ] && [ "$status" = 0 ]; then
        status="$code"
        say "a process ended with status $code: ending the others"
        notify_all
    fi
    processes=("${left[@]}")
done
exit "$status"
