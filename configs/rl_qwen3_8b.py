"""Qwen3-8B on 16 chips of v5e, or on a node of 8 GPUs.

    rlvr plan --config configs/rl_qwen3_8b.py --topology v5e:4x4
    rlvr plan --config configs/rl_qwen3_8b.py:gpu --topology h100:8
    rlvr train --config configs/rl_qwen3_8b.py --config.model=DIR/Qwen3-8B --workdir runs/qwen3_8b
    rlvr train --config configs/rl_qwen3_8b.py:tiny --workdir runs/tiny         # random weights, under a minute

DIR/Qwen3-8B is a Hugging Face directory. docs/planning.md has the plans. Time and pass rate of a run: not measured yet.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

from rlvr_jax.cli.flags import load_config

QUICKSTART = pathlib.Path(__file__).with_name("rl_quickstart.py")


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart's settings at this model's size; ``arg`` is "" (TPU), "gpu" or "tiny"."""
    if arg == "tiny":
        return load_config(f"{QUICKSTART}:tiny").unlock()
    if arg not in ("", "gpu"):
        raise ValueError(
            f"configs/rl_qwen3_8b.py takes no argument {arg!r}; expected '', 'gpu' or 'tiny'"
        )
    config = load_config(f"{QUICKSTART}").unlock()
    config.model = "Qwen3-8B"
    config.num_steps = 500
    config.dtype = "bfloat16"
    config.tasks.domains = ("arithmetic", "text")
    config.tasks.max_levels = 0
    config.tasks.tasks_per_step = 32
    config.rollout.max_tokens = 1024
    config.rollout.temperature = 1.0
    config.rollout.max_rows = 256
    config.algorithm.kl_loss_coef = 0.001
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup_steps = 10
    config.train.row_length = 1296  # a prompt and an answer
    if arg == "gpu":
        config.mesh.fsdp = 8
        config.train.micro_rows = 8
    else:
        # Decoding gathers the weights over fsdp: all 16 GB have to fit into a tensor group.
        config.mesh.fsdp, config.mesh.tensor = 2, 8
        config.rollout.max_rows = 128
        config.train.micro_rows = 2
        # No reference: with one, the update takes 16.0 of 16 GiB.
        config.algorithm.kl_loss_coef = 0.0
    return config
