"""A sweep: the quickstart at three learning rates and two seeds, six runs one after another.

    rlvr sweep --config configs/rl_sweep_example.py --workdir runs/sweep
    rlvr sweep --config configs/rl_sweep_example.py:tiny --workdir runs/sweep_tiny      # two runs on random weights

Each run takes as long as a quickstart. The table at the end (``sweep.json``) has the held-out pass rate before and
after for every run; ``rlvr train --config configs/rl_sweep_example.py`` runs the base config alone.
"""

from __future__ import annotations

import pathlib
from typing import Any

from ml_collections import ConfigDict

from rlvr_jax.cli.flags import load_config

QUICKSTART = pathlib.Path(__file__).with_name("rl_quickstart.py")


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart's settings; ``arg`` is "" or "tiny"."""
    return load_config(f"{QUICKSTART}:{arg}").unlock()


def get_sweep(arg: str = "") -> dict[str, list[Any]]:
    """What to vary: every combination of these is one run."""
    if arg == "tiny":
        return {"optimizer.learning_rate": [1e-4, 1e-3]}
    return {"optimizer.learning_rate": [3e-6, 1e-5, 3e-5], "seed": [0, 1]}
