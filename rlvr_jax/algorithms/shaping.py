"""What happens to scores between the verifier and the advantages: length penalty, choice of groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlvr_jax.algorithms.advantages import ZERO_VARIANCE_TOLERANCE, zero_variance


def overlong_penalty(
    lengths: ArrayLike, *, max_response_length: int, buffer_length: int, penalty_factor: float = 1.0
) -> jax.Array:
    """Soft penalty on responses that come near the limit; add it to the score (DAPO, arXiv:2503.14476, eq. 13).

    ``-penalty_factor * max(0, length - (max_response_length - buffer_length)) / buffer_length``: 0 up to the start of
    the buffer, ``-penalty_factor`` at the limit, and on along the same line past it.

    Args:
      lengths: int[...], sampled tokens of each response.
      max_response_length: the limit the penalty leads up to, in tokens.
      buffer_length: how long before the limit it starts, in tokens.
      penalty_factor: the penalty at the limit, in units of the score.

    Returns:
      float32[...], at most 0.

    Raises:
      ValueError: the buffer is not between 1 and ``max_response_length``.
    """
    if not 0 < buffer_length <= max_response_length:
        raise ValueError(
            f"buffer_length is {buffer_length}; expected 1 to max_response_length ({max_response_length}); "
            "change config.overlong_buffer"
        )
    excess = jnp.asarray(lengths, jnp.float32) - (max_response_length - buffer_length)
    return -penalty_factor * jnp.maximum(excess, 0.0) / buffer_length


def filter_groups(
    raw_scores: ArrayLike, mask: ArrayLike, tolerance: float = ZERO_VARIANCE_TOLERANCE
) -> jax.Array:
    """Which groups carry signal (DAPO's dynamic sampling): two scored samples at least, not all the same.

    Args:
      raw_scores: float[P, G], the task's score before any shaping: a length penalty must not make a group of equally
        wrong answers look informative.
      mask: bool or float[P, G], true where the sample was scored.
      tolerance: see ``advantages.zero_variance``.

    Returns:
      bool[P], true for the groups to keep.
    """
    return ~zero_variance(raw_scores, mask, tolerance)
