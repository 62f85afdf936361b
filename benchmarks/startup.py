"""Start-up of ``rlvr sft`` and ``rlvr train``: a first process, and a second one that finds what the first compiled."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONFIGS = {"sft": "configs/sft_chat.py:tiny", "train": "configs/rl_quickstart.py:tiny"}


def measure_startup(*, steps: int, timeout_s: float) -> dict[str, Any]:
    """Seconds of runs of ``steps`` steps, of the tiny configs, with an empty compilation cache and a full one.

    Raises:
      RuntimeError: a run failed; what it printed is in the message.
    """
    report: dict[str, Any] = {"run_steps": steps}
    for command, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            first, second = (
                _run(command, config, Path(folder), number, steps, timeout_s) for number in (1, 2)
            )
            cache = [file for file in (Path(folder) / "cache").rglob("*") if file.is_file()]
            report[command] = {
                "first_s": round(first, 2),
                "second_s": round(second, 2),
                "speedup": round(first / second, 2),
                "cache_mib": round(sum(file.stat().st_size for file in cache) / 2**20, 2),
                "cache_files": len(cache),
            }
    return report


def _run(
    command: str, config: str, folder: Path, number: int, steps: int, timeout_s: float
) -> float:
    """A run in a folder of its own, with the cache where the command puts it by default."""
    hidden = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS", "JAX_ENABLE_COMPILATION_CACHE")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    arguments = [sys.executable, "-m", "rlvr_jax", command, "--config", config]
    arguments += ["--workdir", str(folder / f"run{number}"), f"--config.num_steps={steps}"]
    began = time.perf_counter()
    done = subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return time.perf_counter() - began
