"""Grouped-query attention over one or more stretches of keys, with one softmax across all of them.

The trainer passes one stretch (a packed row); the sampler passes two (the prompt, computed once and shared by the
samples of a group, and each sample's own tokens). Scores, softmax and sums are float32 whatever the compute dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row with nothing to attend to stays finite, and its output is never used


class KeyValues(NamedTuple):
    """A stretch of keys: k, v: dtype[B, K, S, H]; mask: bool[B, Q, S], true where query q may look at key s."""

    k: jax.Array
    v: jax.Array
    mask: jax.Array


def grouped_query_attention(q: jax.Array, stretches: Sequence[KeyValues]) -> jax.Array:
    """softmax(q k^T / sqrt(H)) v over the concatenation of ``stretches``.

    Args:
      q: dtype[B, Q, N, H]; N is a multiple of the K heads of the keys.
      stretches: at least one; all with the same B, K and H.

    Returns:
      dtype[B, Q, N, H].
    """
    B, Q, N, H = q.shape
    K = stretches[0].k.shape[1]
    R = N // K
    grouped = q.reshape(B, Q, K, R, H).transpose(0, 2, 1, 3, 4).reshape(B, K, Q * R, H)
    scores = []
    for part in stretches:
        score = jnp.einsum(
            "bkqh,bksh->bkqs", grouped, part.k, preferred_element_type=jnp.float32
        ).reshape(B, K, Q, R, -1)
        scores.append(jnp.where(part.mask[:, None, :, None, :], score * H**-0.5, MASKED))
    top = scores[0].max(-1)
    for score in scores[1:]:
        top = jnp.maximum(top, score.max(-1))
    top = jax.lax.stop_gradient(top)[..., None]
    total = jnp.zeros(top.shape, jnp.float32)
    out = jnp.zeros((B, K, Q * R, H), jnp.float32)
    for score, part in zip(scores, stretches, strict=True):
        weight = jnp.exp(score - top)
        total += weight.sum(-1, keepdims=True)
        out += jnp.einsum(
            "bkqs,bksh->bkqh",
            weight.reshape(B, K, Q * R, -1).astype(part.v.dtype),
            part.v,
            preferred_element_type=jnp.float32,
        )
    out = out.reshape(B, K, Q, R, H) / total
    return out.transpose(0, 2, 1, 3, 4).reshape(B, Q, N, H).astype(q.dtype)


def row_mask(segment_ids: jax.Array, prefix_ids: jax.Array) -> jax.Array:
    """Who sees whom in packed rows of token trees.

    A token sees the tokens before it in its own segment and all of the segment it continues.

    Args:
      segment_ids, prefix_ids: int32[B, T] as in ``TrainBatch``.

    Returns:
      bool[B, T, T], indexed [row, query, key].
    """
    T = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    query, key = segment_ids[:, :, None], segment_ids[:, None, :]
    same = (query == key) & (query > 0)
    prefix = (prefix_ids[:, :, None] == key) & (prefix_ids[:, :, None] > 0)
    return causal & (same | prefix)


def rotary(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos, sin: float32[N, H/2] of rotary position embedding (Su et al. 2021), half-split layout."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x: dtype[N, heads, H] by cos, sin: float32[N, H/2]; float32 inside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
