"""A GRPO step of google-tunix on a CPU (its vanilla rollout engine), timed by phase.

Needs Python 3.12 with google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12 orbax-checkpoint==0.12.8.
``benchmarks/peers/run.py`` starts it.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import common


def main() -> None:
    flags = common.step_parser(__doc__)
    flags.add_argument("--train-micro", type=int, help="prompts of a micro-batch; all by default")
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
    from transformers import PreTrainedTokenizerFast
    from tunix.rl import rl_cluster
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
    from tunix.rl.rollout import base_rollout

    settings = common.model_settings(args.model_dir)
    mesh = tunix_model.make_mesh()
    load = functools.partial(tunix_model.load, args.model_dir, mesh, args.dtype)

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    micro = args.train_micro or args.prompts
    cluster = rl_cluster.RLCluster(
        actor=load(args.remat),
        reference=load(),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(str(args.model_dir)),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            rollout_engine="vanilla",
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.chain(
                    optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.0)
                ),
                eval_every_n_steps=10**9,
                max_steps=10**6,
                mini_batch_size=args.prompts,
                train_micro_batch_size=micro,
                rollout_micro_batch_size=args.prompts,
                compute_logps_micro_batch_size=micro,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=args.new_tokens,
                max_prompt_length=args.prompt_len,
                kv_cache_size=args.prompt_len + args.new_tokens,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=args.seed,  # an int: a key array is donated by the sampler and dies after a step
            ),
        ),
    )
    lengths: list[int] = []

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        lengths.extend(len(text.split()) for text in completions)
        return [common.even_fraction(text) for text in completions]

    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=[reward],
        algo_config=GRPOConfig(
            num_generations=args.group,
            num_iterations=1,
            beta=0.04,
            epsilon=0.2,
            kl_loss_mode="low_var_kl",
        ),
    )

    def wait_for_actor(_: Any = None) -> None:
        jax.block_until_ready(nnx.state(cluster.actor_trainer.model))

    phases = common.Phases(args)
    phases.wrap(cluster, "generate", "rollout")
    phases.wrap(cluster, "get_ref_per_token_logps", "ref", wait=jax.block_until_ready)
    phases.wrap(cluster, "get_old_per_token_logps", "old", wait=jax.block_until_ready)
    phases.wrap(cluster, "update_actor", "update", wait=wait_for_actor)
    phases.wrap(learner, "_compute_rewards", "verify")
    run_step = learner._run_global_step

    def timed_step(*step_args: Any, **step_kwargs: Any) -> None:
        phases.begin()
        run_step(*step_args, **step_kwargs)
        wait_for_actor()
        phases.end()

    learner._run_global_step = timed_step

    def data() -> Iterator[dict[str, Any]]:
        while not phases.done:
            seed = args.seed + len(phases.steps)
            prompts = common.make_prompts(
                settings["vocab_size"], args.prompts, args.prompt_len, seed
            )
            yield {"prompts": np.array(prompts)}

    learner.train(data())
    assert set(lengths) == {args.new_tokens}, f"answers of {sorted(set(lengths))} tokens"
    assert len(lengths) == len(phases.steps) * args.prompts * args.group
    versions = {name: version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    chosen = {"train_micro": micro, "remat": args.remat, "devices": mesh.size}
    common.report("tunix", phases, versions, chosen)


if __name__ == "__main__":
    main()
