"""Credit over time, for rewards that arrive at a token instead of at the end of the episode."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def discounted_returns(rewards: ArrayLike, response_mask: ArrayLike, *, gamma: float) -> jax.Array:
    """``return[t] = reward[t] + gamma * return[next sampled token]``.

    Returns flow across spans the policy did not sample (tool observations) undiminished: time is counted in the
    policy's own tokens. Rewards at tokens it did not sample do not count.

    Args:
      rewards: float[B, T], one sequence a row; anything where the mask is 0.
      response_mask: float or bool[B, T], true where the policy sampled the token.
      gamma: discount for each own token.

    Returns:
      float32[B, T], 0 where ``response_mask`` is 0.
    """
    rewards, mask = jnp.asarray(rewards, jnp.float32), jnp.asarray(response_mask) > 0
    chex.assert_rank(rewards, 2)
    chex.assert_equal_shape([rewards, mask])

    def step(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, sampled = now
        value = jnp.where(sampled, reward + gamma * later, later)
        return value, jnp.where(sampled, value, 0.0)

    start = jnp.zeros(rewards.shape[0], jnp.float32)
    _, returns = jax.lax.scan(step, start, (rewards.T, mask.T), reverse=True)
    return returns.T
