"""A mixture of experts of the shape of Qwen3-235B-A22B, on v5p: a plan, not a run.

    rlvr plan --config configs/rl_moe_235b.py --topology v5p:8x8x8
    rlvr train --config configs/rl_moe_235b.py:tiny --workdir runs/tiny         # random weights, under a minute

docs/planning.md has the plan.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from rlvr_jax.cli.flags import load_config

QUICKSTART = pathlib.Path(__file__).with_name("rl_quickstart.py")


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart's settings at this model's size; ``arg`` is "" or "tiny"."""
    config = load_config(f"{QUICKSTART}:{arg}").unlock()
    if arg == "tiny":
        return config
    config.model = "Qwen3-235B-A22B"
    config.num_steps = 500
    config.dtype = "bfloat16"
    config.tasks.domains = ("arithmetic", "text")
    config.tasks.max_levels = 0
    config.tasks.tasks_per_step = 128
    config.rollout.max_tokens = 2048
    config.rollout.temperature = 1.0
    config.rollout.max_rows = 1024
    config.algorithm.kl_loss_coef = 0.0  # no reference
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10
    config.train.row_length = 2320  # a prompt and an answer
    config.train.micro_rows = 128
    config.mesh.tensor = 4
    config.mesh.expert = 16
    return config
