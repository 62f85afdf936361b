"""Grouped-query attention over one or more stretches of keys, with one softmax across all of them.

Trainer and sampler both pass two stretches: what a token continues (its prompt, which the sampler computes once and
shares among the samples of a group) and its own sequence. Scores, softmax and sums are float32 whatever the compute
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.models.linear import soft_cap

MASKED = -1e30  # finite: a row with nothing to attend to stays finite, and its output is never used


class KeyValues(NamedTuple):
    """A stretch of keys. Rows of the batch ``B`` share their keys among ``Q`` queries each.

    k, v: dtype[B, K, S, H]; mask: bool[B, Q, S], true where query q of row b may look at key s.
    """

    k: jax.Array
    v: jax.Array
    mask: jax.Array


def grouped_query_attention(
    q: jax.Array,
    stretches: Sequence[KeyValues],
    *,
    scale: float | None = None,
    softcap: float = 0.0,
) -> jax.Array:
    """softmax(q k^T * scale) v over the concatenation of ``stretches``, for flat queries.

    Args:
      q: dtype[M, N, H]; N is a multiple of the K heads of the keys. Query b * Q + i is query i of row b of a
        stretch; B * Q = M for every stretch, though B may differ between them.
      stretches: at least one.
      scale: of the scores; None for 1 / sqrt(H).
      softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them as they are.

    Returns:
      dtype[M, N, H].
    """
    M, N, H = q.shape
    K = stretches[0].k.shape[1]
    R = N // K
    factor = H**-0.5 if scale is None else scale
    scores = []
    for part in stretches:
        B, Q, _ = part.mask.shape
        score = jnp.einsum(
            "bqkrh,bksh->bkqrs",
            q.reshape(B, Q, K, R, H).astype(jnp.float32),
            part.k.astype(jnp.float32),
        )
        score = soft_cap(score * factor, softcap)
        scores.append(jnp.where(part.mask[:, None, :, None, :], score, MASKED))
    flat = [_to_flat(score.max(-1)) for score in scores]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, flat))  # [M, K, R]
    out = jnp.zeros((M, K, R, H + 1), jnp.float32)
    for score, part in zip(scores, stretches, strict=True):
        B, Q, _ = part.mask.shape
        weight = jnp.exp(score - top.reshape(B, Q, K, R).swapaxes(1, 2)[..., None])
        # The sum of the weights rides along as one more value: a dot adds in the order of the keys, so zeros between
        # them change no bit, while the order of a reduction depends on where in the row the keys lie.
        values = jnp.concatenate([part.v, jnp.ones_like(part.v[..., :1])], -1)
        out += jnp.einsum(
            "bkqrs,bksh->bqkrh",
            weight,
            values.astype(jnp.float32),
        ).reshape(M, K, R, H + 1)
    return (out[..., :H] / out[..., H:]).reshape(M, N, H).astype(q.dtype)


def _to_flat(x: jax.Array) -> jax.Array:
    """[B, K, Q, R] -> [B * Q, K, R]."""
    B, K, Q, R = x.shape
    return x.swapaxes(1, 2).reshape(B * Q, K, R)


def row_masks(segment_ids: jax.Array, prefix_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Who sees whom in packed rows of token trees.

    A token sees all of the segment it continues, and the tokens up to itself in its own segment.

    Args:
      segment_ids, prefix_ids: int32[B, T] as in ``TrainBatch``.

    Returns:
      (prefix, own): bool[B, T, T] each, indexed [row, query, key]; they do not overlap.
    """
    T = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((T, T), bool))[None]
    key = segment_ids[:, None, :]
    own = (segment_ids[:, :, None] == key) & (key > 0) & causal
    prefix = (prefix_ids[:, :, None] == key) & (key > 0)
    return prefix, own


def key_bucket(length: int) -> int:
    """Smallest odd multiple of 16 (see below) that is at least ``length``: how many keys any stretch should have.

    XLA:CPU chooses among dot kernels, which add up in different orders, by the shape. The sampler and the trainer agree
    bit for bit, in float32 and bfloat16, when on every device

    - both compile with ``decoder.STRICT``;
    - every stretch has an odd multiple of 16 keys (a multiple of 32 takes another kernel), from jax 0.12 on neither 16
      nor 80;
    - float32 matrix products (the head's always is one) have at least 40 rows: the kernel changes at 33 or soon after;
    - attention has at least two rows of keys (one row takes another kernel).

    Where a condition fails, float32 differs by about 1e-6 nats and bfloat16 by 1e-3. tests/training/test_parity.py
    holds both the agreement and the map of kernels, so that a change of XLA is noticed.
    """
    size = -(-max(length - 16, 0) // 32) * 32 + 16
    if jax.__version_info__ < (0, 12):
        return size
    return {16: 48, 80: 112}.get(size, size)
