"""What training does for the routers of a mixture of experts: the loss that balances their load, and its metrics.

Tokens that are trained on count, as in every other loss: prompts and padding do not, so that it is the same however a
batch is packed or cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlvr_jax.errors import ConfigError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.moe import Load, load_balancing_loss

Metrics = dict[str, jax.Array]
_CHOICES, _PROBS = "router/choices", "router/probs"  # while micro-batches are added up


def check_router(model: ModelConfig, key: str, value: Any) -> None:
    """Raises ConfigError for a setting of the routers, ``config.<key>``, that is on for a model without any."""
    if value and not model.num_experts:
        raise ConfigError(
            f"{key} is {value} and the model has no experts; expected a mixture of experts: set config.{key} to "
            f"{type(value)()}, or change config.model"
        )


def whole_load(load_of: Callable[[Any], Load | None], pieces: Any, *, coef: float) -> Load | None:
    """The load of all micro-batches, by a forward pass of its own; None where the loss does without.

    The loss is a product of two means over the batch. Its gradient in a micro-batch needs the first of all of it.

    Args:
      load_of: of a piece.
      pieces: pytree of arrays [A, ...], the A micro-batches.
      coef: of the loss.
    """
    if not coef or jax.tree.leaves(pieces)[0].shape[0] == 1:
        return None
    return jax.tree.map(lambda x: x.sum(0), jax.lax.map(load_of, pieces))


def add_router_loss(
    loss: jax.Array,
    metrics: Metrics,
    load: Load | None,
    *,
    coef: float,
    experts_per_token: int,
    whole: Load | None,
) -> tuple[jax.Array, Metrics]:
    """A micro-batch's loss with ``coef`` times its part of the load-balancing loss, and what ``router_metrics`` needs.

    ``metrics["loss"]`` stays what it was. Without experts (``load`` is None) nothing changes.
    """
    if load is None:
        return loss, metrics
    if coef:
        loss += coef * load_balancing_loss(load, experts_per_token=experts_per_token, whole=whole)
    return loss, metrics | {_CHOICES: load.choices, _PROBS: load.probs}


def router_metrics(metrics: Metrics, *, experts_per_token: int) -> Metrics:
    """Metrics of an update with those of its routers for the sums of ``add_router_loss``, if there are any.

    ``router/aux_loss`` is the load-balancing loss before its coefficient (k when the load is even);
    ``router/max_share`` the largest part of a layer's choices that fell on one expert (1 / E when even).
    """
    if _CHOICES not in metrics:
        return metrics
    rest = {name: value for name, value in metrics.items() if name not in (_CHOICES, _PROBS)}
    choices, load = metrics[_CHOICES], Load(metrics[_CHOICES], metrics[_PROBS])
    shares = choices / jnp.maximum(choices.sum(1, keepdims=True), 1.0)
    return rest | {
        "router/aux_loss": load_balancing_loss(load, experts_per_token=experts_per_token),
        "router/max_share": shares.max(),
    }
