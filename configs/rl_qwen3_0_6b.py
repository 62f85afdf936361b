"""Qwen3-0.6B on one small accelerator: a Colab TPU (v5e, one chip), or any GPU of 24 GB.

    rlvr plan --config configs/rl_qwen3_0_6b.py --topology v5e:1x1
    rlvr train --config configs/rl_qwen3_0_6b.py --config.model=DIR/Qwen3-0.6B --workdir runs/qwen3_0_6b
    rlvr train --config configs/rl_qwen3_0_6b.py:tiny --workdir runs/tiny       # random weights, under a minute

DIR/Qwen3-0.6B is a Hugging Face directory. There is no reference: it would take another 2.4 GB. docs/planning.md has
the plan. Time and pass rate of a run: not measured yet.
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
    config.model = "Qwen3-0.6B"
    config.num_steps = 200
    config.dtype = "bfloat16"
    config.tasks.domains = ("arithmetic", "text")
    config.tasks.max_levels = 0
    config.tasks.tasks_per_step = 16
    config.rollout.max_tokens = 256
    config.rollout.temperature = 1.0
    config.rollout.max_rows = 128
    config.algorithm.kl_loss_coef = 0.0
    config.optimizer.learning_rate = 2e-6
    config.optimizer.warmup_steps = 10
    config.train.row_length = 1040  # a prompt and three answers
    config.train.micro_rows = 1
    return config
