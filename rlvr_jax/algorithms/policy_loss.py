"""The clipped surrogate of PPO, one number a token."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlvr_jax.algorithms.importance import log_ratio


class PPOLoss(NamedTuple):
    """What ``ppo_clip_loss`` returns; each is [B, T] and 0 (False) where masked.

    Attributes:
      loss: float32.
      ratio: float32, policy / old.
      clipped_low, clipped_high, clipped_dual: bool, that clip took the gradient away.
    """

    loss: jax.Array
    ratio: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array
    clipped_dual: jax.Array


def ppo_clip_loss(
    policy_logprobs: ArrayLike,
    old_logprobs: ArrayLike,
    advantages: ArrayLike,
    mask: ArrayLike,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> PPOLoss:
    """``max(-A r, -A clip(r, 1 - low, 1 + high))``, at most ``-A c`` where A < 0, with ``r = policy / old``.

    PPO (arXiv:1707.06347) with separate bounds (DAPO, arXiv:2503.14476) and the dual clip (arXiv:1912.09729), which
    stops a token that became much likelier while being bad from dominating the batch.

    Args:
      policy_logprobs: float[B, T], nats; the gradient flows through these.
      old_logprobs: float[B, T], nats, of the policy the trust region is around.
      advantages: float[B, T].
      mask: float or bool[B, T], true where the token is trained on; the others may hold anything, NaN included.
      clip_ratio_low, clip_ratio_high: how far the ratio may go below and above 1.
      clip_ratio_c: the dual clip, > 1; None turns it off.

    Returns:
      A ``PPOLoss``.
    """
    mask = jnp.asarray(mask) > 0
    ratio = jnp.exp(log_ratio(policy_logprobs, old_logprobs, mask))
    advantages = jnp.where(mask, jnp.asarray(advantages, jnp.float32), 0.0)
    chex.assert_equal_shape([ratio, advantages])
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    loss = jnp.maximum(plain, clipped)
    clipped_dual = jnp.zeros_like(mask)
    if clip_ratio_c is not None:
        clipped_dual = (advantages < 0) & (ratio > clip_ratio_c)
        loss = jnp.where(clipped_dual, -advantages * clip_ratio_c, loss)
    return PPOLoss(
        loss=loss,
        ratio=jnp.where(mask, ratio, 0.0),
        clipped_low=(advantages < 0) & (ratio < 1.0 - clip_ratio_low),
        clipped_high=(advantages > 0) & (ratio > 1.0 + clip_ratio_high),
        clipped_dual=clipped_dual,
    )
