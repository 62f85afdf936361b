"""The only device update: loss, gradient, clipping, guard, Adam, as one pure function of (state, batch).

``update`` is that function, and ``gradient_step`` the part of it that fine-tuning shares. ``Learner`` jits it, and what
a batch needs before it (the reference's log-probabilities, the KL taken off the reward), for one mesh, with donated
state and pinned shardings. The fused schedule calls the same pure functions inside its own program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlvr_jax.algorithms.advantages import group_advantages
from rlvr_jax.algorithms.aggregation import spread_by_sample
from rlvr_jax.algorithms.kl import kl_penalty_by_sample
from rlvr_jax.algorithms.objective import (
    ObjectiveConfig,
    batch_weights,
    merge_metrics,
    rl_objective,
)
from rlvr_jax.distributed.mesh import num_column_shards, num_row_shards
from rlvr_jax.distributed.placement import put
from rlvr_jax.distributed.sharding import batch_sharding, replicated
from rlvr_jax.models.adapters import AdapterConfig, with_adapters
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import REMAT_POLICIES, Params, compiler_options, widened
from rlvr_jax.models.moe import Load
from rlvr_jax.models.policy_head import (
    LogitTransform,
    RowBounds,
    batch_logprobs,
    replayed_logprobs,
)
from rlvr_jax.training.lean import AnyOptimizer, apply_gradients, check_host_memory
from rlvr_jax.training.router import add_router_loss, router_metrics, whole_load
from rlvr_jax.training.state import model_shardings
from rlvr_jax.types import TrainBatch, TrainState

Metrics = dict[str, jax.Array]
LossFn = Callable[[Params, Any], tuple[jax.Array, Metrics]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What an update computes, and how. Hashable: a static argument.

    Attributes:
      objective: the loss.
      transform: of the logits; the sampler's.
      dtype: of activations; the sampler's.
      remat: what the backward pass keeps.
      micro_rows: rows whose gradient is computed at once; 0 for all. Gradients add up with the global denominator.
      use_reference: whether batches carry a frozen reference's log-probabilities.
      adv_estimator: how scores become advantages.
      kl_in_reward: take the KL to the reference off the score, before advantages are made.
      router_aux_loss_coef: of the load-balancing loss of a mixture of experts.
      adapter: what is trained, when it is not all parameters; the programs then take the frozen ones as ``base``.
    """

    objective: ObjectiveConfig
    transform: LogitTransform
    dtype: str = "float32"
    remat: str = "full"
    micro_rows: int = 0
    use_reference: bool = True
    adv_estimator: str = "grpo"
    kl_in_reward: bool = False
    router_aux_loss_coef: float = 0.0
    adapter: AdapterConfig | None = None

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"train.remat is {self.remat!r}; expected one of {', '.join(REMAT_POLICIES)}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected float32 or bfloat16")
        if self.transform.temperature == 0:
            raise ValueError("temperature is 0: greedy samples have no gradient; sample with > 0")


def policy_params(trained: Params, base: Params | None, adapter: AdapterConfig | None) -> Params:
    """What the decoder computes with: all that is trained, or the frozen base with trained adapters beside it."""
    return trained if adapter is None else with_adapters(base, trained, adapter)


def update(
    state: TrainState,
    batch: TrainBatch,
    base: Params | None = None,
    *,
    model: ModelConfig,
    optimizer: AnyOptimizer,
    config: StepConfig,
    num_shards: int,
    bounds: RowBounds,
    num_samples: int,
) -> tuple[TrainState, Metrics]:
    """One optimizer step of reinforcement learning on a batch; see ``gradient_step``.

    Args:
      state, batch: as their types say.
      base: the frozen parameters, when ``config.adapter`` is trained.
      model: shape of the decoder.
      optimizer: optax's, or a lean one.
      config: what to compute.
      num_shards: over how many shards the rows are spread; micro-batches take rows from each.
      bounds: of the rows of ``batch``.
      num_samples: upper bound of ``batch.sample_ids`` + 1.

    Returns:
      (new state, metrics: float32[] each).

    Raises:
      ValueError: the rows are not a multiple of ``config.micro_rows``.
    """
    weights, token_weights = batch_weights(batch, config.objective, num_samples=num_samples)
    coef, k = config.router_aux_loss_coef, model.experts_per_token

    def score(params: Params, micro: TrainBatch) -> tuple[jax.Array, jax.Array, Load | None]:
        return replayed_logprobs(
            model,
            policy_params(params, base, config.adapter),
            micro,
            transform=config.transform,
            bounds=bounds,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
        )

    def loss_fn(params: Params, piece: Any) -> tuple[jax.Array, Metrics]:
        micro, micro_weights, micro_token_weights = piece
        logprobs, entropy, load = score(params, micro)
        loss, metrics = rl_objective(
            logprobs,
            entropy,
            micro,
            micro_weights,
            micro_token_weights,
            config.objective,
            has_reference=config.use_reference,
        )
        return add_router_loss(loss, metrics, load, coef=coef, experts_per_token=k, whole=whole)

    rows = batch.tokens.shape[0]
    micro_rows = min(config.micro_rows or rows, rows)
    if rows % micro_rows:
        raise ValueError(
            f"a batch of {rows} rows must be divisible by train.micro_rows ({micro_rows}); "
            "change config.train.micro_rows"
        )
    pieces = jax.tree.map(
        functools.partial(_split_rows, micro_rows=micro_rows, num_shards=num_shards),
        (batch, weights, token_weights),
    )
    whole = whole_load(lambda piece: score(state.params, piece[0])[2], pieces, coef=coef)
    state, metrics = gradient_step(
        state, pieces, loss_fn=loss_fn, optimizer=optimizer, trains=token_weights.sum() > 0
    )
    return state, router_metrics(metrics, experts_per_token=k)


def gradient_step(
    state: TrainState,
    pieces: Any,
    *,
    loss_fn: LossFn,
    optimizer: AnyOptimizer,
    trains: jax.Array,
) -> tuple[TrainState, Metrics]:
    """The optimizer step of every stage: gradients of all pieces added up, then one update, unless it would do harm.

    Args:
      state: as its type says.
      pieces: pytree of arrays [A, ...], the A micro-batches; a single one needs no accumulator.
      loss_fn: (params, piece) -> (the piece's part of the loss float32[], metrics that ``merge_metrics`` adds up).
      optimizer: optax's, or a lean one.
      trains: bool[], whether there is anything to train on. If not, or if the gradient is not finite, nothing changes
        but the step count, and ``update_skipped`` is 1.

    Returns:
      (new state, metrics: float32[] each).
    """
    gradient = jax.grad(loss_fn, has_aux=True)
    first = jax.tree.map(lambda x: x[0], pieces)
    if jax.tree.leaves(pieces)[0].shape[0] == 1:
        grads, metrics = gradient(state.params, first)
    else:

        def add(total: tuple[Params, Metrics], piece: Any) -> tuple[tuple[Params, Metrics], None]:
            grads, metrics = gradient(state.params, piece)
            grads = jax.tree.map(jnp.add, total[0], grads)
            return (grads, merge_metrics(total[1], metrics)), None

        # In float32, whatever the parameters are.
        shapes = jax.eval_shape(
            lambda *arguments: widened(gradient(*arguments)), state.params, first
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        (grads, metrics), _ = jax.lax.scan(add, zeros, pieces)

    grad_norm = optax.tree.norm(widened(grads))
    usable = jnp.isfinite(grad_norm) & trains
    params, opt_state = apply_gradients(
        optimizer,
        grads,
        state.opt_state,
        state.params,
        usable=usable,
        key=jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step),
    )
    new_state = TrainState(step=state.step + 1, params=params, opt_state=opt_state, key=state.key)
    metrics = metrics | {"grad_norm": grad_norm, "update_skipped": 1.0 - usable}
    return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def _split_rows(x: jax.Array, *, micro_rows: int, num_shards: int) -> jax.Array:
    """[B, T] -> [B / micro_rows, micro_rows, T], each piece with its share of every shard's rows: no data moves."""
    pieces = x.shape[0] // micro_rows
    by_shard = x.reshape(num_shards, pieces, micro_rows // num_shards, *x.shape[1:])
    return by_shard.swapaxes(0, 1).reshape(pieces, micro_rows, *x.shape[1:])


def with_reference(
    batch: TrainBatch,
    reference: Params,
    *,
    model: ModelConfig,
    config: StepConfig,
    bounds: RowBounds,
) -> TrainBatch:
    """The batch with the reference's log-probabilities, of the same transformed distribution as the policy's."""
    logprobs, _ = batch_logprobs(
        model,
        reference,
        batch,
        transform=config.transform,
        bounds=bounds,
        dtype=jnp.dtype(config.dtype),
    )
    return dataclasses.replace(batch, ref_logprobs=logprobs)


def with_advantages(
    batches: Sequence[TrainBatch],
    scores: Sequence[jax.Array],
    scored: Sequence[jax.Array],
    kl_coef: jax.Array,
    *,
    config: StepConfig,
) -> list[TrainBatch]:
    """The batches with advantages of ``score - kl_coef * sum_t log(behavior / ref)``; k1 in the reward is unbiased.

    Args:
      batches: all minibatches of a step, since a baseline may be that of the whole step; with the reference's
        log-probabilities. ``sample_ids`` index a batch's own flattened scores.
      scores: float32[P, G] of each.
      scored: bool[P, G] of each, whether there is a verdict.
      kl_coef: float32[], 0 for none.
    """
    if config.kl_in_reward:
        penalties = [
            kl_penalty_by_sample(
                batch.behavior_logprobs,
                batch.ref_logprobs,
                batch.loss_mask,
                batch.sample_ids,
                num_samples=of_batch.size,
            ).reshape(of_batch.shape)
            for batch, of_batch in zip(batches, scores, strict=True)
        ]
        scores = [s - kl_coef * penalty for s, penalty in zip(scores, penalties, strict=True)]
    advantages = group_advantages(
        jnp.concatenate(scores), jnp.concatenate(scored), estimator=config.adv_estimator
    )
    bounds = list(itertools.accumulate(len(of_batch) for of_batch in scores))[:-1]
    return [
        dataclasses.replace(
            batch,
            advantages=spread_by_sample(part.reshape(-1), batch.loss_mask, batch.sample_ids),
        )
        for batch, part in zip(batches, jnp.split(advantages, bounds), strict=True)
    ]


class Minibatch(NamedTuple):
    """A batch on the mesh, with the static bounds its programs are compiled for."""

    batch: TrainBatch
    bounds: RowBounds
    num_samples: int


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """The jitted programs of one model, optimizer and mesh. ``make_learner`` makes it."""

    model: ModelConfig
    optimizer: AnyOptimizer
    mesh: jax.sharding.Mesh
    shardings: TrainState
    base_shardings: Params
    config: StepConfig
    _update: Callable[..., tuple[TrainState, Metrics]]
    _with_reference: Callable[..., TrainBatch]
    _with_advantages: Callable[..., list[TrainBatch]]

    @property
    def num_shards(self) -> int:
        """Over how many shards the rows of a batch are spread."""
        return num_row_shards(self.mesh)

    @property
    def num_column_shards(self) -> int:
        """Over how many shards the tokens of a row are spread."""
        return num_column_shards(self.mesh)

    @property
    def min_rows(self) -> int:
        """Fewest rows of a batch whose log-probabilities are the sampler's, bit for bit.

        XLA:CPU adds up a dot with the keys of a single row in another order than one with those of several.
        """
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        return (2 if on_cpu and not self.config.micro_rows else 1) * self.num_shards

    def place(self, params: Params) -> Params:
        """All parameters of a model (a reference's, say, or the base of adapters) on the mesh."""
        return put(params, self.base_shardings)

    def prepare(
        self,
        batch: TrainBatch,
        reference: Params | None,
        *,
        scores: np.ndarray,
        kl_coef: float,
    ) -> Minibatch:
        """``prepare_all`` of a step with a single batch."""
        [minibatch] = self.prepare_all([batch], reference, scores=[scores], kl_coef=kl_coef)
        return minibatch

    def prepare_all(
        self,
        batches: Sequence[TrainBatch],
        reference: Params | None,
        *,
        scores: Sequence[np.ndarray],
        kl_coef: float,
    ) -> list[Minibatch]:
        """Puts the packed batches of a step on the mesh and adds what needs the device.

        Args:
          batches: NumPy, rows a multiple of ``num_shards``, and their length of ``num_column_shards``.
          reference: frozen parameters; needed with ``use_reference``.
          scores: float[P, G] of each, NaN where there is no verdict; read when the KL goes into the reward.
          kl_coef: of that KL.

        Raises:
          ValueError: rows that the context axis of the mesh does not divide.
        """
        for batch in batches:
            check_columns(batch.tokens.shape[1], self.mesh)
        minibatches = [
            Minibatch(batch, row_bounds(batch), int(of_batch.size))
            for batch, of_batch in zip(batches, scores, strict=True)
        ]
        placed = [put(batch, batch_sharding(self.mesh)) for batch in batches]
        with jax.set_mesh(self.mesh):
            if self.config.use_reference:
                placed = [
                    self._with_reference(batch, reference, bounds=minibatch.bounds)
                    for batch, minibatch in zip(placed, minibatches, strict=True)
                ]
            if self.config.kl_in_reward and placed:
                whole = replicated(self.mesh)
                scored = [np.isfinite(of_batch) for of_batch in scores]
                known = [
                    np.where(has, of_batch, 0).astype(np.float32)
                    for has, of_batch in zip(scored, scores, strict=True)
                ]
                placed = self._with_advantages(
                    placed,
                    *put((known, scored, np.float32(kl_coef)), whole),
                )
        return [
            minibatch._replace(batch=batch)
            for minibatch, batch in zip(minibatches, placed, strict=True)
        ]

    def train_step(
        self, state: TrainState, minibatch: Minibatch, base: Params | None = None
    ) -> tuple[TrainState, Metrics]:
        """One update. The state is donated: use the one returned. Nothing moves between host and device.

        ``base`` is as of ``update``; it stays as it is.
        """
        with jax.set_mesh(self.mesh), jax.transfer_guard("disallow"):
            return self._update(
                state,
                minibatch.batch,
                base,
                bounds=minibatch.bounds,
                num_samples=minibatch.num_samples,
            )

    def trace_update(self, state: TrainState, minibatch: Minibatch, base: Params | None) -> Any:
        """``jax.stages.Traced`` of ``train_step``; takes shapes with shardings as well as arrays, computes nothing."""
        with jax.set_mesh(self.mesh):
            return self._update.trace(  # pyright: ignore[reportFunctionMemberAccess]
                state,
                minibatch.batch,
                base,
                bounds=minibatch.bounds,
                num_samples=minibatch.num_samples,
            )

    def trace_reference(self, minibatch: Minibatch, reference: Params) -> Any:
        """The same of what ``prepare`` has the reference do."""
        with jax.set_mesh(self.mesh):
            return self._with_reference.trace(  # pyright: ignore[reportFunctionMemberAccess]
                minibatch.batch, reference, bounds=minibatch.bounds
            )

    @property
    def num_compiles(self) -> int:
        """How many shapes of the update were compiled so far."""
        return self._update._cache_size()  # pyright: ignore[reportFunctionMemberAccess]


def make_learner(
    model: ModelConfig,
    optimizer: AnyOptimizer,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    config: StepConfig,
) -> Learner:
    """Jits the programs of a learner; each compiles once a shape.

    Raises:
      ValueError: micro_rows does not divide over the mesh, or ``remat`` needs a memory that its devices lack.
    """
    shards = num_row_shards(mesh)
    if config.remat == "offload":
        check_host_memory(mesh, "train.remat")
    if config.micro_rows % shards:
        raise ValueError(
            f"train.micro_rows ({config.micro_rows}) must be divisible by the data, fsdp and expert axes ({shards}); "
            "change config.train.micro_rows or config.mesh"
        )
    rows = batch_sharding(mesh)
    return Learner(
        model=model,
        optimizer=optimizer,
        mesh=mesh,
        shardings=shardings,
        base_shardings=model_shardings(model, mesh, config.adapter),
        config=config,
        _update=jax.jit(
            functools.partial(
                update, model=model, optimizer=optimizer, config=config, num_shards=shards
            ),
            static_argnames=("bounds", "num_samples"),
            donate_argnums=0,
            out_shardings=(shardings, replicated(mesh)),
            compiler_options=compiler_options(mesh, backward=True),
        ),
        _with_reference=jax.jit(
            functools.partial(with_reference, model=model, config=config),
            static_argnames="bounds",
            out_shardings=rows,
            compiler_options=compiler_options(mesh),
        ),
        _with_advantages=jax.jit(
            functools.partial(with_advantages, config=config), out_shardings=rows
        ),
    )


def check_columns(length: int, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError when rows of ``length`` tokens do not divide over the context axis."""
    shards = num_column_shards(mesh)
    if length % shards:
        raise ValueError(
            f"rows of {length} tokens (train.row_length) must be divisible by the context axis ({shards}); "
            "change config.train.row_length or config.mesh.context"
        )


def row_bounds(batch: TrainBatch) -> RowBounds:
    """Bounds of a NumPy batch, in coarse steps, since each is a program to compile.

    Trained tokens are half a row or all of it. The prefix is as wide as what other segments continue reaches: nothing,
    or the ``key_bucket`` of an eighth, a quarter or half of the row, or all of it.
    """
    length = batch.tokens.shape[1]
    half = -(-length // 2)
    most = int(np.max(np.sum(np.asarray(batch.loss_mask) > 0, axis=1), initial=1))
    segments, prefixes = np.asarray(batch.segment_ids), np.asarray(batch.prefix_ids)
    end = 0
    for row, continued in zip(segments, prefixes, strict=True):
        columns = np.flatnonzero(np.isin(row, continued[continued > 0]))
        end = max(end, columns[-1] + 1 if columns.size else 0)
    widths = (0, *(min(length, key_bucket(length * part // 8)) for part in (1, 2, 4, 8)))
    return RowBounds(
        num_targets=min(length, -(-most // half) * half),
        prefix_width=next(width for width in widths if width >= end),
    )


def merge_updates(updates: Sequence[Metrics]) -> dict[str, float]:
    """Metrics of the updates of one step: means; of what compares sampler and trainer, the first update's.

    Only the first update sees the weights that sampled; later ones differ from them on purpose.
    """
    if not updates:
        return {}
    first = {name: float(value) for name, value in updates[0].items()}
    on_policy = ("mismatch_kl", "logprob_delta_mean", "logprob_delta_max")
    return {
        name: first[name]
        if name in on_policy
        else float(np.mean([float(update[name]) for update in updates]))
        for name in first
    }
