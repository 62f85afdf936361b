"""Grouped-query attention over one or more stretches of keys, with one softmax across all of them.

Trainer and sampler both pass two stretches: what a token continues (its prompt, which the sampler computes once and
shares among the samples of a group) and its own sequence. Scores, softmax and sums are float32 whatever the compute
dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from rlvr_jax.models.linear import soft_cap

ATTENTION = "attention"  # the name by which a remat policy can keep what attention came to
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
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    return _attention(factor, softcap, q, tuple(stretches))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    factor: float, softcap: float, q: jax.Array, stretches: tuple[KeyValues, ...]
) -> jax.Array:
    return _attention_forward(factor, softcap, q, stretches)[0]


def _attention_forward(
    factor: float, softcap: float, q: jax.Array, stretches: tuple[KeyValues, ...]
) -> tuple[jax.Array, Any]:
    M, N, H = q.shape
    K = stretches[0].k.shape[1]
    R = N // K
    scores = [_scores(q, part, factor, softcap) for part in stretches]
    flat = [_to_flat(score.max(-1)) for score in scores]
    top = functools.reduce(jnp.maximum, flat)  # [M, K, R]
    out = jnp.zeros((M, K, R, H + 1), jnp.float32)
    for score, part in zip(scores, stretches, strict=True):
        weight = jnp.exp(score - _to_rows(top, part)[..., None])
        # The sum of the weights rides along as one more value: a dot adds in the order of the keys, so zeros between
        # them change no bit, while the order of a reduction depends on where in the row the keys lie.
        values = jnp.concatenate([part.v, jnp.ones_like(part.v[..., :1])], -1)
        out += jnp.einsum(
            "bkqrs,bksh->bqkrh",
            weight,
            values.astype(jnp.float32),
        ).reshape(M, K, R, H + 1)
    result = (out[..., :H] / out[..., H:]).reshape(M, N, H).astype(q.dtype)
    result = checkpoint_name(result, ATTENTION)
    log_total = checkpoint_name(top + jnp.log(out[..., H]), ATTENTION)
    return result, (q, stretches, result, log_total)


def _attention_backward(
    factor: float, softcap: float, saved: Any, cotangent: jax.Array
) -> tuple[jax.Array, tuple[KeyValues, ...]]:
    """Written out as in FlashAttention (Dao 2023, algorithm 2): from the result and the log of the softmax's sum, each
    weight is one exponential again, which takes less than keeping it."""
    q, stretches, result, log_total = saved
    M, N, H = q.shape
    K = stretches[0].k.shape[1]
    cotangent = cotangent.astype(jnp.float32)
    along = (cotangent * result.astype(jnp.float32)).sum(-1).reshape(M, K, N // K)
    of_q = jnp.zeros((M, N, H), jnp.float32)
    of_stretches = []
    for part in stretches:
        B, Q, _ = part.mask.shape
        rows = (B, Q, K, N // K, H)
        score = _scores(q, part, factor, softcap)
        weight = jnp.exp(score - _to_rows(log_total, part)[..., None])
        of_weight = jnp.einsum(
            "bqkrh,bksh->bkqrs", cotangent.reshape(rows), part.v.astype(jnp.float32)
        )
        of_score = weight * (of_weight - _to_rows(along, part)[..., None]) * factor
        if softcap:
            of_score *= 1 - jnp.where(part.mask[:, None, :, None, :], score / softcap, 0.0) ** 2
        of_v = jnp.einsum("bkqrs,bqkrh->bksh", weight, cotangent.reshape(rows))
        of_k = jnp.einsum("bkqrs,bqkrh->bksh", of_score, q.reshape(rows).astype(jnp.float32))
        of_part = jnp.einsum("bkqrs,bksh->bqkrh", of_score, part.k.astype(jnp.float32))
        of_q += of_part.reshape(M, N, H)
        no_mask: Any = None
        of_stretches.append(
            KeyValues(of_k.astype(part.k.dtype), of_v.astype(part.v.dtype), no_mask)
        )
    return of_q.astype(q.dtype), tuple(of_stretches)


_attention.defvjp(_attention_forward, _attention_backward)


def _scores(q: jax.Array, part: KeyValues, factor: float, softcap: float) -> jax.Array:
    """float32[B, K, Q, R, S], ``MASKED`` where a query may not look."""
    B, Q, _ = part.mask.shape
    K = part.k.shape[1]
    score = jnp.einsum(
        "bqkrh,bksh->bkqrs",
        q.reshape(B, Q, K, -1, q.shape[-1]).astype(jnp.float32),
        part.k.astype(jnp.float32),
    )
    score = soft_cap(score * factor, softcap)
    return jnp.where(part.mask[:, None, :, None, :], score, MASKED)


def _to_rows(x: jax.Array, part: KeyValues) -> jax.Array:
    """[B * Q, K, R] -> [B, K, Q, R]."""
    B, Q, _ = part.mask.shape
    return x.reshape(B, Q, *x.shape[1:]).swapaxes(1, 2)


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
