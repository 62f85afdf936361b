"""Ratios of probabilities of the same tokens under two policies.

``log_ratio`` is the one place where two log-probabilities are subtracted: it selects before anything nonlinear happens,
so a NaN or an infinity at a masked token reaches neither the loss nor the gradient, and it bounds the result, so that
no exponential overflows.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

LOG_RATIO_BOUND = 20.0  # nats; exp(20) = 4.9e8 leaves room for a sum over a batch in float32
ROLLOUT_IS_LEVELS = ("off", "token", "sequence")


def log_ratio(numerator: ArrayLike, denominator: ArrayLike, mask: ArrayLike) -> jax.Array:
    """``clip(numerator - denominator, -20, 20)`` where ``mask``, else 0.

    Args:
      numerator, denominator: float[B, T], nats; anything where ``mask`` is 0.
      mask: float or bool[B, T].

    Returns:
      float32[B, T].
    """
    numerator = jnp.asarray(numerator, jnp.float32)
    denominator = jnp.asarray(denominator, jnp.float32)
    mask = jnp.asarray(mask) > 0
    chex.assert_equal_shape([numerator, denominator, mask])
    difference = jnp.where(mask, numerator - denominator, 0.0)
    return jnp.clip(difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def rollout_importance(
    old_logprobs: ArrayLike,
    behavior_logprobs: ArrayLike,
    mask: ArrayLike,
    segment_ids: ArrayLike,
    *,
    level: str,
    threshold: float,
) -> jax.Array:
    """Truncated importance weights, from the policy that sampled to the one the update starts from.

    ``min(exp(old - behavior), threshold)``, where the log-ratio is the token's own (``token``) or the sum over its
    sequence (``sequence``). Multiplying the loss by it corrects for a rollout that ran with other weights or another
    numeric (TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").

    Args:
      old_logprobs: float[B, T], nats, under the policy at the start of the update.
      behavior_logprobs: float[B, T], nats, as recorded while sampling.
      mask: float or bool[B, T], true where the token is trained on.
      segment_ids: int32[B, T], span of the row; the trained tokens of one sequence share a segment.
      level: ``token`` or ``sequence``.
      threshold: largest weight.

    Returns:
      float32[B, T], 0 where ``mask`` is 0; no gradient flows through it.

    Raises:
      ValueError: the level is neither.
    """
    ratio = log_ratio(old_logprobs, behavior_logprobs, mask)
    if level == "sequence":
        ratio = _sum_over_segments(ratio, jnp.asarray(segment_ids))
        ratio = jnp.clip(ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    elif level != "token":
        raise ValueError(f"rollout_is level is {level!r}; expected 'token' or 'sequence'")
    weights = jnp.where(jnp.asarray(mask) > 0, jnp.minimum(jnp.exp(ratio), threshold), 0.0)
    return jax.lax.stop_gradient(weights)


def _sum_over_segments(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """float32[B, T] -> float32[B, T]: each token gets the sum over its segment of its row."""
    num_segments = values.shape[1] + 1  # ids go from 1 to at most T; 0 is padding

    def one_row(row: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, ids, num_segments=num_segments)[ids]

    return jax.vmap(one_row)(values, segment_ids)
