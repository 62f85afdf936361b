"""The whole objective of an update: clipped surrogate, KL to the reference, entropy bonus, and what is logged.

    loss = sum_t weights_t * (is_t * ppo_t + kl_loss_coef * kl_t - entropy_coef * entropy_t)

``batch_weights`` is called once, on the global batch; ``rl_objective`` on each micro-batch with its rows of the
weights. Losses and gradients of the micro-batches then add up to those of the batch, and so do the metrics
(``merge_metrics``).
"""

from __future__ import annotations

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp

from rlvr_jax.algorithms.aggregation import check_loss_agg_mode, loss_weights
from rlvr_jax.algorithms.importance import ROLLOUT_IS_LEVELS, log_ratio, rollout_importance
from rlvr_jax.algorithms.kl import check_kl_loss_type, kl_estimate, kl_loss
from rlvr_jax.algorithms.policy_loss import ppo_clip_loss
from rlvr_jax.types import TrainBatch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is optimised. Hashable, hence a static argument of a jitted function.

    Attributes:
      clip_ratio_low, clip_ratio_high: bounds of the ratio below and above 1 (DAPO: 0.2 and 0.28).
      clip_ratio_c: dual clip for negative advantages, > 1; None turns it off.
      loss_agg_mode: see ``aggregation.loss_weights``.
      max_response_length: tokens; what ``seq-mean-token-sum-norm`` divides by, not used otherwise.
      kl_loss_type: see ``kl.kl_loss``.
      kl_loss_coef: weight of the KL to the reference in the loss; 0 turns it off.
      entropy_coef: weight of the entropy bonus; 0 turns it off.
      rollout_is: ``off``, ``token`` or ``sequence``; see ``importance.rollout_importance``.
      rollout_is_threshold: largest importance weight.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float | None = 3.0
    loss_agg_mode: str = "token-mean"
    max_response_length: int | None = None
    kl_loss_type: str = "k3+"
    kl_loss_coef: float = 0.0
    entropy_coef: float = 0.0
    rollout_is: str = "off"
    rollout_is_threshold: float = 2.0

    def __post_init__(self) -> None:
        c = self.clip_ratio_c
        checks = {
            "clip_ratio_low": (0 < self.clip_ratio_low <= 1, "in (0, 1]"),
            "clip_ratio_high": (0 < self.clip_ratio_high < math.inf, "a finite number > 0"),
            "clip_ratio_c": (c is None or 1 < c < math.inf, "None (off), or a finite number > 1"),
            "kl_loss_coef": (0 <= self.kl_loss_coef < math.inf, "a finite number >= 0"),
            "entropy_coef": (math.isfinite(self.entropy_coef), "a finite number"),
            "rollout_is": (self.rollout_is in ROLLOUT_IS_LEVELS, f"one of {ROLLOUT_IS_LEVELS}"),
            "rollout_is_threshold": (self.rollout_is_threshold > 0, "a number > 0"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}; expected {expected}; change config.{name}"
                )
        check_loss_agg_mode(self.loss_agg_mode, self.max_response_length)
        check_kl_loss_type(self.kl_loss_type)


def batch_weights(
    batch: TrainBatch, config: ObjectiveConfig, *, num_samples: int
) -> tuple[jax.Array, jax.Array]:
    """Weights of the loss and of the metrics. To be called on the **global** batch, before any cut.

    Args:
      batch: the rows of all micro-batches and all hosts; ``loss_mask`` and ``sample_ids`` are read.
      config: for ``loss_agg_mode``.
      num_samples: trajectories in the batch (an upper bound will do).

    Returns:
      ``(weights, token_weights)``, float32[B, T] both: what the loss is summed with, and 1 / trained tokens.
    """
    weights = loss_weights(
        batch.loss_mask,
        batch.sample_ids,
        mode=config.loss_agg_mode,
        num_samples=num_samples,
        max_response_length=config.max_response_length,
    )
    token_weights = loss_weights(
        batch.loss_mask, batch.sample_ids, mode="token-mean", num_samples=num_samples
    )
    return weights, token_weights


def rl_objective(
    policy_logprobs: jax.Array,
    entropy: jax.Array,
    batch: TrainBatch,
    weights: jax.Array,
    token_weights: jax.Array,
    config: ObjectiveConfig,
    *,
    old_logprobs: jax.Array | None = None,
    has_reference: bool = True,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of a micro-batch: its part of the sum over the global batch.

    The trust region is around ``old_logprobs``. Left out, it is the behaviour policy, as recorded while sampling; with
    ``rollout_is`` on it is the policy itself (the first, and usually only, update on a batch starts there), and the
    distance to the behaviour policy is then the importance weight's to correct.

    Args:
      policy_logprobs: float32[B, T], nats, of ``batch.tokens`` as targets.
      entropy: float32[B, T], nats, of the distribution each token was predicted with.
      batch: the micro-batch.
      weights, token_weights: float32[B, T], its rows of ``batch_weights`` of the global batch.
      config: what to optimise.
      old_logprobs: float32[B, T], nats, under the policy at the start of the update, if it was computed apart.
      has_reference: whether ``batch.ref_logprobs`` holds a reference's log-probabilities.

    Returns:
      ``(loss, metrics)``, scalars. Metrics whose name ends in ``_max`` are maxima; all others are contributions to a
      global mean or sum. ``kl`` is the k3 estimate, only there with a reference; ``mismatch_kl`` is the k3 estimate of
      KL(behavior || policy), and ``logprob_delta_*`` the absolute difference of the two, nats.

    Raises:
      ValueError: ``kl_loss_coef`` is not 0 and there is no reference.
    """
    if config.kl_loss_coef and not has_reference:
        raise ValueError(
            f"kl_loss_coef is {config.kl_loss_coef} but the batch has no reference log-probabilities; "
            "give a reference model, or set config.kl_loss_coef=0"
        )
    mask = jnp.asarray(batch.loss_mask) > 0
    chex.assert_rank(mask, 2)
    chex.assert_equal_shape([policy_logprobs, entropy, mask, weights, token_weights])

    if old_logprobs is None:
        is_off = config.rollout_is == "off"
        old_logprobs = batch.behavior_logprobs if is_off else jax.lax.stop_gradient(policy_logprobs)
    ppo = ppo_clip_loss(
        policy_logprobs,
        old_logprobs,
        batch.advantages,
        mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )
    entropy = jnp.where(mask, entropy, 0.0)
    drift = log_ratio(policy_logprobs, batch.behavior_logprobs, mask)
    delta = jnp.abs(drift)

    def token_mean(values: jax.Array) -> jax.Array:
        return jnp.sum(token_weights * values)

    metrics = {
        "entropy": token_mean(entropy),
        "clip_frac": token_mean(ppo.clipped_low | ppo.clipped_high),
        "clip_frac_low": token_mean(ppo.clipped_low),
        "clip_frac_high": token_mean(ppo.clipped_high),
        "clip_frac_dual": token_mean(ppo.clipped_dual),
        "ratio_mean": token_mean(ppo.ratio),
        "ratio_max": jnp.max(ppo.ratio),
        "mismatch_kl": token_mean(jnp.expm1(drift) - drift),
        "logprob_delta_mean": token_mean(delta),
        "logprob_delta_max": jnp.max(delta),
    }
    policy_loss = ppo.loss
    if config.rollout_is != "off":
        importance = rollout_importance(
            old_logprobs,
            batch.behavior_logprobs,
            mask,
            batch.segment_ids,
            level=config.rollout_is,
            threshold=config.rollout_is_threshold,
        )
        policy_loss = importance * policy_loss
        metrics["rollout_is_mean"] = token_mean(importance)
        metrics["rollout_is_max"] = jnp.max(importance)
    metrics["policy_loss"] = jnp.sum(weights * policy_loss)
    loss = metrics["policy_loss"]
    if has_reference:
        metrics["kl"] = token_mean(kl_estimate(policy_logprobs, batch.ref_logprobs, mask))
    if config.kl_loss_coef:
        kl = kl_loss(
            policy_logprobs,
            batch.ref_logprobs,
            batch.behavior_logprobs,
            mask,
            kl_loss_type=config.kl_loss_type,
        )
        metrics["kl_loss"] = jnp.sum(weights * kl)
        loss = loss + config.kl_loss_coef * metrics["kl_loss"]
    if config.entropy_coef:
        loss = loss - config.entropy_coef * jnp.sum(weights * entropy)
    metrics["loss"] = loss
    return loss, metrics


def merge_metrics(left: dict[str, jax.Array], right: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of two micro-batches together: maxima of ``*_max``, sums of the rest. Zeros are its neutral element."""
    return {
        name: jnp.maximum(left[name], right[name])
        if name.endswith("_max")
        else left[name] + right[name]
        for name in left
    }
