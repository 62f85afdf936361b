"""Group advantages: from the scores of G samples of P prompts to one number a sample.

Each estimator subtracts a baseline made of the scores themselves, so none needs a critic. Samples that could not be
scored are masked: they get 0 and change nobody else's value. A group whose scores are all the same carries no signal;
it is recognised on the scores with a tolerance, because the float32 standard deviation of seven times 0.1 is 8e-9 and
dividing by it would invent a gradient.

Scores go in as they are to be learned from (shaped, KL-penalised); which groups are worth keeping is decided on the raw
task score by ``shaping.filter_groups``.
"""

from __future__ import annotations

from typing import Protocol

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlvr_jax.registry import Registry

ZERO_VARIANCE_TOLERANCE = 1e-6


class Estimator(Protocol):
    """``(scores float32[P, G], mask bool[P, G], epsilon, tolerance) -> float32[P, G]``, 0 where masked."""

    def __call__(
        self, scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float
    ) -> jax.Array: ...


ESTIMATORS: Registry[Estimator] = Registry("adv_estimator")


def group_advantages(
    scores: ArrayLike,
    mask: ArrayLike,
    *,
    estimator: str,
    epsilon: float = 1e-6,
    tolerance: float = ZERO_VARIANCE_TOLERANCE,
) -> jax.Array:
    """Turns scores into advantages.

    Args:
      scores: float[P, G]; NaN is allowed where ``mask`` is 0.
      mask: bool or float[P, G], true where the sample was scored.
      estimator: a name in ``ESTIMATORS``: grpo, dr_grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline.
      epsilon: added to a standard deviation before dividing by it.
      tolerance: see ``zero_variance``.

    Returns:
      float32[P, G]; exactly 0 where masked, and in groups without variance.

    Raises:
      ValueError: the estimator is unknown, or its baseline needs more than one sample (when traced, not when run).
    """
    scores, mask = _scores_and_mask(scores, mask)
    return ESTIMATORS.get(estimator)(scores, mask, epsilon=epsilon, tolerance=tolerance)


def zero_variance(
    scores: ArrayLike, mask: ArrayLike, tolerance: float = ZERO_VARIANCE_TOLERANCE
) -> jax.Array:
    """Whether the scored samples of each group all have the same score.

    True when ``max - min <= tolerance * max(1, max |score|)``, so also for a group with fewer than two scored samples.

    Args:
      scores: float[P, G]; NaN is allowed where ``mask`` is 0.
      mask: bool or float[P, G], true where the sample was scored.
      tolerance: in units of the score, relative for scores above 1.

    Returns:
      bool[P].
    """
    scores, mask = _scores_and_mask(scores, mask)
    highest = jnp.max(jnp.where(mask, scores, -jnp.inf), axis=1)
    lowest = jnp.min(jnp.where(mask, scores, jnp.inf), axis=1)
    scale = jnp.max(jnp.where(mask, jnp.abs(scores), 0.0), axis=1)
    return highest - lowest <= tolerance * jnp.maximum(scale, 1.0)


@ESTIMATORS.register("grpo")
def grpo(scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float) -> jax.Array:
    """``(r - mean(r)) / (std(r) + epsilon)`` within the group, std with n - 1 (DeepSeekMath, arXiv:2402.03300)."""
    centred = dr_grpo(scores, mask, epsilon=epsilon, tolerance=tolerance)
    return centred / (_std(centred, mask, axis=1) + epsilon)


@ESTIMATORS.register("dr_grpo")
def dr_grpo(scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float) -> jax.Array:
    """``r - mean(r)`` within the group: no division, hence no bias to easy and hard tasks (arXiv:2503.20783)."""
    del epsilon
    if scores.shape[1] < 2:
        raise ValueError(
            f"scores have shape {scores.shape}: a group of {scores.shape[1]} has no baseline (every advantage would be "
            "0 for ever); expected 2 or more samples a group; raise group_size, or use "
            "adv_estimator='reinforce_plus_plus', whose baseline is the batch"
        )
    values = jnp.where(mask, scores, 0.0)
    count = jnp.sum(mask, axis=1, keepdims=True)
    mean = jnp.sum(values, axis=1, keepdims=True) / jnp.maximum(count, 1)
    trained = mask & ~zero_variance(scores, mask, tolerance)[:, None]
    return jnp.where(trained, values - mean, 0.0)


@ESTIMATORS.register("rloo")
def rloo(scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float) -> jax.Array:
    """``r_i - mean(r_j, j != i)``: the baseline leaves the sample out (arXiv:2402.14740)."""
    centred = dr_grpo(scores, mask, epsilon=epsilon, tolerance=tolerance)
    count = jnp.sum(mask, axis=1, keepdims=True)
    # r_i - (n mean - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    return centred * count / jnp.maximum(count - 1, 1)


@ESTIMATORS.register("reinforce_plus_plus")
def reinforce_plus_plus(
    scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float
) -> jax.Array:
    """``(r - mean(r)) / (std(r) + epsilon)`` over the whole batch (REINFORCE++, arXiv:2501.03262).

    The batch is one large group; groups of one sample are fine.
    """
    batch = grpo(scores.reshape(1, -1), mask.reshape(1, -1), epsilon=epsilon, tolerance=tolerance)
    return batch.reshape(scores.shape)


@ESTIMATORS.register("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(
    scores: jax.Array, mask: jax.Array, *, epsilon: float, tolerance: float
) -> jax.Array:
    """``(r - group mean) / (std + epsilon)``, std of the numerator over the batch (arXiv:2501.03262)."""
    centred = dr_grpo(scores, mask, epsilon=epsilon, tolerance=tolerance)
    return centred / (_std(centred, mask, axis=None) + epsilon)


def _scores_and_mask(scores: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
    scores, mask = jnp.asarray(scores, jnp.float32), jnp.asarray(mask) > 0
    chex.assert_rank(scores, 2)
    chex.assert_equal_shape([scores, mask])
    return scores, mask


def _std(centred: jax.Array, mask: jax.Array, *, axis: int | None) -> jax.Array:
    """Standard deviation, with n - 1, of values whose mean is 0 and which are 0 where masked; axes are kept."""
    count = jnp.sum(mask, axis=axis, keepdims=True)
    return jnp.sqrt(jnp.sum(centred**2, axis=axis, keepdims=True) / jnp.maximum(count - 1, 1))
