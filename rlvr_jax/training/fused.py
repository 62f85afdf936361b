"""The fused schedule: rollout, host verifiers and update as one jitted SPMD program.

Between rollout and update the program calls the host (``io_callback``, once for each shard of the rows, so that every
process judges its own), and goes on with the verdicts. Everything else is the staged schedule's own pure functions:
``generate``, ``with_reference``, ``with_advantages``, ``update``. Rows are laid out as fixed token trees, one prompt a
row, since ragged packing needs the host; what the staged schedule leaves out of its batch is masked here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.typing import ArrayLike

from rlvr_jax.algorithms.shaping import filter_groups, overlong_penalty
from rlvr_jax.distributed.mesh import ROW_AXES
from rlvr_jax.distributed.placement import fetch, put
from rlvr_jax.distributed.processes import DEADLINE_S, gather
from rlvr_jax.distributed.sharding import constrain, replicated, row_sharding, spec
from rlvr_jax.envs.single_turn import Judge, make_trajectory, request_id, response_text
from rlvr_jax.errors import ConfigError
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.decoder import Params, compiler_options
from rlvr_jax.models.policy_head import RowBounds
from rlvr_jax.rollout.engine import min_rows
from rlvr_jax.rollout.generate import Rollout, generate
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import Tokenizer
from rlvr_jax.training.shared_judge import decode_rewards, encode_rewards
from rlvr_jax.training.step import (
    Learner,
    Metrics,
    policy_params,
    update,
    with_advantages,
    with_reference,
)
from rlvr_jax.types import (
    Completion,
    Group,
    Reward,
    SamplingParams,
    Task,
    TrainBatch,
    TrainState,
)

# JAX hands the callback copies of its arguments, and makes those of 100 KiB and more in the thread pool of its CPU
# client, all threads of which may be waiting in this very callback when there are several devices. Smaller ones are
# copied at once.
PIECE = 1 << 14  # int32s


def lay_out(
    prompts: jax.Array, prompt_lengths: jax.Array, rollout: Rollout, *, num_column_shards: int = 1
) -> TrainBatch:
    """Prompts and their samples as token trees, one prompt a row, without leaving the device.

    Args:
      prompts: int32[P, S], right-padded; a row of length 0 is padding.
      prompt_lengths: int32[P].
      rollout: of the same prompts.
      num_column_shards: over how many shards the tokens of a row are spread.

    Returns:
      TrainBatch [P, T], T = key_bucket(S + G * R, num_column_shards); advantages and reference log-probabilities are 0.
    """
    P, S = prompts.shape
    _, G, R = rollout.tokens.shape
    T = key_bucket(S + G * R, num_column_shards)
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

    experts = None
    if (
        rollout.experts is not None and rollout.prompt_experts is not None
    ):  # -1 where there is no token
        of_samples = rollout.experts.reshape(P, G * R, *rollout.experts.shape[3:])
        experts = jnp.concatenate([rollout.prompt_experts, of_samples], 1)
        experts = jnp.pad(experts, ((0, 0), (0, T - S - G * R), (0, 0), (0, 0)), constant_values=-1)

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
        experts=experts,
    )


def resize(tree: Any, *, rows: int, num_shards: int, axis: str = "rows") -> Any:
    """Arrays [num_shards * p, ...] -> [num_shards * rows, ...]: each shard's rows are cut, or filled up with zeros.

    No data moves between the shards. ``axis`` is the logical axis that rows lie on afterwards: "rows", or "tokens" to
    spread those of a shard over its context axis.
    """

    def one(x: jax.Array) -> jax.Array:
        x = x.reshape(num_shards, -1, *x.shape[1:])[:, :rows]
        x = jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
        return constrain(x.reshape(-1, *x.shape[2:]), axis, *[None] * (x.ndim - 2))

    return jax.tree.map(one, tree)


def groups_with_signal(
    scores: ArrayLike, scored: ArrayLike, *, adv_estimator: str
) -> np.ndarray | jax.Array:
    """Which groups have advantages at all, and are trained on.

    Args:
      scores: float[P, G], as the verifiers gave them; anything where not scored.
      scored: bool[P, G].
      adv_estimator: with the batch as its baseline, all groups have if any two scores differ; else those whose own do.

    Returns:
      bool[P].
    """
    if adv_estimator != "reinforce_plus_plus":
        return filter_groups(scores, scored)
    scores, scored = jnp.asarray(scores), jnp.asarray(scored)
    return jnp.tile(filter_groups(scores.reshape(1, -1), scored.reshape(1, -1)), scores.shape[0])


def check_divides(num_tasks: int, num_shards: int) -> None:
    """Raises ConfigError when the rows of the program, one a task, do not divide over the mesh."""
    if num_tasks % num_shards:
        raise ConfigError(
            f"tasks.tasks_per_step ({num_tasks}) must be divisible by the data, fsdp and expert axes of the mesh "
            f"({num_shards}) in the fused schedule; change config.tasks.tasks_per_step or config.mesh"
        )


class HostJudge:
    """The host side of the callback: turns arrays into text, has it judged, keeps texts and verdicts.

    Called by the program with the rows of one shard at a time, from threads of the runtime's own. Whatever the judge
    does, an answer comes back within the deadline: an exception or a hang ends as a ``failed`` or ``timeout`` reward.

    Args:
      mesh: of the program.
      deadline_s: for all verdicts of one call.
    """

    def __init__(
        self, judge: Judge, tokenizer: Tokenizer, mesh: jax.sharding.Mesh, *, deadline_s: float
    ) -> None:
        self._judge, self._tokenizer, self._deadline_s = judge, tokenizer, deadline_s
        # XLA:CPU ends the process when one of its devices waits in a collective for the others for 60 s, as they would
        # for the shard whose verdicts take longest. There, all calls return together.
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self._num_calls = len(mesh.local_devices) if on_cpu else 1
        self._tasks: Sequence[Task] = ()
        self.rewards: dict[int, list[tuple[Reward, ...]]] = {}
        self.texts: dict[int, list[str]] = {}

    def begin(self, tasks: Sequence[Task]) -> None:
        """The tasks of the next call of the program; row i is task i."""
        self._tasks, self.rewards, self.texts = tasks, {}, {}
        self._together = threading.Barrier(self._num_calls)

    def __call__(
        self, copy: Any, rows: Any, lengths: Any, *pieces: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """``judge_rows``, for all calls at once."""
        answer = self.judge_rows(int(copy), rows, lengths, pieces)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._together.wait(2 * self._deadline_s)
        return answer

    def judge_rows(
        self, copy: int, rows: Any, lengths: Any, pieces: Sequence[Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Judges the rows of a shard.

        Args:
          copy: which of the identical copies of these rows the caller holds; the first is judged.
          rows: int32[p].
          lengths: int32[p, G].
          pieces: int32[p, G, R], the tokens, flat and cut.

        Returns:
          (scores, scored): float32[p, G] both, 0 where there is no verdict (and everywhere, for the other copies).
        """
        lengths = np.asarray(lengths)
        scores, scored = np.zeros(lengths.shape, np.float32), np.zeros(lengths.shape, np.float32)
        if copy > 0:
            return scores, scored
        rows = [int(row) for row in np.asarray(rows)]
        tokens = np.concatenate([np.asarray(piece) for piece in pieces])
        tokens = tokens.reshape(*lengths.shape, -1)
        for at, row in enumerate(rows):
            self.texts[row] = [
                response_text(ids[:count], self._tokenizer)
                for ids, count in zip(tokens[at], lengths[at], strict=True)
            ]
        pairs = [(self._tasks[row], text) for row in rows for text in self.texts[row]]
        verdicts = iter(self._verdicts(pairs))
        for at, row in enumerate(rows):
            self.rewards[row] = [next(verdicts) for _ in self.texts[row]]
            for sample, rewards in enumerate(self.rewards[row]):
                if rewards and all(reward.status == "ok" for reward in rewards):
                    scores[at, sample] = sum(r.weight * r.value for r in rewards)
                    scored[at, sample] = 1.0
        return scores, scored

    def share(self) -> None:
        """Makes ``rewards`` and ``texts`` those of all rows, when the program of every process has ended."""
        if jax.process_count() == 1:
            return
        own = [
            [row, encode_rewards(rewards), self.texts[row]] for row, rewards in self.rewards.items()
        ]
        for share in gather("fused", own, deadline_s=DEADLINE_S + self._deadline_s):
            for row, rewards, texts in share:
                self.rewards[row], self.texts[row] = decode_rewards(rewards), texts

    def _verdicts(self, pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]:
        answers: queue.SimpleQueue[list[tuple[Reward, ...]] | Reward] = queue.SimpleQueue()

        def judge() -> None:
            try:
                verdicts = self._judge(pairs)
                if len(verdicts) != len(pairs):
                    raise ValueError(f"{len(verdicts)} verdicts for {len(pairs)} responses")
                answers.put(verdicts)
            except (
                BaseException
            ) as error:  # whatever it is: a callback that raises stops every host
                detail = f"{type(error).__name__}: {error}"
                answers.put(Reward(name="judge", value=0.0, status="failed", detail=detail))

        # A thread of its own, left behind if it hangs: the program goes on, and the interpreter exits without it.
        threading.Thread(target=judge, name="judge", daemon=True).start()
        try:
            answer = answers.get(timeout=self._deadline_s)
        except queue.Empty:
            detail = f"no verdicts within {self._deadline_s:g} s"
            answer = Reward(name="judge", value=0.0, status="timeout", detail=detail)
        return [(answer,)] * len(pairs) if isinstance(answer, Reward) else answer


def judge_on_host(
    host: HostJudge,
    mesh: jax.sharding.Mesh,
    rows: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Calls the host from inside a program, once for each shard of the rows.

    Args:
      rows: int32[P], which task each row belongs to.
      tokens: int32[P, G, R].
      lengths: int32[P, G].

    Returns:
      (scores float32[P, G], 0 where there is no verdict; scored bool[P, G]).
    """

    def call(rows: jax.Array, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = tokens.reshape(-1)
        pieces = [flat[start : start + PIECE] for start in range(0, flat.size, PIECE)]
        answer = jax.ShapeDtypeStruct(lengths.shape, jnp.float32)
        copy = jax.lax.axis_index(copies)
        scores, scored = io_callback(host, (answer, answer), copy, rows, lengths, *pieces)
        return jax.lax.psum(scores, copies), jax.lax.psum(scored, copies) > 0

    by_row = spec("rows")
    copies = tuple(axis for axis in mesh.axis_names if axis not in ROW_AXES)  # of the same rows
    return jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(by_row, by_row, by_row),
        out_specs=(by_row, by_row),
        check_vma=False,
    )(rows, tokens, lengths)


@dataclasses.dataclass(frozen=True, eq=False)
class FusedStep:
    """The program and its host side. ``make_fused_step`` makes it."""

    learner: Learner
    chat: ChatTemplate
    host: HostJudge
    params: SamplingParams
    group_size: int
    _program: Callable[..., tuple[TrainState, Metrics, Rollout]]

    @property
    def num_compiles(self) -> int:
        """How many shapes of the program were compiled so far."""
        return self._program._cache_size()  # pyright: ignore[reportFunctionMemberAccess]

    def __call__(
        self,
        state: TrainState,
        reference: Params | None,
        tasks: Sequence[Task],
        *,
        step: int,
        kl_coef: float,
        base: Params | None = None,
    ) -> tuple[TrainState, Metrics, list[Group]]:
        """Samples, judges and updates once; returns (state, metrics, groups). The state is donated.

        ``base`` is as of ``step.update``.

        Raises:
          ValueError: a number of tasks that does not divide over the mesh, or a prompt past the context.
        """
        mesh, params, max_length = self.learner.mesh, self.params, self.learner.model.max_length
        check_divides(len(tasks), self.learner.num_shards)
        prompts = [self.chat.render_ids(task.prompt) for task in tasks]
        longest = max(map(len, prompts))
        if longest + params.max_tokens > max_length:
            raise ValueError(
                f"a prompt has {longest} tokens; with max_tokens={params.max_tokens} that is past the model's "
                f"context of {max_length}: shorten the prompt or lower max_tokens"
            )
        tokens = np.zeros((len(tasks), key_bucket(longest)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        ids = np.array([request_id(step, task) for task in tasks], np.uint32)
        numbers = np.arange(len(tasks), dtype=np.int32)
        arrays = put((tokens, lengths, ids, numbers), row_sharding(mesh))
        scalars = put((np.uint32(params.seed), np.float32(kl_coef)), replicated(mesh))
        self.host.begin(tasks)
        with jax.set_mesh(mesh):
            state, metrics, rollout = self._program(state, reference, base, *arrays, *scalars)
        rollout = fetch(rollout)
        self.host.share()
        return state, metrics, self._groups(tasks, prompts, rollout, step)

    def trace(
        self,
        state: TrainState,
        reference: Params | None,
        num_tasks: int,
        width: int,
        *,
        base: Params | None = None,
    ) -> jax.stages.Traced:
        """The program, for prompts int32[num_tasks, width]; weights may be shapes with shardings."""
        mesh = self.learner.mesh

        def of_tasks(dtype: Any, *shape: int) -> Any:
            sharding = row_sharding(mesh)
            return jax.ShapeDtypeStruct((num_tasks, *shape), dtype, sharding=sharding)

        seed, kl_coef = (
            jax.ShapeDtypeStruct((), dtype, sharding=replicated(mesh))
            for dtype in (jnp.uint32, jnp.float32)
        )
        with jax.set_mesh(mesh):
            return self._program.trace(  # pyright: ignore[reportFunctionMemberAccess]
                state,
                reference,
                base,
                of_tasks(jnp.int32, width),
                of_tasks(jnp.int32),
                of_tasks(jnp.uint32),
                of_tasks(jnp.int32),
                seed,
                kl_coef,
            )

    def _groups(
        self, tasks: Sequence[Task], prompts: Sequence[list[int]], rollout: Any, step: int
    ) -> list[Group]:
        """What was sampled (a ``Rollout`` of NumPy arrays) and judged, as the staged schedule has it."""
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
                    rewards=self.host.rewards[row][g],
                    index=g,
                    text=self.host.texts[row][g],
                )
                for g in range(self.group_size)
            )
            groups.append(Group(task=task, trajectories=trajectories, step=step))
        return groups


def make_fused_step(
    learner: Learner,
    *,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    judge: Judge,
    params: SamplingParams,
    group_size: int,
    overlong_buffer: int,
    mask_truncated: bool,
    record_experts: bool,
    deadline_s: float,
) -> FusedStep:
    """Jits the program; it compiles once a shape.

    Args:
      overlong_buffer: tokens before ``params.max_tokens`` from which a response loses score; 0 for none.
      mask_truncated: do not train on responses that ran out of tokens.
      record_experts: train with the experts that tokens went to while sampling.
      deadline_s: for the verdicts of one shard of the rows.
    """
    mesh, config, model = learner.mesh, learner.config, learner.model
    num_shards, num_column_shards = learner.num_shards, learner.num_column_shards
    sized = functools.partial(resize, num_shards=num_shards)
    host = HostJudge(judge, tokenizer, mesh, deadline_s=deadline_s)

    def program(
        state: TrainState,
        reference: Params | None,
        base: Params | None,
        prompts: jax.Array,
        prompt_lengths: jax.Array,
        request_ids: jax.Array,
        rows: jax.Array,
        seed: jax.Array,
        kl_coef: jax.Array,
    ) -> tuple[TrainState, Metrics, Rollout]:
        # Rows that only fill up, where fewer would add up in another order: not the trainer's, when sampling, and not
        # the sampler's, when training.
        own = prompts.shape[0] // num_shards
        sampled = max(-(-own // num_column_shards), -(-min_rows(mesh) // group_size))
        trained_on = max(own, learner.min_rows // num_shards)
        padded, padded_lengths, padded_ids = sized(
            (prompts, prompt_lengths, request_ids), rows=sampled * num_column_shards, axis="tokens"
        )
        rollout = generate(
            policy_params(state.params, base, config.adapter),
            padded,
            padded_lengths,
            padded_ids,
            seed,
            config=model,
            num_samples=group_size,
            max_tokens=params.max_tokens,
            transform=config.transform,
            stop_token_ids=tuple(params.stop_token_ids),
            dtype=jnp.dtype(config.dtype),
            record_experts=record_experts,
        )

        rollout = sized(rollout, rows=own)
        verdicts = judge_on_host(host, mesh, rows, rollout.tokens, rollout.lengths)
        prompts, prompt_lengths, samples, (scores, scored) = sized(
            (prompts, prompt_lengths, rollout, verdicts), rows=trained_on
        )
        # Whom the staged schedule packs: judged samples of groups with signal, on the score before any shaping.
        judged = (
            scored & groups_with_signal(scores, scored, adv_estimator=config.adv_estimator)[:, None]
        )
        trained = judged & samples.stopped if mask_truncated else judged
        if overlong_buffer:
            scores += overlong_penalty(
                samples.lengths,
                max_response_length=params.max_tokens,
                buffer_length=overlong_buffer,
            )
        batch = lay_out(prompts, prompt_lengths, samples, num_column_shards=num_column_shards)
        of_sample = trained.reshape(-1)[jnp.maximum(batch.sample_ids, 0)] & (batch.sample_ids >= 0)
        batch = dataclasses.replace(batch, loss_mask=jnp.where(of_sample, batch.loss_mask, 0.0))
        bounds = RowBounds(group_size * params.max_tokens, prefix_width=prompts.shape[1])
        if reference is not None:
            batch = with_reference(batch, reference, model=model, config=config, bounds=bounds)
        [batch] = with_advantages([batch], [scores], [judged], kl_coef, config=config)
        state, metrics = update(
            state,
            batch,
            base=base,
            model=model,
            optimizer=learner.optimizer,
            config=config,
            num_shards=num_shards,
            bounds=bounds,
            num_samples=scores.size,
        )
        return state, metrics, rollout._replace(prompt_experts=None, experts=None)

    return FusedStep(
        learner=learner,
        chat=chat,
        host=host,
        params=params,
        group_size=group_size,
        _program=jax.jit(
            program,
            donate_argnums=0,
            out_shardings=(learner.shardings, replicated(mesh), row_sharding(mesh)),
            compiler_options=compiler_options(learner.mesh, backward=True),
        ),
    )
