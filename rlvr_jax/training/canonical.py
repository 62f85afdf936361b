"""The parts of ``train``, for a loop of one's own: objective and optimizer (``scoring.py`` has the verifier).

    optimizer = Optimizer(policy, learning_rate=1e-5)
    verifier = DomainVerifier()
    for batch in task_sampler(domains=["math", "text"], difficulty="adaptive"):
        responses = policy.generate(batch.prompts, temperature=0.7)
        rewards = verifier.score(batch, responses)
        loss = ppo_objective(policy, responses, rewards, ref_model=reference, kl_coef=0.05)
        optimizer.step(loss)

There is no second implementation of anything here: a loss is a packed batch with the reference's log-probabilities, and
``step`` runs on it the one compiled update that ``training/rl.py`` runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from rlvr_jax.algorithms.advantages import group_advantages
from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.data import packing
from rlvr_jax.distributed.sharding import replicated
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import STRICT, Params
from rlvr_jax.models.policy_head import LogitTransform, RowBounds
from rlvr_jax.training.policy import Policy, Responses
from rlvr_jax.training.scoring import Rewards, scored_groups
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import (
    Learner,
    Metrics,
    Minibatch,
    StepConfig,
    make_learner,
    update,
)
from rlvr_jax.types import Group, TrainBatch, TrainState


class Loss:
    """What ``ppo_objective`` returns: the loss of one batch at the policy's present parameters.

    Nothing of it is computed until somebody asks. ``Optimizer.step`` computes loss, gradient and update in one
    program, and leaves the numbers here: reading them afterwards is free. Reading ``value`` or ``metrics`` before it
    costs a forward pass. It belongs to one version of the policy: after an update it can be read, not stepped.

    Attributes:
      policy: whose loss it is.
      policy_version: at which version of it.
      config: what is optimised, and how.
      groups: the responses with their verdicts.
      minibatch: the packed batch on the mesh; None once it was stepped.
    """

    def __init__(
        self,
        policy: Policy,
        config: StepConfig,
        *,
        groups: tuple[Group, ...],
        minibatch: Minibatch,
    ) -> None:
        self.policy, self.policy_version = policy, policy.version
        self.config, self.groups = config, groups
        self.minibatch: Minibatch | None = minibatch
        self._metrics: Metrics | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """``loss``, ``policy_loss``, ``kl``, ``entropy``, ``clip_frac``, ``mismatch_kl``, ...; nats where they are
        log-probabilities. ``grad_norm`` and ``update_skipped`` are there once it was stepped.

        Raises:
          ValueError: the policy was updated by another loss before this one was read.
        """
        if self._metrics is None:
            self.check_fresh()
            assert self.minibatch is not None  # only a step takes it away, and leaves metrics
            learner, evaluate = _programs(self.policy.config, self.policy.mesh, self.config)
            with jax.set_mesh(learner.mesh):
                self._metrics = evaluate(
                    self.policy.params,
                    self.minibatch.batch,
                    bounds=self.minibatch.bounds,
                    num_samples=self.minibatch.num_samples,
                )
        return {name: float(value) for name, value in jax.device_get(self._metrics).items()}

    @property
    def value(self) -> float:
        """The number that is minimised."""
        return self.metrics["loss"]

    def check_fresh(self) -> None:
        """Raises ValueError if the policy has been updated since the loss was made."""
        if self.policy_version != self.policy.version:
            raise ValueError(
                f"this loss was made at version {self.policy_version} of the policy, which is at version "
                f"{self.policy.version} now; expected a loss of the present parameters: call ppo_objective again "
                "(the same responses may be used: they keep the log-probabilities they were sampled with)"
            )

    def stepped(self, metrics: Metrics) -> None:
        """Takes the metrics of the update that was made of this loss, and lets go of the batch."""
        self._metrics, self.minibatch = metrics, None

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __repr__(self) -> str:
        return f"Loss({self.value:.6g}, policy_version={self.policy_version})"


def ppo_objective(
    policy: Policy,
    responses: Responses,
    rewards: Rewards | ArrayLike,
    *,
    ref_model: Policy | None = None,
    kl_coef: float = 0.0,
    use_kl_in_reward: bool = False,
    adv_estimator: str = "grpo",
    mask_truncated: bool = False,
    row_length: int = 0,
    micro_rows: int = 0,
    remat: str = "full",
    **objective: Any,
) -> Loss:
    """PPO's clipped surrogate with group advantages, and the KL to a frozen reference.

    Args:
      policy: to be improved.
      responses: of ``policy.generate``; those of an earlier version are fine, the ratio is to what they were sampled
        with.
      rewards: of ``DomainVerifier.score``; or float[P, G] of one's own, NaN where there is no verdict (not trained on).
      ref_model: the reference, ``policy.freeze()`` of before the first update.
      kl_coef: weight of KL(policy || reference); 0 still reports it.
      use_kl_in_reward: take the KL off the scores instead of adding it to the loss.
      adv_estimator: ``grpo``, ``dr_grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``.
      mask_truncated: do not train on responses that ran out of tokens.
      row_length: tokens of a packed row; 0 for room for the largest group, its prompt stored once. The gradient is the
        same, memory grows with the square.
      micro_rows: packed rows whose gradient is computed at once, 0 for all; the gradient is the same.
      remat: what the backward pass keeps: ``full`` (nothing), ``dots`` or ``none`` (everything).
      **objective: other fields of ``ObjectiveConfig``: clip_ratio_low, clip_ratio_high, clip_ratio_c, loss_agg_mode,
        kl_loss_type, entropy_coef, rollout_is, rollout_is_threshold.

    Returns:
      A ``Loss``, for ``Optimizer.step``.

    Raises:
      ValueError: rewards of another shape, a group of one with a group baseline, greedy samples, a KL without a
        reference, a reference that is not frozen or of another shape, a setting out of range.
      TypeError: no such setting.
    """
    known = {field.name for field in dataclasses.fields(ObjectiveConfig)} - {"kl_loss_coef"}
    if unknown := sorted(objective.keys() - known):
        raise TypeError(
            f"ppo_objective has no setting {unknown[0]!r}; known, beside those of its signature: "
            f"{', '.join(sorted(known))}"
        )
    _check_reference(policy, ref_model, kl_coef)
    config = StepConfig(
        objective=ObjectiveConfig(
            **{
                "max_response_length": responses.params.max_tokens,
                "kl_loss_coef": 0.0 if use_kl_in_reward else kl_coef,
                **objective,
            }
        ),
        transform=LogitTransform.of(responses.params),
        dtype=policy.dtype,
        remat=remat,
        micro_rows=micro_rows,
        use_reference=ref_model is not None,
        adv_estimator=adv_estimator,
        kl_in_reward=use_kl_in_reward,
    )
    learner, _ = _programs(policy.config, policy.mesh, config)
    groups = scored_groups(responses, rewards)
    scores = np.stack([group.scores for group in groups])
    advantages = group_advantages(scores, np.isfinite(scores), estimator=adv_estimator)
    batch = packing.pack_groups(
        groups,
        list(np.asarray(advantages)),
        length=key_bucket(packing.row_length(groups, row_length), learner.num_column_shards),
        row_multiple=micro_rows or learner.num_shards,
        min_rows=learner.min_rows,
        mask_truncated=mask_truncated,
    )
    reference = None if ref_model is None else learner.place(ref_model.params)
    minibatch = learner.prepare(batch, reference, scores=scores, kl_coef=kl_coef)
    return Loss(policy, config, groups=groups, minibatch=minibatch)


def _check_reference(policy: Policy, ref_model: Policy | None, kl_coef: float) -> None:
    if ref_model is None:
        if kl_coef:
            raise ValueError(
                f"kl_coef is {kl_coef} but there is no reference; give ref_model=policy.freeze() (made before the "
                "first update), or set kl_coef=0"
            )
        return
    if not ref_model.frozen:
        raise ValueError(
            "ref_model is a policy that can change; expected a frozen one: make it with freeze(), before the first "
            "update"
        )
    if ref_model.config != policy.config:
        raise ValueError(
            f"ref_model is of another shape ({ref_model.config}) than the policy ({policy.config}); expected the "
            "policy's own frozen copy, or a model of the same architecture"
        )


@functools.lru_cache(maxsize=16)
def _programs(
    model: ModelConfig, mesh: jax.sharding.Mesh, config: StepConfig
) -> tuple[Learner, Callable[..., Metrics]]:
    """What a loss needs before anybody steps it: a learner whose optimizer does nothing, and ``evaluate``."""
    nothing = optax.set_to_zero()
    learner = make_learner(model, nothing, mesh, state_shardings(model, nothing, mesh), config)

    def evaluate(
        params: Params, batch: TrainBatch, *, bounds: RowBounds, num_samples: int
    ) -> Metrics:
        """The metrics of an update that is not made; with its gradient unused, XLA leaves the backward pass out."""
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=nothing.init(params),
            key=jnp.zeros((2,), jnp.uint32),
        )
        _, metrics = update(
            state,
            batch,
            model=model,
            optimizer=nothing,
            config=config,
            num_shards=learner.num_shards,
            bounds=bounds,
            num_samples=num_samples,
        )
        return {k: v for k, v in metrics.items() if k not in ("grad_norm", "update_skipped")}

    return learner, jax.jit(
        evaluate,
        static_argnames=("bounds", "num_samples"),
        out_shardings=replicated(mesh),
        compiler_options=STRICT,
    )


class Optimizer:
    """AdamW with clipping by global norm; an update that is not finite is skipped (``update_skipped`` is 1).

    Args:
      policy: what it updates; not a frozen one.
      learning_rate: its peak.
      num_steps: at which a schedule other than ``constant`` ends.
      **settings: other fields of ``OptimizerConfig``: schedule, warmup_steps, b1, b2, eps, weight_decay, grad_clip,
        name, master_weights, stochastic_rounding, host_offload. ``param_dtype`` is that of the policy's parameters.

    Raises:
      ValueError: a frozen policy, a setting out of range, a schedule without its end.
      TypeError: no such setting.
    """

    def __init__(
        self, policy: Policy, *, learning_rate: float, num_steps: int | None = None, **settings: Any
    ) -> None:
        if policy.frozen:
            raise ValueError(
                "the policy is frozen; expected one that can change: optimise the policy, and keep the frozen one as "
                "ref_model"
            )
        if num_steps is None and settings.get("schedule", "constant") != "constant":
            raise ValueError(
                f"schedule {settings['schedule']!r} ends at num_steps, which is not given; give it"
            )
        self.policy = policy
        self._optimizer = make_optimizer(
            OptimizerConfig(
                learning_rate=learning_rate,
                num_steps=num_steps or 1,
                param_dtype=str(jax.tree.leaves(policy.params)[0].dtype),
                **settings,
            )
        )
        self._shardings = state_shardings(policy.config, self._optimizer, policy.mesh)
        state = init_state(
            policy.config, policy.params, self._optimizer, policy.mesh, seed=policy.seed
        )
        self._state = dataclasses.replace(state, params=policy.params)  # no second copy is kept
        self._learners: dict[StepConfig, Learner] = {}

    def step(self, loss: Loss) -> None:
        """Updates the policy by one loss; the next ``generate`` samples from the updated parameters.

        Raises:
          ValueError: the loss is of another policy, or of parameters that were updated since.
        """
        policy = self.policy
        if loss.policy is not policy:
            raise ValueError("this loss is of another policy than the optimizer's; use its own")
        loss.check_fresh()
        assert loss.minibatch is not None  # a loss without one was stepped, and is not fresh
        if loss.config not in self._learners:
            self._learners[loss.config] = make_learner(
                policy.config, self._optimizer, policy.mesh, self._shardings, loss.config
            )
        # The parameters are the policy's: another optimizer may have moved them.
        state = dataclasses.replace(self._state, params=policy.params)
        self._state, metrics = self._learners[loss.config].train_step(state, loss.minibatch)
        policy.load_params(self._state.params)
        loss.stepped(metrics)
