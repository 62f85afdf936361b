"""Reinforcement learning from verifiable rewards: one straight line from tasks to updated weights.

Reads like the flow of the stack: curriculum, rollouts, verdicts, groups, advantages, packed batch, update, and back to
the engine. ``staged`` runs these phases one after another; ``fused`` runs rollout, verification and update as one
jitted program (``training/fused.py``), from the same parts.

With several processes each runs all of this: they sample as one program, have their shares of the responses judged,
hold the same groups from then on, and so take the same decisions. The first one alone writes.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from ml_collections import ConfigDict

from rlvr_jax.algorithms.advantages import group_advantages, zero_variance
from rlvr_jax.algorithms.kl import KLController
from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.algorithms.shaping import overlong_penalty
from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.data.packing import pack_groups, row_length
from rlvr_jax.distributed.mesh import make_mesh, num_row_shards
from rlvr_jax.distributed.placement import fetch
from rlvr_jax.distributed.processes import PreemptionNotice, is_first, on_first
from rlvr_jax.envs.single_turn import DomainJudge, check_verifiers, run_groups
from rlvr_jax.errors import ConfigError, MismatchError
from rlvr_jax.metrics import Counters, MetricsLogger, PhaseTimer, read_metrics
from rlvr_jax.models.adapters import adapter_config, checksum
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.peft import check_layout, save_adapters
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rewards.combination import reward_metrics
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.tasks.curriculum import Curriculum
from rlvr_jax.tasks.splits import held_out_tasks
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.training.fused import check_divides, groups_with_signal, make_fused_step
from rlvr_jax.training.policy import check_base, load_pretrained
from rlvr_jax.training.report import read_summary, write_report
from rlvr_jax.training.router import check_router
from rlvr_jax.training.shared_judge import SharedJudge, deadline_s
from rlvr_jax.training.state import (
    abstract_state,
    check_param_dtype,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    optimizer_config,
    state_shardings,
)
from rlvr_jax.training.step import StepConfig, make_learner, merge_updates, policy_params
from rlvr_jax.training.workdir import open_workdir, preempted
from rlvr_jax.trajectories.store import ParquetStore
from rlvr_jax.types import Group, SamplingParams, Task, TrainBatch

T = TypeVar("T")


def train(config: ConfigDict, workdir: str | Path, *, fresh: bool = False) -> dict[str, Any]:
    """Trains a policy from whatever state ``workdir`` is in, and reports how much better it got.

    Args:
      config: as ``configs/rl_quickstart.py``.
      workdir: gets checkpoints, trajectories, metrics and the report; a run that was cut off is resumed, on any number
        of processes and any mesh.
      fresh: start over.

    Returns:
      The summary, also in ``summary.json``.

    Raises:
      ConfigError, ValueError: a setting that cannot work; nothing has been sampled then.
      WeightsError: no such model.
      CheckpointError: a checkpoint could not be written; the one before is intact.
      MismatchError: sampler and trainer disagree by more than ``config.max_mismatch``.
      Preempted: SIGTERM came; the run was saved after the step at hand.
      ProcessError: another process of the run was lost.
    """
    clock = time.perf_counter()

    # The model, on its mesh.
    mesh = make_mesh(**config.mesh)
    check_settings(config, num_row_shards(mesh))
    adapter = adapter_config(**config.adapter)
    quantization = None if adapter is None else adapter.quantization
    check_param_dtype(config.param_dtype, adapter)
    pretrained = load_pretrained(
        config.model, mesh=mesh, quantization=quantization, param_dtype=config.param_dtype
    )
    model, tokenizer, chat = pretrained.config, pretrained.tokenizer, pretrained.chat
    check_router(model, "algorithm.router_aux_loss_coef", config.algorithm.router_aux_loss_coef)
    check_router(model, "rollout.router_replay", config.rollout.router_replay)
    updates_per_step = config.train.num_epochs * config.train.num_minibatches
    optimized = optimizer_config(config, num_steps=config.num_steps * updates_per_step)
    learning_rate = learning_rate_schedule(optimized)
    optimizer = make_optimizer(optimized)
    if adapter is not None:
        check_layout(adapter, model)
    shardings = state_shardings(model, optimizer, mesh, adapter)

    # How it samples, and what it optimises.
    group_size, tasks_per_step = config.rollout.group_size, config.tasks.tasks_per_step
    sampling = sampling_params(config, tokenizer.stop_token_ids)
    learner = make_learner(model, optimizer, mesh, shardings, step_config(config, sampling))
    kl_controller = KLController(
        coef=config.algorithm.kl_coef, target=config.algorithm.kl_target or None
    )

    # What it learns from, and what it is judged on.
    domains, seed = config.tasks.domains, config.seed
    curriculum = Curriculum(
        domains,
        difficulty=config.tasks.difficulty,
        seed=seed,
        max_levels=config.tasks.max_levels or None,
    )
    held_out = [
        task
        for name, levels in curriculum.levels.items()
        for task in held_out_tasks(name, config.eval.tasks_per_domain, seed, levels)
    ]
    first = curriculum.sample(0, tasks_per_step)  # the same again when training gets there
    check_prompts([*held_out, *first], chat, model, config.rollout.max_tokens)
    check_verifiers(curriculum.domains)
    counters = Counters()

    workdir = open_workdir(workdir, config, fresh=fresh)  # nothing is wrong with the settings
    store = ParquetStore(workdir / "trajectories")
    held_out_store = ParquetStore(workdir / "held_out")
    writes = is_first()

    with (
        VerifierPool(config.verifiers.num_workers, config.verifiers.timeout_s) as pool,
        Checkpointer(workdir / "checkpoints", keep=config.checkpoint.keep) as checkpointer,
        MetricsLogger(
            workdir if writes else None, total_steps=config.num_steps, console=writes
        ) as logger,
        PreemptionNotice() as notice,
    ):
        # Where it starts: the newest checkpoint, or the pretrained weights. Before the first sample, in either case.
        frozen = adapter is not None or uses_reference(config)
        pretrained_params = learner.place(pretrained.params) if frozen else None
        reference = pretrained_params if uses_reference(config) else None
        base = pretrained_params if adapter is not None else None  # the same arrays: no second copy
        base_checksum = checksum(pretrained.params) if adapter is not None else None
        restored = checkpointer.restore(abstract_state(model, optimizer, mesh, adapter))
        if restored is None:
            first_step, seconds_before = 0, 0.0
            start = pretrained.params if base is None else base
            state = init_state(model, start, optimizer, mesh, seed=seed, adapter=adapter)
        else:
            first_step, seconds_before = restored.step, restored.host["seconds"]
            if first_step > config.num_steps:
                raise ConfigError(
                    f"{workdir} holds a run of {first_step} steps; num_steps is {config.num_steps}: expected at least "
                    "as many; raise config.num_steps, use --fresh to start over, or another --workdir"
                )
            check_base(base_checksum, restored.host["base"], config.model, workdir)
            state = restored.state
            curriculum.load_state_dict(restored.host["curriculum"])
            counters = Counters(restored.host["counters"])
            kl_controller = KLController(**restored.host["kl_controller"])
            logger.info(f"resuming after step {first_step} of {config.num_steps}")
        del pretrained, restored  # their arrays are on the devices now
        if writes:
            store.truncate(first_step)
        logger.truncate(first_step)

        engine = Engine(
            model,
            policy_params(state.params, base, adapter),
            mesh=mesh,
            dtype=config.dtype,
            max_rows=config.rollout.max_rows,
            decode=tokenizer.decode,
            policy_version=first_step,
            record_experts=config.rollout.router_replay,
        )
        judge = DomainJudge(pool)
        # Of a verdict, with as long again for restarting the worker.
        verdict_s = 2 * config.verifiers.timeout_s / pool.num_workers
        rollout = functools.partial(
            run_groups,
            sampler=engine,
            tokenizer=tokenizer,
            chat=chat,
            judge=SharedJudge(judge, timeout_s=verdict_s),
            params=sampling,
            tasks_per_call=max(1, config.rollout.max_rows // group_size),
        )
        fused_step = make_fused_step(
            learner,
            tokenizer=tokenizer,
            chat=chat,
            judge=judge,
            params=sampling,
            group_size=group_size,
            overlong_buffer=config.algorithm.overlong_buffer,
            mask_truncated=config.algorithm.mask_truncated,
            record_experts=config.rollout.router_replay,
            deadline_s=deadline_s(tasks_per_step * group_size, verdict_s),
        )

        def hold_out(step: int) -> list[Group]:
            """Answers to the held-out tasks after ``step`` updates; sampled once, then read from disk."""
            if not on_first("held out", lambda: step in held_out_store.steps()):
                if step != engine.policy_version:
                    raise ConfigError(
                        f"{workdir}/held_out has no answers of step {step}, and the weights are those of step "
                        f"{engine.policy_version}; put the folder back, or use --fresh to start over"
                    )
                logger.info(f"answering {len(held_out)} held-out tasks after {step} steps")
                answers = rollout(held_out, group_size=config.eval.num_samples, step=step)
                if writes:
                    held_out_store.append(answers)
            return held_out_store.read(step) if writes else []  # who writes reports

        def checkpoint(step: int) -> None:
            checkpointer.save(
                step,
                state,
                host={
                    "curriculum": curriculum.state_dict(),
                    "counters": counters.totals,
                    "kl_controller": vars(kl_controller),
                    "base": base_checksum,
                    "seconds": seconds_before + time.perf_counter() - clock,
                },
            )

        before = hold_out(0)
        timer = PhaseTimer()
        for step in range(first_step, config.num_steps):
            if notice.reached(step):
                checkpoint(step)
                checkpointer.wait()
                raise preempted(step, config.num_steps, workdir)
            began = time.perf_counter()
            tasks = curriculum.sample(step, tasks_per_step)
            if config.schedule == "fused":
                with timer("fused"):
                    state, metrics, sampled = fused_step(
                        state, reference, tasks, step=step, kl_coef=kl_controller.coef, base=base
                    )
                curriculum.update(sampled)
                groups = trainable(sampled, config)
                updates = [metrics] if groups else []
            else:
                with timer("rollout"):
                    sampled = rollout(tasks, group_size=group_size, step=step)
                    curriculum.update(sampled)
                    groups = trainable(sampled, config)
                    for attempt in range(1, config.tasks.max_refills + 1):
                        if not (missing := tasks_per_step - len(groups)):
                            break
                        more = rollout(
                            curriculum.sample(step, missing, attempt),
                            group_size=group_size,
                            step=step,
                        )
                        curriculum.update(more)
                        sampled = sampled + more
                        groups = trainable(sampled, config)
                with timer("prepare"):
                    parts = split(groups, config.train.num_minibatches)
                    advantages = split(
                        step_advantages(groups, config), config.train.num_minibatches
                    )
                    minibatches = learner.prepare_all(
                        [
                            pack(
                                part,
                                of_part,
                                config,
                                num_shards=learner.num_shards,
                                num_column_shards=learner.num_column_shards,
                                min_rows=learner.min_rows,
                            )
                            for part, of_part in zip(parts, advantages, strict=True)
                        ],
                        reference,
                        scores=[shaped_scores(part, config) for part in parts],
                        kl_coef=kl_controller.coef,
                    )
                updates = []
                for _ in range(config.train.num_epochs):
                    for minibatch in minibatches:
                        state, metrics = learner.train_step(state, minibatch, base)
                        updates.append(metrics)
            engine.load_params(policy_params(state.params, base, adapter), policy_version=step + 1)
            if writes:
                store.append(sampled)  # the device is busy with the update meanwhile
            with timer("update"):
                updates = jax.device_get(updates)
            rate = float(np.asarray(learning_rate(counters.totals.get("updates", 0))))
            counters.add("updates", sum(not update["update_skipped"] for update in updates))
            metrics = merge_updates(updates) or {"update_skipped": 1.0}
            if not metrics.get("logprob_delta_mean", 0.0) <= config.max_mismatch:  # NaN is past it
                raise MismatchError(
                    f"step {step}: log-probabilities of sampler and trainer differ by "
                    f"{metrics['logprob_delta_mean']:.3g} nats on average; expected at most max_mismatch="
                    f"{config.max_mismatch}: the run stops, since its gradients would be wrong. "
                    f"Checkpoints of steps {checkpointer.steps()} are intact"
                )
            num_samples = tasks_per_step * group_size
            kl_controller = kl_controller.update(metrics.get("kl", math.nan), num_samples)
            count_losses(counters, sampled, groups)
            seconds = time.perf_counter() - began
            logger.log(
                step,
                {
                    **rollout_metrics(sampled),
                    **metrics,
                    **curriculum.metrics(),
                    **counters.take(),
                    **timer.take(),
                    "learning_rate": rate,
                    "kl_coef": kl_controller.coef,
                    "perf/step_s": seconds,
                    "perf/tokens_per_s": num_tokens(sampled) / seconds,
                    "perf/compiles": sum(p.num_compiles for p in (learner, engine, fused_step)),
                },
            )
            last = step + 1 == config.num_steps
            if last or (step + 1) % config.checkpoint.every == 0:
                checkpoint(step + 1)

        after = hold_out(config.num_steps)
        checkpointer.wait()
        adapters = None if adapter is None else fetch(state.params)

        def report() -> dict[str, Any]:
            if adapter is not None:
                save_adapters(workdir / "adapter", adapter, model, adapters, base=config.model)
            seconds = seconds_before + time.perf_counter() - clock
            done = read_summary(workdir)
            if done is not None and done["steps"] == first_step == config.num_steps:
                seconds = done["seconds"]  # nothing was left to do
            return write_report(
                workdir,
                before=before,
                after=after,
                metrics=read_metrics(workdir),
                seconds=seconds,
                steps=config.num_steps,
                seed=seed,
                model=config.model,
                device=jax.devices()[0].device_kind,
                say=logger.info,
            )

        return on_first("report", report)


def uses_reference(config: ConfigDict) -> bool:
    """Whether anything reads the frozen reference; without a KL it is not even loaded."""
    return config.algorithm.kl_loss_coef > 0 or config.algorithm.use_kl_in_reward


def sampling_params(config: ConfigDict, stop_token_ids: Sequence[int]) -> SamplingParams:
    """How training and held-out answers are sampled."""
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        min_p=rollout.min_p,
        max_tokens=rollout.max_tokens,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(stop_token_ids),
        seed=config.seed,
    )


def objective_config(config: ConfigDict) -> ObjectiveConfig:
    """The loss the config asks for."""
    algorithm = config.algorithm
    return ObjectiveConfig(
        clip_ratio_low=algorithm.clip_ratio_low,
        clip_ratio_high=algorithm.clip_ratio_high,
        clip_ratio_c=algorithm.clip_ratio_c,
        loss_agg_mode=algorithm.loss_agg_mode,
        max_response_length=config.rollout.max_tokens,
        kl_loss_type=algorithm.kl_loss_type,
        kl_loss_coef=algorithm.kl_loss_coef,
        entropy_coef=algorithm.entropy_coef,
        rollout_is=algorithm.rollout_is,
        rollout_is_threshold=algorithm.rollout_is_threshold,
    )


def step_config(config: ConfigDict, sampling: SamplingParams) -> StepConfig:
    """What an update computes; ``sampling`` is how its samples were drawn."""
    return StepConfig(
        objective=objective_config(config),
        transform=LogitTransform.of(sampling),
        dtype=config.dtype,
        remat=config.train.remat,
        micro_rows=config.train.micro_rows,
        use_reference=uses_reference(config),
        adv_estimator=config.algorithm.adv_estimator,
        kl_in_reward=config.algorithm.use_kl_in_reward,
        router_aux_loss_coef=config.algorithm.router_aux_loss_coef,
        adapter=adapter_config(**config.adapter),
    )


def check_settings(config: ConfigDict, num_shards: int) -> None:
    """Raises ConfigError or ValueError for settings that cannot work together; needs no model.

    Args:
      num_shards: over how many shards the mesh spreads the rows of a batch.
    """
    if config.schedule not in ("staged", "fused"):
        raise ConfigError(f"schedule is {config.schedule!r}; expected 'staged' or 'fused'")
    for key, least in (
        ("num_steps", 1),
        ("tasks.tasks_per_step", 1),
        ("tasks.max_refills", 0),
        ("rollout.group_size", 1),
        ("rollout.max_rows", 1),
        ("train.row_length", 0),
        ("train.micro_rows", 0),
        ("train.num_epochs", 1),
        ("train.num_minibatches", 1),
        ("verifiers.num_workers", 1),
        ("checkpoint.every", 1),
        ("checkpoint.keep", 1),
        ("eval.tasks_per_domain", 1),
        ("eval.num_samples", 1),
    ):
        value: Any = functools.reduce(getattr, key.split("."), config)
        if value < least:
            raise ConfigError(f"{key} is {value}; expected at least {least}: change config.{key}")
    if not 0 < config.verifiers.timeout_s < math.inf:
        raise ConfigError(
            f"verifiers.timeout_s is {config.verifiers.timeout_s}; expected a finite number of seconds > 0: "
            "change config.verifiers.timeout_s"
        )
    algorithm = config.algorithm
    if (algorithm.kl_coef > 0) != algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.kl_coef is {algorithm.kl_coef} and use_kl_in_reward is {algorithm.use_kl_in_reward}: kl_coef "
            "is the weight of the KL in the reward; expected both or neither (kl_loss_coef is that in the loss)"
        )
    if algorithm.kl_target > 0 and not algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.kl_target is {algorithm.kl_target}; it steers kl_coef, which counts with use_kl_in_reward: "
            "set that too, or kl_target to 0"
        )
    if config.schedule == "fused":
        for key, value, expected in (
            ("tasks.max_refills", config.tasks.max_refills, 0),
            ("train.num_epochs", config.train.num_epochs, 1),
            ("train.num_minibatches", config.train.num_minibatches, 1),
            ("rollout.stop", tuple(config.rollout.stop), ()),
        ):
            if value != expected:
                raise ConfigError(
                    f"{key} is {value!r}; the fused schedule is one program with one update a step and expects "
                    f"{expected!r}: set config.{key}={expected!r}, or config.schedule='staged'"
                )
        check_divides(config.tasks.tasks_per_step, num_shards)
    # A baseline of the group needs a group, a penalty a buffer within the limit: these raise as the first step would.
    scores = np.zeros((config.tasks.tasks_per_step, config.rollout.group_size), np.float32)
    group_advantages(scores, np.ones_like(scores), estimator=algorithm.adv_estimator)
    if algorithm.overlong_buffer:
        overlong_penalty(
            0,
            max_response_length=config.rollout.max_tokens,
            buffer_length=algorithm.overlong_buffer,
        )


def check_prompts(
    tasks: Sequence[Task], chat: ChatTemplate, model: ModelConfig, max_tokens: int
) -> None:
    """Raises ConfigError when a prompt and its answer would not fit into the model's context."""
    longest = max(len(chat.render_ids(task.prompt)) for task in tasks)
    if longest + max_tokens > model.max_length:
        raise ConfigError(
            f"a prompt has {longest} tokens; with rollout.max_tokens={max_tokens} that is past the model's context of "
            f"{model.max_length}: lower config.rollout.max_tokens, or choose tasks with shorter prompts"
        )


def trainable(groups: Sequence[Group], config: ConfigDict) -> list[Group]:
    """The groups that have advantages, by their raw scores; the others teach nothing."""
    scores = np.stack([group.scores for group in groups])
    signal = groups_with_signal(
        scores, np.isfinite(scores), adv_estimator=config.algorithm.adv_estimator
    )
    return [group for group, has in zip(groups, np.asarray(signal), strict=True) if has]


def shaped_scores(groups: Sequence[Group], config: ConfigDict) -> np.ndarray:
    """float64[P, G], NaN where there is no verdict; with the penalty on answers that near the limit, if asked.

    P is a multiple of ``tasks_per_step`` (rows of NaN follow the groups): programs that take the scores compile once.
    """
    scores = np.stack([group.scores for group in groups])
    if config.algorithm.overlong_buffer:
        lengths = np.array([[t.response_mask.sum() for t in g.trajectories] for g in groups])
        scores = scores + np.asarray(
            overlong_penalty(
                lengths,
                max_response_length=config.rollout.max_tokens,
                buffer_length=config.algorithm.overlong_buffer,
            )
        )
    rows = -len(groups) % config.tasks.tasks_per_step
    return np.pad(scores, ((0, rows), (0, 0)), constant_values=np.nan)


def split(groups: Sequence[T], num_parts: int) -> list[Sequence[T]]:
    """Whole groups in ``num_parts`` parts of about the same size; fewer parts when there are fewer groups."""
    bounds = np.linspace(0, len(groups), num_parts + 1).round().astype(int)
    return [groups[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def step_advantages(groups: Sequence[Group], config: ConfigDict) -> list[np.ndarray]:
    """float32[G] of each group that a step trains on: of all at once, since a baseline may be that of the step."""
    if not groups:
        return []
    scores = shaped_scores(groups, config)
    advantages = group_advantages(
        scores, np.isfinite(scores), estimator=config.algorithm.adv_estimator
    )
    return list(np.asarray(advantages)[: len(groups)])


def pack(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    config: ConfigDict,
    *,
    num_shards: int,
    num_column_shards: int,
    min_rows: int,
) -> TrainBatch:
    """The batch that groups are trained in, [rows, tokens] multiples of the shards, rows of a micro-batch at least."""
    return pack_groups(
        groups,
        advantages,
        length=key_bucket(row_length(groups, config.train.row_length), num_column_shards),
        row_multiple=config.train.micro_rows or num_shards,
        min_rows=min_rows,
        mask_truncated=config.algorithm.mask_truncated,
    )


def num_tokens(groups: Sequence[Group]) -> int:
    """Tokens the policy sampled."""
    return int(sum(t.response_mask.sum() for group in groups for t in group.trajectories))


def count_losses(counters: Counters, sampled: Sequence[Group], trained: Sequence[Group]) -> None:
    """Counts what was sampled and not trained on, and verdicts that were none."""
    counters.add("dropped/zero_variance_groups", len(sampled) - len(trained))
    rewards = [r for group in sampled for t in group.trajectories for r in t.rewards]
    counters.add("reward/failed", sum(r.status == "failed" for r in rewards))
    counters.add("reward/timeout", sum(r.status == "timeout" for r in rewards))


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Figures of everything sampled in a step, refills included."""
    trajectories = [t for group in groups for t in group.trajectories]
    scores = np.stack([group.scores for group in groups])
    scored = scores[np.isfinite(scores)]
    lengths = np.array([t.response_mask.sum() for t in trajectories])
    return {
        "reward/mean": float(scored.mean()) if scored.size else float("nan"),
        "reward/scored_frac": scored.size / scores.size,
        **reward_metrics(reward for t in trajectories for reward in t.rewards),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/truncated_frac": float(
            np.mean([t.stop_reason == "length" for t in trajectories])
        ),
        "zero_std_frac": float(np.mean(zero_variance(scores, np.isfinite(scores)))),
        "num_groups": float(len(groups)),
    }
