"""Updates of google-tunix's trainer on a CPU: fine-tuning, or its GRPO loss with a KL to a reference.

Needs Python 3.12 with google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12 orbax-checkpoint==0.12.8.
``benchmarks/peers/turns.py`` starts it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import common


def main() -> None:
    flags = common.update_parser(__doc__)
    flags.add_argument("--remat", choices=["none", "block", "decoder"], default="none")
    args = flags.parse_args()

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", HF_HUB_OFFLINE="1")
    warnings.filterwarnings("ignore")
    import jax
    import numpy as np
    import optax
    import tunix_model
    from flax import nnx
    from tunix.rl import algo_core
    from tunix.rl.common import TrainExample
    from tunix.rl.grpo.grpo_learner import GRPOConfig
    from tunix.sft import peft_trainer, utils

    vocab_size = common.model_settings(args.model_dir)["vocab_size"]
    micro = args.micro or args.rows
    pieces = args.rows // micro
    mesh = tunix_model.make_mesh()
    model = tunix_model.load(args.model_dir, mesh, args.dtype, args.remat)
    advantages = np.where(np.arange(args.rows) % 2, 1.0, -1.0).astype(np.float32)

    def fine_tuning_input(example: Any) -> dict[str, Any]:
        mask = example.input_mask.astype(bool)
        return {
            "input_tokens": example.input_tokens,
            "input_mask": example.input_mask,
            "positions": utils.build_positions_from_mask(mask),
            "attention_mask": utils.make_causal_attn_mask(mask),
        }

    def make_example(rows: np.ndarray, advantage: np.ndarray) -> Any:
        rows = rows.astype(np.int32)
        if args.update == "sft":
            return peft_trainer.TrainingInput(input_tokens=rows, input_mask=np.ones_like(rows))
        prompts, answers = np.split(rows, [args.prompt_len], axis=1)
        logprobs = np.full(answers.shape, -np.log(vocab_size), np.float32)
        return TrainExample(
            prompt_ids=prompts,
            prompt_mask=np.ones_like(prompts),
            completion_ids=answers,
            completion_mask=np.ones_like(answers),
            advantages=advantage,
            ref_per_token_logps=logprobs,
            old_per_token_logps=logprobs,
        )

    versions = {name: version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    chosen = {"micro": micro, "remat": args.remat, "devices": mesh.size}

    def examples() -> Iterator[Any]:
        for step in common.Turns(versions, chosen):
            rows = common.random_rows(vocab_size, args, step)
            for piece in range(pieces):
                part = slice(piece * micro, (piece + 1) * micro)
                yield make_example(rows[part], advantages[part])
            jax.block_until_ready(nnx.state(model))  # the trainer asks for more once it has begun

    with mesh:
        trainer = peft_trainer.PeftTrainer(
            model,
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0)),
            peft_trainer.TrainingConfig(
                eval_every_n_steps=10**9,
                max_steps=10**9,
                gradient_accumulation_steps=pieces if pieces > 1 else None,
            ),
        )
        if args.update == "sft":
            trainer = trainer.with_gen_model_input_fn(fine_tuning_input)
        else:
            config = GRPOConfig(beta=0.04, epsilon=0.2, kl_loss_mode="low_var_kl")
            config.temperature = 1.0  # which its learner takes from the rollout's settings

            def loss(model: Any, example: Any) -> Any:
                return algo_core.grpo_loss_fn(
                    model, example, algo_config=config, pad_id=vocab_size, eos_id=vocab_size + 1
                )

            trainer = trainer.with_loss_fn(loss, has_aux=True)
            trainer = trainer.with_gen_model_input_fn(lambda example: {"example": example})
        trainer.train(examples())


if __name__ == "__main__":
    main()
