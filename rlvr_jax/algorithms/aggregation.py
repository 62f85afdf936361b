"""From per-token losses to one number: which weight each token has in the sum.

The loss is ``sum(weights * per_token_loss)``. The weights are computed once, on the global batch, before it is cut into
micro-batches or spread over a mesh; every denominator (trained tokens, sequences, tokens of a sequence) is therefore a
global count, and the gradient is the same for any cut, packed or not. Nothing here divides by zero: a batch with no
trained token has weights 0, loss 0 and gradient 0.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def loss_weights(
    loss_mask: ArrayLike,
    sample_ids: ArrayLike,
    *,
    mode: str,
    num_samples: int,
    max_response_length: int | None = None,
) -> jax.Array:
    """The weight of each token's loss, with ``N`` the number of sequences that have a trained token.

    - ``token-mean``: 1 / trained tokens of the batch (DAPO, arXiv:2503.14476).
    - ``seq-mean-token-sum``: 1 / N.
    - ``seq-mean-token-mean``: 1 / (N * trained tokens of the sequence) (GRPO, arXiv:2402.03300).
    - ``seq-mean-token-sum-norm``: 1 / (N * max_response_length) (Dr. GRPO, arXiv:2503.20783).

    Args:
      loss_mask: float or bool[B, T], true where the token is trained on, of the **global** batch.
      sample_ids: int32[B, T], the sequence each token belongs to, in [0, num_samples); -1 for prompts and padding.
      mode: one of ``LOSS_AGG_MODES``.
      num_samples: number of sequences in the batch (an upper bound will do).
      max_response_length: the constant of ``seq-mean-token-sum-norm``, in tokens; the other modes do not use it.

    Returns:
      float32[B, T], 0 where ``loss_mask`` is 0. A sequence with no trained token does not count as a sequence.

    Raises:
      ValueError: the mode is unknown, or has no ``max_response_length`` where it needs one.
    """
    check_loss_agg_mode(mode, max_response_length)
    mask = jnp.asarray(loss_mask) > 0
    lengths = sum_by_sample(mask, mask, sample_ids, num_samples=num_samples)
    num_sequences = jnp.maximum(jnp.sum(lengths > 0), 1)
    if mode == "token-mean":
        return mask / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
    if mode == "seq-mean-token-sum":
        return mask / num_sequences.astype(jnp.float32)
    if mode == "seq-mean-token-sum-norm":
        return mask / (num_sequences * jnp.float32(max_response_length))
    return spread_by_sample(1 / (num_sequences * jnp.maximum(lengths, 1)), mask, sample_ids)


def check_loss_agg_mode(mode: str, max_response_length: int | None) -> None:
    """Raises ValueError unless ``mode`` is known and has what it needs."""
    if mode not in LOSS_AGG_MODES:
        raise ValueError(f"loss_agg_mode is {mode!r}; expected one of {', '.join(LOSS_AGG_MODES)}")
    if mode == "seq-mean-token-sum-norm" and (max_response_length or 0) < 1:
        raise ValueError(
            f"max_response_length is {max_response_length}; loss_agg_mode={mode!r} divides by it; "
            "set it to the response budget in tokens, or choose another mode"
        )


def sum_by_sample(
    values: ArrayLike, mask: ArrayLike, sample_ids: ArrayLike, *, num_samples: int
) -> jax.Array:
    """Sums per-token values over each sequence.

    Args:
      values: float or bool[B, T], anything (NaN too) where ``mask`` is 0.
      mask: float or bool[B, T].
      sample_ids: int32[B, T], in [0, num_samples) where ``mask`` is 1.
      num_samples: number of sequences.

    Returns:
      float32[num_samples].
    """
    values, mask = jnp.asarray(values, jnp.float32), jnp.asarray(mask) > 0
    sample_ids = jnp.asarray(sample_ids)
    chex.assert_equal_shape([values, mask, sample_ids])
    summands = jnp.where(mask, values, 0.0)
    return jax.ops.segment_sum(summands.ravel(), sample_ids.ravel(), num_segments=num_samples)


def spread_by_sample(values: ArrayLike, mask: ArrayLike, sample_ids: ArrayLike) -> jax.Array:
    """Gives each token its sequence's value: the inverse of ``sum_by_sample`` (advantages to tokens, say).

    Args:
      values: float[num_samples].
      mask: float or bool[B, T].
      sample_ids: int32[B, T], in [0, num_samples) where ``mask`` is 1.

    Returns:
      float32[B, T], 0 where ``mask`` is 0.
    """
    values, mask = jnp.asarray(values, jnp.float32), jnp.asarray(mask) > 0
    sample_ids = jnp.asarray(sample_ids)
    chex.assert_rank(values, 1)
    chex.assert_equal_shape([mask, sample_ids])
    return jnp.where(mask, values[jnp.where(mask, sample_ids, 0)], 0.0)
