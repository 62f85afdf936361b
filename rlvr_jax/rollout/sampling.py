"""Drawing tokens: one keyed uniform per (seed, request, sample, position), turned into a token by inverse CDF.

``jax.random.categorical`` draws V Gumbel variables a token, which on a CPU costs as much as the model. The inverse CDF
needs one uniform: sums over blocks of the vocabulary find the block, sums inside the block find the token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.models.policy_head import BLOCK, block_sums


def sample_keys(seed: int | jax.Array, request_ids: jax.Array, num_samples: int) -> jax.Array:
    """Keys of every sample, independent of what it is batched with.

    Args:
      seed: root.
      request_ids: uint32[P].
      num_samples: G.

    Returns:
      PRNG keys [P * G]: ``fold_in(fold_in(key(seed), request_id), g)``.
    """
    root = jax.random.key(seed)

    def one(request_id: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(root, request_id), sample)

    samples = jnp.arange(num_samples, dtype=jnp.uint32)
    keys = jax.vmap(lambda r: jax.vmap(lambda g: one(r, g))(samples))(request_ids)
    return keys.reshape(-1)


def uniforms(keys: jax.Array, positions: jax.Array) -> jax.Array:
    """float32[M] in [0, 1): one draw of each key at its position (int32[M], of the token in its sequence)."""
    return jax.vmap(lambda key, at: jax.random.uniform(jax.random.fold_in(key, at)))(
        keys, positions
    )


def draw(logits: jax.Array, uniform: jax.Array, *, greedy: bool) -> tuple[jax.Array, jax.Array]:
    """A token from softmax(logits), and its log-probability.

    A token of probability zero is never drawn, whatever rounding does to the sums.

    Args:
      logits: float32[M, V], transformed.
      uniform: float32[M] in [0, 1).
      greedy: take the most likely token (the lowest id among equals) instead.

    Returns:
      (tokens int32[M], logprobs float32[M] in nats).
    """
    V = logits.shape[-1]
    shifted = logits - jnp.max(logits, -1, keepdims=True)
    weights = jnp.exp(shifted)
    blocks, sums = block_sums(weights)
    log_total = jnp.log(sums.sum(-1))
    if greedy:
        # The first position of the maximum: argmax is several times slower on CPU.
        index = jnp.arange(V, dtype=jnp.int32)[None, :]
        tokens = jnp.min(jnp.where(shifted == 0, index, V), -1)
    else:
        ends = jnp.cumsum(sums, -1)
        goal = uniform * ends[:, -1]
        block = _first_past(ends, sums, goal)
        start = jnp.take_along_axis(ends - sums, block[:, None], 1)[:, 0]
        inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
        tokens = block * BLOCK + _first_past(jnp.cumsum(inside, -1), inside, goal - start)
    chosen = jnp.take_along_axis(shifted, tokens[:, None], -1)[:, 0]
    return tokens.astype(jnp.int32), chosen - log_total


def _first_past(ends: jax.Array, mass: jax.Array, goal: jax.Array) -> jax.Array:
    """First index with mass whose cumulative end is past the goal, else the last index with mass: int32[M]."""
    index = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None, :]
    past = jnp.min(jnp.where((ends > goal[:, None]) & (mass > 0), index, mass.shape[-1]), -1)
    last = jnp.max(jnp.where(mass > 0, index, 0), -1)
    return jnp.minimum(past, last)
