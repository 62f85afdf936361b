"""Runs optimizer steps of the staged schedule from its own parts, each phase timed to the end.

The parts are those of ``training/rl.py``: ``run_groups`` over the engine and the verifier pool, ``group_advantages``,
``pack_groups``, ``Learner``. Unlike a run, every phase waits for the device, so that its time is its own.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.measure import (
    CompileLog,
    Program,
    cache_bytes,
    count_flops,
    cpu_seconds,
    describe_machine,
    foreign_share,
    gib,
    matmul_peak,
    memory_bound_bytes,
    peak_rss_bytes,
)
from benchmarks.updates import Programs
from benchmarks.work import MODELS, Shape, even_fraction, number_tasks, number_tokenizer
from rlvr_jax.algorithms.advantages import group_advantages
from rlvr_jax.data.packing import pack_groups, packing_stats
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.envs.single_turn import run_groups
from rlvr_jax.metrics import PhaseTimer
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.types import Completion, Reward, SamplingParams, Task

PHASES = ("rollout", "verify", "ref", "update", "other", "step")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run.

    Attributes:
      model: a name of ``MODELS``.
      dtype: of activations, in sampler and trainer; parameters are float32.
      remat, micro_rows: of the update; ``micro_rows`` 0 is all rows at once.
      samples_per_row: how many samples share a row of the batch with their prompt; sets the row length.
      mesh: ``data`` (replicas) or ``fsdp`` (one copy, spread over the devices).
      max_rows: samples decoded together.
      verifier_workers: processes that judge.
      steps, warmup: measured, and run before them; the first one compiles.
    """

    model: str
    shape: Shape
    dtype: str
    remat: str
    micro_rows: int
    samples_per_row: int
    mesh: str
    max_rows: int
    verifier_workers: int
    steps: int
    warmup: int
    seed: int


def measure_step(settings: Settings) -> dict[str, Any]:
    """Runs the steps and returns the report: plain JSON values, times in seconds, memory in GiB."""
    jax.config.update("jax_enable_compilation_cache", False)  # compile_s is that of a first run
    model, shape = MODELS[settings.model], settings.shape
    mesh = make_mesh(data=-1) if settings.mesh == "data" else make_mesh(data=1, fsdp=-1)
    peak = matmul_peak(mesh, settings.dtype)
    log = CompileLog()

    tokenizer = number_tokenizer(model.vocab_size)
    sampling = SamplingParams(max_tokens=shape.new_tokens, seed=settings.seed)
    programs = Programs(
        model=model,
        mesh=mesh,
        dtype=settings.dtype,
        remat=settings.remat,
        micro_rows=settings.micro_rows,
        seed=settings.seed,
    )
    learner = programs.learner(sampling)
    update = Program(learner._update, mesh)
    score = Program(learner._with_reference, mesh)
    learner = dataclasses.replace(learner, _update=update, _with_reference=score)
    params = programs.params()
    state = programs.state(params)
    reference = learner.place(params)
    del params
    engine = Engine(
        model, state.params, mesh=mesh, dtype=settings.dtype, max_rows=settings.max_rows
    )
    generate = Program(engine._generate, mesh)
    setattr(engine, "_generate", generate)  # noqa: B010  the engine has no seam for a measured program
    row_length = key_bucket(shape.prompt_len + settings.samples_per_row * shape.new_tokens)

    timer = PhaseTimer()
    spec = VerifierSpec(even_fraction)
    records, fill = [], 0.0
    with VerifierPool(settings.verifier_workers) as pool:

        def judge(pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]:
            with timer("verify"):
                return [(r,) for r in pool.score([(task, text, spec) for task, text in pairs])]

        rollout = functools.partial(
            run_groups,
            sampler=_TimedSampler(engine, timer),
            tokenizer=tokenizer,
            chat=ChatTemplate(tokenizer),
            judge=judge,
            params=sampling,
            group_size=shape.group,
            tasks_per_call=max(1, settings.max_rows // shape.group),
        )
        for step in range(settings.warmup + settings.steps):
            tasks = number_tasks(model.vocab_size, shape, settings.seed + step)
            cpu_before, began = cpu_seconds(), time.perf_counter()
            groups = rollout(tasks, step=step)
            scores = np.stack([group.scores for group in groups])
            advantages = group_advantages(scores, np.isfinite(scores), estimator="grpo")
            batch = pack_groups(
                groups,
                list(np.asarray(advantages)),
                length=row_length,
                row_multiple=settings.micro_rows or learner.num_shards,
            )
            with timer("ref"):
                minibatch = learner.prepare(batch, reference, scores=scores, kl_coef=0.0)
                jax.block_until_ready(minibatch.batch)
            with timer("update"):
                state, metrics = learner.train_step(state, minibatch)
                metrics = jax.device_get(metrics)
                jax.block_until_ready(state)
            engine.load_params(state.params, policy_version=step + 1)
            wall = time.perf_counter() - began
            record = _seconds(timer)
            record["other"] = wall - sum(record.values())
            record["step"] = wall
            record["foreign_cpu"] = foreign_share(cpu_before, cpu_seconds(), wall)
            records.append(record)
            fill = packing_stats(batch)["fill"]
            _check(groups, metrics, shape)

    flops = count_flops(model, shape)
    measured = records[settings.warmup :]
    median = {name: statistics.median(r[name] for r in measured) for name in PHASES}
    best = {name: min(r[name] for r in measured) for name in PHASES}
    cache = cache_bytes(model, shape, settings.dtype)
    bound = memory_bound_bytes(model, cache)
    arrays = {
        "generate": generate.peak_bytes(),
        "with_reference": score.peak_bytes(),
        "update": update.peak_bytes(),
    }
    compiles = {name: log.counts[name] for name in arrays}
    return {
        "bench": "grpo",
        "peer": "rlvr_jax",
        **dataclasses.asdict(settings),
        **dataclasses.asdict(shape),
        "sequences": shape.sequences,
        **{f"{name}_s": round(median[name], 5) for name in PHASES},
        "rollout_tok_s": round(shape.sampled_tokens / median["rollout"], 1),
        "update_tok_s": round(shape.sequence_tokens / median["update"], 1),
        "best": {
            **{f"{name}_s": round(best[name], 5) for name in PHASES},
            "rollout_tok_s": round(shape.sampled_tokens / best["rollout"], 1),
            "update_tok_s": round(shape.sequence_tokens / best["update"], 1),
        },
        "compile_s": round(log.seconds, 2),
        "first_step_s": round(records[0]["step"], 3),
        "compiles": compiles,
        "compiles_ok": all(count == 1 for count in compiles.values()),
        "other_compiles": sum(log.counts.values()) - sum(compiles.values()),
        "peak_rss_gib": gib(peak_rss_bytes()),
        "peak_arrays_gib": {name: gib(size) for name, size in arrays.items()},
        "cache_gib": gib(cache),
        "memory_bound_gib": gib(bound),
        "memory_bound_ok": max(arrays.values()) <= bound,
        "row_length": row_length,
        "fill": round(fill, 4),
        "flops": {name: value for name, value in dataclasses.asdict(flops).items()},
        "matmul_peak_gflops": round(peak / 1e9, 1),
        "roofline_share": {
            "rollout": round(flops.rollout / median["rollout"] / peak, 4),
            "ref": round(flops.reference / median["ref"] / peak, 4),
            "update": round(flops.update / median["update"] / peak, 4),
            "step": round(flops.step / median["step"] / peak, 4),
        },
        "foreign_cpu_share": round(statistics.median(r["foreign_cpu"] for r in measured), 3),
        "loadavg": round(os.getloadavg()[0], 2),
        "all_steps": [{k: round(v, 5) for k, v in r.items()} for r in records],
        "machine": describe_machine(),
    }


class _TimedSampler:
    """The engine, its seconds counted as ``rollout``."""

    def __init__(self, engine: Engine, timer: PhaseTimer) -> None:
        self._engine, self._timer = engine, timer

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> list[list[Completion]]:
        with self._timer("rollout"):
            return self._engine.sample(
                prompts, params=params, num_samples=num_samples, request_ids=request_ids
            )


def _seconds(timer: PhaseTimer) -> dict[str, float]:
    return {
        name.removeprefix("time/").removesuffix("_s"): value for name, value in timer.take().items()
    }


def _check(groups: Any, metrics: dict[str, Any], shape: Shape) -> None:
    """Raises RuntimeError when a step was not the work that is counted."""
    lengths = {int(t.response_mask.sum()) for group in groups for t in group.trajectories}
    scored = all(t.scored for group in groups for t in group.trajectories)
    if lengths != {shape.new_tokens} or not scored or metrics["update_skipped"]:
        raise RuntimeError(
            f"the step is not the work that is measured: answers of {sorted(lengths)} tokens (expected "
            f"{shape.new_tokens}), all judged: {scored}, update skipped: {bool(metrics['update_skipped'])}"
        )
