"""A mixture of experts of a trillion parameters, on paper.

    rlvr plan --config configs/rl_moe_1t.py --topology v5p:16x16x16 --estimate
    rlvr train --config configs/rl_moe_1t.py:tiny --workdir runs/tiny           # random weights, under a minute

No model of this shape is published: 61 layers of 384 experts, of which a token meets 8 (32 B parameters).
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
    config.model = "MoE-1T-A32B"
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
    config.train.micro_rows = 512
    config.mesh.tensor = 8
    config.mesh.expert = 32
    return config
