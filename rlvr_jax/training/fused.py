"""The fused schedule: rollout, host verifiers and update as one jitted SPMD program.

Between rollout and update the program calls the host (``io_callback``, once for each shard of the rows, so that every
process judges its own), and goes on with the verdicts. Everything else is the staged schedule's own pure functions:
``generate``, ``with_reference``, ``with_advantages``, ``update``. Rows are laid out as fixed token trees, one prompt a
row, since ragged packing needs the host.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from rlvr_jax.distributed.sharding import replicated, row_sharding, spec
from rlvr_jax.envs.single_turn import Judge, make_trajectory, request_id, response_text
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.decoder import STRICT, Params
from rlvr_jax.rollout.generate import Rollout, generate
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import Tokenizer
from rlvr_jax.training.step import Learner, Metrics, update, with_advantages, with_reference
from rlvr_jax.types import (
    Completion,
    Group,
    Reward,
    SamplingParams,
    Task,
    TrainBatch,
    TrainState,
)

FusedStep = Callable[..., tuple[TrainState, Metrics, list[Group]]]


def lay_out(prompts: jax.Array, prompt_lengths: jax.Array, rollout: Rollout) -> TrainBatch:
    """Prompts and their samples as token trees, one prompt a row, without leaving the device.

    Args:
      prompts: int32[P, S], right-padded; a row of length 0 is padding.
      prompt_lengths: int32[P].
      rollout: of the same prompts.

    Returns:
      TrainBatch [P, T], T = key_bucket(S + G * R); advantages and reference log-probabilities are 0.
    """
    P, S = prompts.shape
    _, G, R = rollout.tokens.shape
    T = key_bucket(S + G * R)
    column = jnp.arange(S, dtype=jnp.int32)[None]
    in_prompt = column < prompt_lengths[:, None]
    index = jnp.arange(R, dtype=jnp.int32)[None, None]
    in_sample = index < rollout.lengths[:, :, None]  # [P, G, R]
    sample = jnp.arange(G, dtype=jnp.int32)[None, :, None]
    start = S + sample * R  # column of a sample's first token
    last = (prompt_lengths - 1)[:, None, None]

    def row(prompt: Any, samples: Any, fill: float = 0) -> jax.Array:
        """Joins [P, S] and [P, G, R] to [P, T], ``fill`` where there is no token."""
        prompt = jnp.where(in_prompt, prompt, fill)
        samples = jnp.where(in_sample, samples, fill).reshape(P, G * R)
        return jnp.pad(
            jnp.concatenate([prompt, samples], 1),
            ((0, 0), (0, T - S - G * R)),
            constant_values=fill,
        )

    rows = jnp.arange(P, dtype=jnp.int32)[:, None, None]
    zero = jnp.zeros((P, T), jnp.float32)
    return TrainBatch(
        tokens=row(prompts, rollout.tokens),
        positions=row(column, prompt_lengths[:, None, None] + index),
        segment_ids=row(1, 2 + sample),
        prefix_ids=row(0, 1),
        parents=row(column - 1, jnp.where(index == 0, last, start + index - 1), fill=-1),
        sample_ids=row(-1, rows * G + sample, fill=-1),
        loss_mask=row(0.0, 1.0),
        advantages=zero,
        behavior_logprobs=row(0.0, rollout.logprobs),
        ref_logprobs=zero,
    )


class HostJudge:
    """The host side of the callback: turns arrays into text, has it judged, keeps the groups.

    Called by the program with the rows of one shard at a time, from threads of the runtime's own. Whatever the judge
    does, an answer comes back within the deadline: an exception or a hang ends as a ``failed`` or ``timeout`` reward.

    Args:
      deadline_s: for all verdicts of one call.
    """

    def __init__(self, judge: Judge, tokenizer: Tokenizer, *, deadline_s: float) -> None:
        self._judge, self._tokenizer, self._deadline_s = judge, tokenizer, deadline_s
        self._tasks: Sequence[Task] = ()
        self.rewards: dict[int, list[tuple[Reward, ...]]] = {}
        self.texts: dict[int, list[str]] = {}

    def begin(self, tasks: Sequence[Task]) -> None:
        """The tasks of the next call of the program; row i is task i."""
        self._tasks, self.rewards, self.texts = tasks, {}, {}

    def __call__(
        self, rows: np.ndarray, tokens: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(scores float32[p, G], scored bool[p, G]) of rows int32[p]; tokens int32[p, G, R], lengths int32[p, G]."""
        rows, tokens, lengths = map(np.asarray, (rows, tokens, lengths))
        scores = np.zeros(lengths.shape, np.float32)
        scored = np.zeros(lengths.shape, bool)
        real = [(at, int(row)) for at, row in enumerate(rows) if row < len(self._tasks)]
        for at, row in real:
            self.texts[row] = [
                response_text(ids[:count], self._tokenizer)
                for ids, count in zip(tokens[at], lengths[at], strict=True)
            ]
        pairs = [(self._tasks[row], text) for _, row in real for text in self.texts[row]]
        verdicts = iter(self._verdicts(pairs))
        for at, row in real:
            self.rewards[row] = [next(verdicts) for _ in self.texts[row]]
            for sample, rewards in enumerate(self.rewards[row]):
                if rewards and all(reward.status == "ok" for reward in rewards):
                    scores[at, sample] = sum(r.weight * r.value for r in rewards)
                    scored[at, sample] = True
        return scores, scored

    def _verdicts(self, pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]:
        # A thread of its own, left behind if it hangs: the program must go on.
        background = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="judge")
        try:
            return background.submit(self._judge, pairs).result(self._deadline_s)
        except TimeoutError:
            lost = Reward(name="judge", value=0.0, status="timeout", detail="no verdict in time")
        except Exception as error:  # the judge is the user's; a dead callback would stop every host
            detail = f"{type(error).__name__}: {error}"
            lost = Reward(name="judge", value=0.0, status="failed", detail=detail)
        finally:
            background.shutdown(wait=False)
        return [(lost,)] * len(pairs)


def make_fused_step(
    learner: Learner,
    *,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    judge: Judge,
    params: SamplingParams,
    group_size: int,
    deadline_s: float = 60.0,
) -> FusedStep:
    """``fused_step(state, reference, tasks, step=, kl_coef=)`` -> (state, metrics, groups); donates the state.

    Raises:
      ValueError: (when called) a number of tasks that does not divide over the mesh, or a prompt past the context.
    """
    mesh, config, model = learner.mesh, learner.config, learner.model
    host = HostJudge(judge, tokenizer, deadline_s=deadline_s)
    rows_spec = spec("rows")

    def program(
        state: TrainState,
        reference: Params | None,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        request_ids: jax.Array,
        rows: jax.Array,
        seed: jax.Array,
        kl_coef: jax.Array,
    ) -> tuple[TrainState, Metrics, Rollout]:
        P = prompts.shape[0]
        rollout = generate(
            state.params,
            prompts,
            prompt_lengths,
            request_ids,
            seed,
            config=model,
            num_samples=group_size,
            max_tokens=params.max_tokens,
            transform=config.transform,
            stop_token_ids=tuple(params.stop_token_ids),
            dtype=jnp.dtype(config.dtype),
        )

        def call_host(rows: jax.Array, tokens: jax.Array, lengths: jax.Array) -> Any:
            shapes = (
                jax.ShapeDtypeStruct(lengths.shape, jnp.float32),
                jax.ShapeDtypeStruct(lengths.shape, jnp.bool_),
            )
            return io_callback(host, shapes, rows, tokens, lengths)

        scores, scored = jax.shard_map(
            call_host,
            mesh=mesh,
            in_specs=(rows_spec, rows_spec, rows_spec),
            out_specs=(rows_spec, rows_spec),
            check_vma=False,
        )(rows, rollout.tokens, rollout.lengths)
        batch = lay_out(prompts, prompt_lengths, rollout)
        num_targets = group_size * params.max_tokens
        if reference is not None:
            batch = with_reference(
                batch, reference, model=model, config=config, num_targets=num_targets
            )
        batch = with_advantages(batch, scores, scored, kl_coef, config=config)
        # Samples without a verdict are not trained on, as in the staged schedule.
        judged = scored.reshape(-1)[jnp.maximum(batch.sample_ids, 0)] & (batch.sample_ids >= 0)
        batch = dataclasses.replace(batch, loss_mask=jnp.where(judged, batch.loss_mask, 0.0))
        state, metrics = update(
            state,
            batch,
            model=model,
            optimizer=learner.optimizer,
            config=config,
            num_shards=learner.num_shards,
            num_targets=num_targets,
            num_samples=P * group_size,
        )
        return state, metrics, rollout

    rows_sharding, whole = row_sharding(mesh), replicated(mesh)
    jitted = jax.jit(
        program,
        donate_argnums=0,
        out_shardings=(learner.shardings, whole, Rollout(*(rows_sharding,) * 4)),
        compiler_options=STRICT,
    )

    def fused_step(
        state: TrainState,
        reference: Params | None,
        tasks: Sequence[Task],
        *,
        step: int,
        kl_coef: float,
    ) -> tuple[TrainState, Metrics, list[Group]]:
        if len(tasks) % learner.num_shards:
            raise ValueError(
                f"tasks_per_step ({len(tasks)}) must be divisible by the data and fsdp axes "
                f"({learner.num_shards}) in the fused schedule; change config.tasks.tasks_per_step or config.mesh"
            )
        prompts = [chat.render_ids(task.prompt) for task in tasks]
        longest = max(map(len, prompts))
        if longest + params.max_tokens > model.max_length:
            raise ValueError(
                f"a prompt has {longest} tokens; with max_tokens={params.max_tokens} that is past the model's "
                f"context of {model.max_length}: shorten the prompt or lower max_tokens"
            )
        tokens = np.zeros((len(tasks), key_bucket(longest)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ids = np.array([request_id(step, task) for task in tasks], np.uint32)
        numbers = np.arange(len(tasks), dtype=np.int32)
        arrays = jax.device_put((tokens, lengths, ids, numbers), rows_sharding)
        scalars = jax.device_put((np.uint32(params.seed), np.float32(kl_coef)), whole)
        host.begin(tasks)
        with jax.set_mesh(mesh):
            state, metrics, rollout = jitted(state, reference, *arrays, *scalars)
        rollout = jax.device_get(rollout)
        groups = []
        for row, task in enumerate(tasks):
            trajectories = tuple(
                make_trajectory(
                    prompts[row],
                    Completion(
                        tokens=rollout.tokens[row, g, : rollout.lengths[row, g]].copy(),
                        logprobs=rollout.logprobs[row, g, : rollout.lengths[row, g]].copy(),
                        stop_reason="stop" if rollout.stopped[row, g] else "length",
                        policy_version=step,
                    ),
                    rewards=host.rewards[row][g],
                    index=g,
                    text=host.texts[row][g],
                )
                for g in range(group_size)
            )
            groups.append(Group(task=task, trajectories=trajectories, step=step))
        return state, metrics, groups

    return fused_step
