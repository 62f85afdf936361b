"""Supervised fine-tuning on chat data, to start reinforcement learning from a model that knows the form of the answers.

    rlvr sft --config configs/sft_chat.py --workdir runs/sft
    rlvr sft --config configs/sft_chat.py --config.data.sources=chat.jsonl,more/*.parquet --workdir runs/mine
    rlvr sft --config configs/sft_chat.py:tiny --workdir runs/tiny                # random weights, under a minute
    rlvr train --config configs/rl_quickstart.py --config.model=runs/sft/model --workdir runs/rl

The data that come with it are 240 short tasks and their answers, none of them held out from reinforcement learning.
"""

from __future__ import annotations

import pathlib

from ml_collections import ConfigDict

EXAMPLE = pathlib.Path(__file__).resolve().with_name("sft_example.jsonl")


def get_config(arg: str = "") -> ConfigDict:
    """The settings; ``arg`` is "" or "tiny"."""
    config = ConfigDict()
    config.model = "smollm2-135m-instruct"
    config.seed = 0
    config.num_steps = 60
    config.dtype = "float32"
    # Of all parameters (adapters are float32); see config.optimizer for bfloat16 ones.
    config.param_dtype = "float32"

    config.data = ConfigDict(
        dict(
            # Files, globs, slices (chat.jsonl@[:1000]) or tfds:NAME?split=train.
            sources=(str(EXAMPLE),),
            # Shares of the conversations from each source, each repeated; () reads all of all, epoch by epoch.
            weights=(),
            # 0 goes on until num_steps; else the run ends with whichever comes first.
            num_epochs=0,
            # Share of each source that is kept for evaluation.
            held_out=0.1,
        )
    )
    config.optimizer = ConfigDict(
        dict(
            learning_rate=2e-5,
            schedule="cosine",
            warmup_steps=5,
            final_fraction=0.1,
            b1=0.9,
            b2=0.95,
            weight_decay=0.0,
            grad_clip=1.0,
            # Or adamw_8bit: block-wise quantised moments, 2 bytes a parameter instead of 8.
            name="adamw",
            # Of bfloat16 parameters: a float32 copy that takes the updates; or none, and rounding at random.
            master_weights=True,
            stochastic_rounding=False,
            # Keep moments (and copy) in the host's memory between updates.
            host_offload=False,
        )
    )
    # A step trains on batch_rows rows of row_length tokens, micro_rows of them at a time (0: all at once).
    config.train = ConfigDict(
        dict(
            batch_rows=8,
            row_length=256,
            micro_rows=0,
            remat="full",
            # Mixtures of experts: weight of the load-balancing loss.
            router_aux_loss_coef=0.0,
        )
    )
    # With a rank, low-rank adapters beside the kernels whose paths match are trained, and nothing else; the
    # kernels they stand beside may be kept in few bits.
    config.adapter = ConfigDict(
        dict(
            rank=0,
            alpha=16.0,
            targets="layers/(attn|mlp)/.*",
            dora=False,
            quantize="none",
            double_quant=False,
        )
    )
    config.mesh = ConfigDict(dict(data=1, fsdp=-1, tensor=1, expert=1, context=1))
    # Steps between two; 0 leaves only the one at the end.
    config.checkpoint = ConfigDict(dict(every=20, keep=2))
    config.eval = ConfigDict(dict(every=20))

    if arg == "tiny":
        config.model = "tiny-random"
        config.num_steps = 8
        config.optimizer.learning_rate = 1e-2
        config.optimizer.warmup_steps = 1
        config.checkpoint.every = 4
        config.eval.every = 4
    elif arg:
        raise ValueError(f"configs/sft_chat.py takes no argument {arg!r}; expected '' or 'tiny'")
    return config
