#!/usr/bin/env bash
# Lint, types, import contracts and tests, from a bare machine with Python 3.11 or newer.
#
#   bash launch/test.sh [--slow] [-- PYTEST ARGUMENTS]
#
#   --slow   also the tests marked slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pytest_args=(-n 2 --dist loadfile)
while [ $# -gt 0 ]; do
    case "$1" in
        --slow) pytest_args+=(-m "not device") ;;
        -h | --help)
            sed -n '2,6s/^# \{0,1\}//p' launch/test.sh
            exit
            ;;
        --)
            shift
            pytest_args+=("$@")
            break
            ;;
        *)
            echo "error: unknown flag $1; known: --slow, --help, -- PYTEST ARGUMENTS" >&2
            exit 2
            ;;
    esac
    shift
done

# shellcheck source=launch/setup_venv.sh
source launch/setup_venv.sh
make_venv
extras=dev
# The parity tests compare with torch and transformers on Python 3.11; elsewhere they skip and say so.
if .venv/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    extras=dev,parity
fi
setup_venv test "$extras"

check() {
    say "== $*"
    ".venv/bin/$1" "${@:2}"
}
check ruff check .
check ruff format --check .
check basedpyright --pythonpath .venv/bin/python
check lint-imports --no-logo
check shellcheck launch/*.sh launch/gke/*.sh .ci/run
check python -m pytest "${pytest_args[@]}"
