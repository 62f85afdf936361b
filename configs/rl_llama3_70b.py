"""Llama-3.1-70B-Instruct on 256 chips of v5p (v5p-512: the name counts two cores a chip).

    rlvr plan --config configs/rl_llama3_70b.py --topology v5p:8x8x4
    rlvr train --config configs/rl_llama3_70b.py --config.model=DIR/Llama-3.1-70B-Instruct --workdir runs/llama3_70b
    rlvr train --config configs/rl_llama3_70b.py:tiny --workdir runs/tiny       # random weights, under a minute

DIR/Llama-3.1-70B-Instruct is a Hugging Face directory. docs/planning.md has the plan. Time and pass rate of a run: not
measured yet.
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
    config.model = "Llama-3.1-70B-Instruct"
    config.num_steps = 500
    config.dtype = "bfloat16"
    config.tasks.domains = ("arithmetic", "text")
    config.tasks.max_levels = 0
    config.tasks.tasks_per_step = 128
    config.rollout.max_tokens = 2048
    config.rollout.temperature = 1.0
    config.rollout.max_rows = 1024
    config.algorithm.kl_loss_coef = 0.001
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10
    config.train.row_length = 2320  # a prompt and an answer
    config.train.micro_rows = 64
    # At most the number of key and value heads. The rest shards rows and optimizer, and adapts to the slice.
    config.mesh.tensor = 8
    return config
