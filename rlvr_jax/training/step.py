"""The only device update: loss, gradient, clipping, guard, Adam, as one pure function of (state, batch).

``update`` is that function; ``make_train_step`` jits it for a mesh, with donated state and pinned shardings. The fused
schedule calls ``update`` inside its own program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlvr_jax.algorithms.objective import (
    ObjectiveConfig,
    batch_weights,
    merge_metrics,
    rl_objective,
)
from rlvr_jax.distributed.mesh import num_row_shards
from rlvr_jax.distributed.sharding import replicated, row_sharding
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import REMAT_POLICIES, STRICT, Params
from rlvr_jax.models.policy_head import LogitTransform, batch_logprobs
from rlvr_jax.types import TrainBatch, TrainState

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What an update computes, and how. Hashable: a static argument.

    Attributes:
      objective: the loss.
      transform: of the logits; the sampler's.
      dtype: of activations; the sampler's.
      remat: what the backward pass keeps.
      micro_rows: rows whose gradient is computed at once; 0 for all. Gradients add up with the global denominator.
      has_reference: whether batches carry a reference's log-probabilities.
    """

    objective: ObjectiveConfig
    transform: LogitTransform
    dtype: str = "float32"
    remat: str = "full"
    micro_rows: int = 0
    has_reference: bool = True

    def __post_init__(self) -> None:
        if self.remat not in REMAT_POLICIES:
            raise ValueError(
                f"train.remat is {self.remat!r}; expected one of {', '.join(REMAT_POLICIES)}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; expected float32 or bfloat16")
        if self.transform.temperature == 0:
            raise ValueError("temperature is 0: greedy samples have no gradient; sample with > 0")


def update(
    state: TrainState,
    batch: TrainBatch,
    *,
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    config: StepConfig,
    num_targets: int,
    num_samples: int,
    num_shards: int = 1,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on a batch.

    A batch with nothing to train on, or a gradient that is not finite, changes nothing but the step count
    (``update_skipped`` is 1).

    Args:
      state, batch: as their types say.
      model: shape of the decoder.
      optimizer: optax.
      config: what to compute.
      num_targets: upper bound of the trained tokens of a row.
      num_samples: upper bound of ``batch.sample_ids`` + 1.
      num_shards: over how many shards the rows are spread; micro-batches take rows from each.

    Returns:
      (new state, metrics: float32[] each).
    """
    weights, token_weights = batch_weights(batch, config.objective, num_samples=num_samples)

    def loss_fn(params: Params, micro: TrainBatch, w: jax.Array, tw: jax.Array) -> Any:
        logprobs, entropy = batch_logprobs(
            model,
            params,
            micro,
            transform=config.transform,
            num_targets=num_targets,
            dtype=jnp.dtype(config.dtype),
            remat=config.remat,
        )
        return rl_objective(
            logprobs,
            entropy,
            micro,
            w,
            tw,
            config.objective,
            has_reference=config.has_reference,
        )

    gradient = jax.grad(loss_fn, has_aux=True)
    rows = batch.tokens.shape[0]
    micro_rows = config.micro_rows or rows
    if micro_rows >= rows:
        grads, metrics = gradient(state.params, batch, weights, token_weights)
    else:
        pieces = jax.tree.map(
            functools.partial(_split_rows, micro_rows=micro_rows, num_shards=num_shards),
            (batch, weights, token_weights),
        )
        first, rest = jax.tree.map(lambda x: x[0], pieces), jax.tree.map(lambda x: x[1:], pieces)

        def add(carry: tuple[Params, Metrics], piece: Any) -> tuple[tuple[Params, Metrics], None]:
            grads, metrics = gradient(state.params, *piece)
            total = jax.tree.map(jnp.add, carry[0], grads)
            return (total, merge_metrics(carry[1], metrics)), None

        (grads, metrics), _ = jax.lax.scan(add, gradient(state.params, *first), rest)

    grad_norm = optax.global_norm(grads)
    usable = jnp.isfinite(grad_norm) & (token_weights.sum() > 0)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(usable, new, old)

    new_state = TrainState(
        step=state.step + 1,
        params=jax.tree.map(choose, params, state.params),
        opt_state=jax.tree.map(choose, opt_state, state.opt_state),
        key=state.key,
    )
    metrics["grad_norm"] = grad_norm
    metrics["update_skipped"] = 1.0 - usable
    return new_state, {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}


def _split_rows(x: jax.Array, *, micro_rows: int, num_shards: int) -> jax.Array:
    """[B, T] -> [B / micro_rows, micro_rows, T], each piece with its share of every shard's rows: no data moves."""
    pieces = x.shape[0] // micro_rows
    by_shard = x.reshape(num_shards, pieces, micro_rows // num_shards, *x.shape[1:])
    return by_shard.swapaxes(0, 1).reshape(pieces, micro_rows, *x.shape[1:])


def num_targets_of(batch: TrainBatch) -> int:
    """Static bound of the trained tokens of a row, from a NumPy batch: a multiple of an eighth of the row length."""
    length = batch.tokens.shape[1]
    unit = -(-length // 8)
    most = int(np.max(np.sum(np.asarray(batch.loss_mask) > 0, axis=1), initial=1))
    return min(length, -(-most // unit) * unit)


def make_train_step(
    model: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    config: StepConfig,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """``train_step(state, batch, num_targets=, num_samples=)``: donates the state, compiles once a shape.

    Raises:
      ValueError: micro_rows does not divide over the mesh.
    """
    shards = num_row_shards(mesh)
    if config.micro_rows % shards:
        raise ValueError(
            f"train.micro_rows ({config.micro_rows}) must be divisible by the data and fsdp axes ({shards}); "
            "change config.train.micro_rows or config.mesh"
        )
    return jax.jit(
        functools.partial(
            update, model=model, optimizer=optimizer, config=config, num_shards=shards
        ),
        static_argnames=("num_targets", "num_samples"),
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=STRICT,
    )


def make_score(
    model: ModelConfig, mesh: jax.sharding.Mesh, config: StepConfig
) -> Callable[..., jax.Array]:
    """``score(params, batch, num_targets=)``: float32[B, T], log-probabilities of the trained tokens."""

    def score(params: Params, batch: TrainBatch, *, num_targets: int) -> jax.Array:
        return batch_logprobs(
            model,
            params,
            batch,
            transform=config.transform,
            num_targets=num_targets,
            dtype=jnp.dtype(config.dtype),
        )[0]

    return jax.jit(
        score,
        static_argnames="num_targets",
        out_shardings=row_sharding(mesh),
        compiler_options=STRICT,
    )
