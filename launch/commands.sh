# shellcheck shell=bash
# Sourced by the launchers beside it, after setup_venv.sh: commands that --dry-run prints instead of running them.

dry_run=false

# quoted WORD... -> the words as a shell would have to be given them, on one line
quoted() {
    local word line=""
    for word in "$@"; do
        case "$word" in
            "" | *[!A-Za-z0-9_./:=,@%+-]*) line+="${word@Q} " ;;
            *) line+="$word " ;;
        esac
    done
    printf '%s\n' "${line% }"
}

# execute COMMAND... runs it, or says what it would run
execute() {
    if "$dry_run"; then
        printf '+ %s\n' "$(quoted "$@")"
    else
        "$@"
    fi
}

# usage_of FILE prints the comment at its head
usage_of() { sed -n '2,/^[^#]/{/^#/s/^# \{0,1\}//p}' "$1"; }

# value FLAG VALUE ... -> the value; an error when there is none
value() {
    case "${2:-}" in
        "" | --*) die "$1 needs a value; see --help" ;;
        *) printf '%s\n' "$2" ;;
    esac
}

# need FLAG VALUE: an error naming the flag when it was not given
need() { [ -n "$2" ] || die "$1 is missing; see --help"; }

# a_number FLAG VALUE
a_number() { [[ "$2" =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2'; expected a positive number"; }

need_program() {
    "$dry_run" || command -v "$1" >/dev/null || die "$1 is not installed; $2"
}

# check_training ARGUMENTS...: what rlvr is called with; a mistake here would only show on the rented machines
check_training() {
    local argument config="" workdir=""
    [ $# -gt 0 ] || die "nothing to run; expected: -- train --config FILE.py --workdir DIR (or sft)"
    case "$1" in
        train | sft) ;;
        *) die "'$1' does not run on many machines; expected train or sft after --" ;;
    esac
    for argument in "$@"; do
        case "$argument" in
            --config | --config=*) config=given ;;
            --workdir | --workdir=*) workdir=given ;;
        esac
    done
    [ -n "$config" ] || die "rlvr $1 needs --config FILE.py; give it after --"
    [ -n "$workdir" ] || die "rlvr $1 needs --workdir DIR, a folder that all machines share; give it after --"
}
