#!/usr/bin/env bash
# Submits a run to a TPU slice of a GKE cluster that has JobSet; README.md beside it says how to set one up.
#
#   bash launch/gke/submit.sh --name NAME --image IMAGE --claim CLAIM --accelerator A --topology T [flags] \
#       -- train --config FILE.py --workdir /shared/DIR [--config.KEY=VALUE ...]
#
#   --name NAME          of the run
#   --image IMAGE        with rlvr in it (Dockerfile)
#   --claim CLAIM        a PersistentVolumeClaim that many pods may write (Filestore); it is /shared in the pods
#   --accelerator NAME   tpu-v5-lite-podslice, tpu-v5p-slice, tpu-v6e-slice, tpu-v4-podslice
#   --topology SIZES     of the slice: 4x4, 8x8x8
#   --chips-per-host N   (default 4; what the node pool's machines have)
#   --max-restarts N     after failures; preemptions do not count (default 3)
#   --grace SECONDS      between the notice and the end (default 600)
#   --spot               on spot nodes
#   --dry-run            print the manifest instead of applying it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
# shellcheck source=launch/commands.sh
source launch/commands.sh

name="" image="" claim="" accelerator="" topology="" chips_per_host=4 max_restarts=3 grace=600 spot=false
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            usage_of launch/gke/submit.sh
            exit
            ;;
        --name | --image | --claim | --accelerator | --topology | --chips-per-host | --max-restarts | --grace)
            variable="${1#--}"
            printf -v "${variable//-/_}" '%s' "$(value "$@")"
            shift
            ;;
        --spot) spot=true ;;
        --dry-run) dry_run=true ;;
        --)
            shift
            break
            ;;
        *)
            die "unknown flag $1; known: --name, --image, --claim, --accelerator, --topology, --chips-per-host," \
                "--max-restarts, --grace, --spot, --dry-run, --help; what rlvr is to do comes after --"
            ;;
    esac
    shift
done
need --name "$name"
need --image "$image"
need --claim "$claim"
need --accelerator "$accelerator"
need --topology "$topology"
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "--name is '$name'; expected at most 40 lower-case letters, digits and hyphens, a letter first"
[[ "$topology" =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] || die "--topology is '$topology'; expected sizes such as 4x4 or 8x8x8"
a_number --chips-per-host "$chips_per_host"
a_number --max-restarts "$max_restarts"
a_number --grace "$grace"
check_training "$@"
need_program kubectl "see https://kubernetes.io/docs/tasks/tools, and connect it to the cluster"

chips=$((${topology//x/*}))
((chips >= chips_per_host)) || chips_per_host=$chips
((chips % chips_per_host == 0)) ||
    die "a $topology slice has $chips chips, which is no multiple of --chips-per-host ($chips_per_host)"

# JSON is YAML: a list of strings.
json_list() {
    local item list=""
    for item in "$@"; do
        item="${item//\\/\\\\}"
        item="${item//\"/\\\"}"
        item="${item//$'\n'/\\n}"
        list+="\"$item\", "
    done
    printf '[%s]' "${list%, }"
}

manifest() {
    local text selector=""
    text="$(cat launch/gke/jobset.yaml)"
    if "$spot"; then selector=$'\n                cloud.google.com/gke-spot: "true"'; fi
    fill() { text="${text//"\${$1}"/"$2"}"; }
    fill NAME "$name"
    fill MAX_RESTARTS "$max_restarts"
    fill HOSTS "$((chips / chips_per_host))"
    fill GRACE_SECONDS "$grace"
    fill ACCELERATOR "$accelerator"
    fill TOPOLOGY "$topology"
    fill SPOT_SELECTOR "$selector"
    fill IMAGE "$image"
    fill CHIPS_PER_HOST "$chips_per_host"
    fill CLAIM "$claim"
    fill ARGUMENTS "$(json_list "$@")"
    printf '%s\n' "$text"
}

if "$dry_run"; then
    echo "+ kubectl apply -f - <<MANIFEST"
    manifest "$@"
    echo MANIFEST
else
    manifest "$@" | kubectl apply -f -
    say "kubectl logs --follow --selector jobset.sigs.k8s.io/jobset-name=$name shows the run; kubectl delete jobset $name ends it"
fi
