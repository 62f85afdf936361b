"""The distance to the frozen reference: estimators of KL(policy || reference), as values, as losses, in the reward.

With ``x = log policy - log reference`` of a sampled token, the estimators (Schulman 2020, "Approximating KL
divergence") are k1 = x, k2 = x^2 / 2 and k3 = exp(-x) - 1 + x. As *values* on tokens of the policy, k1 and k3 are
unbiased. As *losses* the picture is another: the policy also draws the tokens, and a gradient has to account for that.
With ``w = policy / behavior``, these have, in expectation over tokens of any behaviour policy, exactly the gradient of
KL(policy || reference):

    k1+ = w * k1        k2+ = stop_gradient(w) * k2        k3+ = w * k3      (the default)

A plus thus means *the value of this estimator, with the gradient of the KL*, as it does in verl (which puts k2's
gradient under it; on-policy the two agree). Without it: k3 has on-policy the gradient of KL(reference || policy), kept
for parity with the GRPO paper and TRL; k2 is right on-policy only; k1 has an expected gradient of zero and is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from rlvr_jax.algorithms.aggregation import sum_by_sample
from rlvr_jax.algorithms.importance import log_ratio
from rlvr_jax.registry import Registry

KL_ESTIMATORS: Registry[Callable[[jax.Array], jax.Array]] = Registry("kl_estimator")
KL_LOSSES: Registry[Callable[[jax.Array, jax.Array], jax.Array]] = Registry("kl_loss_type")


@KL_ESTIMATORS.register("k1")
@KL_ESTIMATORS.register("kl")
def _k1(x: jax.Array) -> jax.Array:
    return x


@KL_ESTIMATORS.register("abs")
def _abs(x: jax.Array) -> jax.Array:
    return jnp.abs(x)


@KL_ESTIMATORS.register("k2")
@KL_ESTIMATORS.register("mse")
def _k2(x: jax.Array) -> jax.Array:
    return 0.5 * x**2


@KL_ESTIMATORS.register("k3")
@KL_ESTIMATORS.register("low_var_kl")
def _k3(x: jax.Array) -> jax.Array:
    return jnp.expm1(-x) + x  # expm1: exp(-x) - 1 loses every digit where the policies agree


@KL_LOSSES.register("k1+")
def _k1_plus(x: jax.Array, w: jax.Array) -> jax.Array:
    return w * _k1(x)


@KL_LOSSES.register("k2+")
@KL_LOSSES.register("mse+")
def _k2_plus(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(w) * _k2(x)


@KL_LOSSES.register("k3+")
@KL_LOSSES.register("low_var_kl+")
def _k3_plus(x: jax.Array, w: jax.Array) -> jax.Array:
    return w * _k3(x)


@KL_LOSSES.register("k2")
@KL_LOSSES.register("mse")
def _k2_plain(x: jax.Array, w: jax.Array) -> jax.Array:
    del w
    return _k2(x)


@KL_LOSSES.register("k3")
@KL_LOSSES.register("low_var_kl")
def _k3_plain(x: jax.Array, w: jax.Array) -> jax.Array:
    del w
    return _k3(x)


def kl_estimate(
    policy_logprobs: ArrayLike, ref_logprobs: ArrayLike, mask: ArrayLike, *, estimator: str = "k3"
) -> jax.Array:
    """Per-token value of an estimator of KL(policy || reference), for logs and rewards.

    Args:
      policy_logprobs, ref_logprobs: float[B, T], nats, of the sampled tokens.
      mask: float or bool[B, T], true where the token counts.
      estimator: a name in ``KL_ESTIMATORS``: k1 (kl), abs, k2 (mse), k3 (low_var_kl).

    Returns:
      float32[B, T], 0 where ``mask`` is 0.

    Raises:
      ValueError: the estimator is unknown.
    """
    return KL_ESTIMATORS.get(estimator)(log_ratio(policy_logprobs, ref_logprobs, mask))


def kl_loss(
    policy_logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    behavior_logprobs: ArrayLike,
    mask: ArrayLike,
    *,
    kl_loss_type: str,
) -> jax.Array:
    """Per-token loss whose gradient pulls the policy to the reference (formulas in the module's docstring).

    Args:
      policy_logprobs: float[B, T], nats, of the sampled tokens; the gradient flows through these.
      ref_logprobs, behavior_logprobs: float[B, T], nats, of the same tokens.
      mask: float or bool[B, T], true where the token is trained on.
      kl_loss_type: a name in ``KL_LOSSES``.

    Returns:
      float32[B, T], 0 where ``mask`` is 0.

    Raises:
      ValueError: the type is unknown, or is no loss.
    """
    check_kl_loss_type(kl_loss_type)
    x = log_ratio(policy_logprobs, ref_logprobs, mask)
    w = jnp.exp(log_ratio(policy_logprobs, behavior_logprobs, mask))
    return KL_LOSSES.get(kl_loss_type)(x, w)


def check_kl_loss_type(kl_loss_type: str) -> None:
    """Raises ValueError unless ``kl_loss_type`` names a loss; says why k1 and abs are none."""
    if kl_loss_type in ("k1", "kl", "abs"):
        reason = "is not a KL" if kl_loss_type == "abs" else "has an expected gradient of zero"
        raise ValueError(
            f"kl_loss_type is {kl_loss_type!r}, which as a loss {reason}; expected one of {', '.join(KL_LOSSES)}; "
            "use 'k1+' or 'k3+' in the loss, or 'k1' in the reward (use_kl_in_reward)"
        )
    KL_LOSSES.get(kl_loss_type)


def kl_penalty_by_sample(
    behavior_logprobs: ArrayLike,
    ref_logprobs: ArrayLike,
    mask: ArrayLike,
    sample_ids: ArrayLike,
    *,
    num_samples: int,
    estimator: str = "k1",
) -> jax.Array:
    """KL of each sequence to the reference, to be taken off its score: ``score - kl_coef * penalty``.

    Sums the estimator over the tokens the policy sampled; tool observations are masked and do not enter.

    Args:
      behavior_logprobs, ref_logprobs: float[B, T], nats, of the sampled tokens.
      mask: float or bool[B, T], true where the policy sampled the token.
      sample_ids: int32[B, T], in [0, num_samples) where ``mask`` is 1.
      num_samples: number of sequences.
      estimator: a name in ``KL_ESTIMATORS``; k1 is the log-ratio, whose sum is unbiased.

    Returns:
      float32[num_samples], nats; a new array, the inputs being left as they are.
    """
    values = kl_estimate(behavior_logprobs, ref_logprobs, mask, estimator=estimator)
    return sum_by_sample(values, mask, sample_ids, num_samples=num_samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLController:
    """The coefficient of the KL, fixed or steered to a target. ``dataclasses.asdict`` is its state in a checkpoint.

    Attributes:
      coef: the coefficient now.
      target: the KL to hold, nats; None leaves ``coef`` fixed.
      horizon: how many samples a full correction takes.
    """

    coef: float
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if not (self.coef >= 0 and math.isfinite(self.coef)):
            raise ValueError(f"KLController.coef is {self.coef}; expected a finite number >= 0")
        if self.target is not None and not self.target > 0:
            raise ValueError(f"KLController.target is {self.target}; expected None or nats > 0")
        if not self.horizon > 0:
            raise ValueError(f"KLController.horizon is {self.horizon}; expected samples > 0")

    def update(self, kl: float, num_samples: int) -> KLController:
        """The controller after a batch: ``coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)``.

        As in Ziegler et al. 2019 (arXiv:1909.08593), but no batch moves the coefficient by more than a fifth, and a
        KL that is not finite leaves it alone.

        Args:
          kl: the batch's KL, nats, in the unit of ``target``.
          num_samples: sequences in the batch.
        """
        if self.target is None or not math.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        step = min(num_samples / self.horizon, 1.0)
        return dataclasses.replace(self, coef=self.coef * (1.0 + error * step))
