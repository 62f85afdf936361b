"""From hidden states to the distribution a policy samples from. The sampler and the trainer both use this file.

``transform_logits`` applies temperature and truncation; ``target_logprobs`` scores given tokens under the transformed
distribution without ever holding [B, T, V]. Because both sides apply the same transform, the importance ratio of a
fresh sample is 1 whatever the sampling settings.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.distributed.columns import flat_tokens, take_columns
from rlvr_jax.distributed.sharding import axis_size, per_token_shard
from rlvr_jax.models.attention import MASKED
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Decoder, Params, attend_rows, bind
from rlvr_jax.models.moe import Load, expert_load
from rlvr_jax.types import SamplingParams, TrainBatch

LEAST_CHUNK = (
    64  # tokens; fewer would take another kernel than the sampler's (attention.key_bucket)
)
BLOCK = 256  # tokens of a block: about sqrt(V), so that sums over the vocabulary are two short ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitTransform:
    """The part of ``SamplingParams`` that shapes the distribution; hashable, a static argument of jitted programs.

    ``temperature`` 0 is greedy: tokens are argmax, and log-probabilities those of the plain softmax.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, params: SamplingParams) -> LogitTransform:
        return cls(
            temperature=float(params.temperature),
            top_k=int(params.top_k),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
        )


def transform_logits(
    logits: jax.Array, transform: LogitTransform, keep: jax.Array | None = None
) -> jax.Array:
    """Temperature, then top-k, top-p, min-p, each on what the one before left (the order of ``transformers``).

    Args:
      logits: float32[M, V].
      transform: what to apply; parts that are off cost nothing. top-p sorts the vocabulary.
      keep: int32[M], tokens never masked: the trainer passes the sampled ones, so that a token which an updated
        policy would truncate keeps a finite log-probability.

    Returns:
      float32[M, V], unnormalised log-probabilities, ``MASKED`` where truncated.
    """
    if transform.temperature not in (0.0, 1.0):
        logits = logits / transform.temperature
    allowed = None
    if 0 < transform.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, transform.top_k)[0][:, -1:]
        allowed = logits >= least
    if transform.top_p < 1.0:
        left = logits if allowed is None else jnp.where(allowed, logits, MASKED)
        ordered = -jnp.sort(-left, axis=-1)
        probs = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # mass of the tokens ranked above
        least = jnp.min(jnp.where(before < transform.top_p, ordered, jnp.inf), -1, keepdims=True)
        allowed = left >= least
    if transform.min_p > 0.0:
        enough = logits >= jnp.max(logits, -1, keepdims=True) + jnp.log(transform.min_p)
        allowed = enough if allowed is None else allowed & enough
    if allowed is None:
        return logits
    if keep is not None:
        allowed |= jax.nn.one_hot(keep, logits.shape[-1], dtype=bool)
    return jnp.where(allowed, logits, MASKED)


class RowBounds(NamedTuple):
    """Static facts about the rows of a batch, for which a program is compiled.

    Attributes:
      num_targets: how many trained tokens a row has at most.
      prefix_width: see ``attend_rows``.
    """

    num_targets: int
    prefix_width: int | None = None


def batch_logprobs(
    config: ModelConfig,
    params: Params,
    batch: TrainBatch,
    *,
    transform: LogitTransform,
    bounds: RowBounds,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> tuple[jax.Array, jax.Array]:
    """(logprobs, entropy), float32[B, T], nats, of every trained token of a batch; see ``target_logprobs``.

    Routers choose for themselves, whatever ``batch.experts`` says: so does a reference, which is what it is without the
    policy.
    """
    logprobs, entropy, _ = replayed_logprobs(
        config,
        params,
        dataclasses.replace(batch, experts=None),
        transform=transform,
        bounds=bounds,
        dtype=dtype,
        remat=remat,
    )
    return logprobs, entropy


def replayed_logprobs(
    config: ModelConfig,
    params: Params,
    batch: TrainBatch,
    *,
    transform: LogitTransform,
    bounds: RowBounds,
    dtype: Any = jnp.float32,
    remat: str = "none",
) -> tuple[jax.Array, jax.Array, Load | None]:
    """``batch_logprobs`` of the policy that sampled the batch, and the load of its experts over the trained tokens.

    Tokens go to the experts that ``batch.experts`` remembers. Without experts there is no load.
    """
    model = bind(config, params)
    replayed = None
    if batch.experts is not None:
        replayed = jnp.moveaxis(flat_tokens(batch.experts), 1, 0)
    hidden, _, load = model.routed(
        flat_tokens(batch.tokens),
        flat_tokens(batch.positions),
        attend_rows(batch.segment_ids, batch.prefix_ids, bounds.prefix_width),
        replayed=replayed,
        observe=lambda routing: expert_load(routing, flat_tokens(batch.loss_mask) > 0),
        dtype=dtype,
        remat=remat,
    )
    logprobs, entropy = target_logprobs(
        model, hidden, batch, transform=transform, num_targets=bounds.num_targets
    )
    return logprobs, entropy, load


def target_logprobs(
    model: Decoder,
    hidden: jax.Array,
    batch: TrainBatch,
    *,
    transform: LogitTransform,
    num_targets: int,
    chunk: int = 128,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy at every trained token; the one place where a token meets its prediction.

    The head runs on the hidden states that predict a trained token (``parents``), ``chunk`` of them at a time, and
    recomputes its logits in the backward pass.

    Args:
      hidden: dtype[B * T, D], in the order of ``flat_tokens``.
      batch: rows of token trees.
      num_targets: how many trained tokens a row has at most; more are not scored, so it must be an upper bound.
      chunk: how many tokens' logits a device holds at once (float32[chunk, V]).

    Returns:
      (logprobs, entropy): float32[B, T], nats, 0 where ``loss_mask`` is 0.
    """
    B, T = batch.tokens.shape
    num_targets += -num_targets % axis_size("context")  # every device has as many
    trained = batch.loss_mask > 0
    columns = jnp.argsort(jnp.where(trained, 0, 1), axis=1, stable=True)[:, :num_targets]
    parents = jnp.take_along_axis(batch.parents, columns, axis=1)
    targets = jnp.take_along_axis(batch.tokens, columns, axis=1)
    states = take_columns(hidden, jnp.maximum(parents, 0))

    def score(
        kernel: jax.Array, states: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Of a device's rows: dtype[b, M, D] and int32[b, M] to two float32[b, M]; M is its part of num_targets."""

        @jax.checkpoint
        def score_chunk(part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            logits = transform_logits(model.logits(part[0], kernel), transform, keep=part[1])
            return logprob_and_entropy(logits, part[1])

        count = targets.size
        size = min(chunk, -(-count // LEAST_CHUNK) * LEAST_CHUNK)
        pad = -count % size
        flat_states = jnp.pad(states.reshape(count, -1), ((0, pad), (0, 0)))
        flat_targets = jnp.pad(targets.reshape(count), (0, pad))
        scored = jax.lax.map(
            score_chunk,
            (flat_states.reshape(-1, size, states.shape[-1]), flat_targets.reshape(-1, size)),
        )
        return jax.tree.map(lambda x: x.reshape(-1)[:count].reshape(targets.shape), scored)

    # By hand over the tokens: each device gathers the kernel once and adds its gradient up over its own chunks. Left to
    # the partitioner, all devices exchange both anew in every chunk.
    logprobs, entropy = per_token_shard(score, model.head_axes)(model.head_kernel, states, targets)

    def back(x: jax.Array) -> jax.Array:
        full = jnp.zeros((B, T), jnp.float32).at[jnp.arange(B)[:, None], columns].set(x)
        return jnp.where(trained, full, 0.0)

    return back(logprobs), back(entropy)


def block_sums(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights in blocks of ``BLOCK`` and the blocks' sums: float32[M, V/BLOCK, BLOCK] and float32[M, V/BLOCK].

    Adding 49,152 numbers one after another in float32 loses 1e-5 nats, and differently in every program; in two levels
    the error is 1e-7. Sampler and trainer both normalise through here.
    """
    M, V = weights.shape
    blocks = jnp.pad(weights, ((0, 0), (0, -V % BLOCK))).reshape(M, -1, BLOCK)
    return blocks, jax.lax.optimization_barrier(blocks.sum(-1))


def logprob_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log softmax at ``targets`` and the entropy, nats: float32[M] each, from float32[M, V] and int32[M]."""
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
    weights = jnp.exp(shifted)
    total = block_sums(weights)[1].sum(-1)
    log_total = jnp.log(total)
    hit = jnp.arange(logits.shape[-1])[None, :] == targets[:, None]  # its gradient is no scatter
    chosen = jnp.sum(jnp.where(hit, shifted, 0.0), -1)
    products = jnp.where(weights > 0, weights * shifted, 0.0)
    return chosen - log_total, log_total - block_sums(products)[1].sum(-1) / total
