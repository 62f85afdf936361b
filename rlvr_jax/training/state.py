"""The train state: made, placed on the mesh, described for a restore. And the optimizer, from plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlvr_jax.distributed.placement import put
from rlvr_jax.distributed.sharding import param_shardings, replicated, shardings_like
from rlvr_jax.models.adapters import ADAPTER_AXES, AdapterConfig, abstract_adapters, init_adapters
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, Params, abstract_params
from rlvr_jax.models.frozen import base_shardings
from rlvr_jax.types import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with clipping by global norm.

    Attributes:
      learning_rate: peak.
      schedule: after warm-up, ``constant``, ``linear`` or ``cosine`` down to ``final_fraction`` of the peak.
      warmup_steps: of linear growth from 0; step 0 already moves by 1 / (warmup_steps + 1) of the peak.
      num_steps: at which the schedule ends.
      grad_clip: largest global norm of the gradient; 0 turns clipping off.
    """

    learning_rate: float
    num_steps: int
    schedule: str = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ValueError(
                f"optimizer.schedule is {self.schedule!r}; expected constant, linear or cosine"
            )
        for name in ("learning_rate", "warmup_steps", "weight_decay", "grad_clip"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; expected >= 0")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; expected in [0, 1)")


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate at update ``count``."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = max(config.num_steps - warmup, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    elif config.schedule == "linear":
        after = optax.linear_schedule(peak, peak * config.final_fraction, rest)
    else:
        after = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    if not warmup:
        return after
    ramp = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([ramp, after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019); norms and biases (arrays of rank 1 a layer) do not decay."""

    def decays(params: Params) -> Any:
        def is_kernel(path: Any, _: jax.Array) -> bool:
            name = path[-1].key
            return name not in ("scale", "magnitude") and not name.endswith("_bias")

        return jax.tree_util.tree_map_with_path(is_kernel, params)

    adam = optax.adamw(
        learning_rate_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
    )
    if not config.grad_clip:
        return adam
    return optax.chain(clip_by_global_norm(config.grad_clip), adam)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients whose global norm is larger down to ``max_norm``.

    One multiplication: that of optax selects between scaled and unscaled gradients and so holds a copy of them.
    """

    def clip(updates: Params, params: Params | None = None) -> Params:
        scale = max_norm / jnp.maximum(optax.tree.norm(updates), max_norm)
        return jax.tree.map(lambda gradient: gradient * scale, updates)

    return optax.stateless(clip)


def check_mesh(config: ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError when the tensor axis would cut a head in two, or there are no experts for theirs."""
    tensor = mesh.shape["tensor"]
    if config.num_kv_heads % tensor:
        raise ValueError(
            f"num_kv_heads ({config.num_kv_heads}) must be divisible by the tensor axis ({tensor}); "
            "change config.mesh.tensor"
        )
    expert = mesh.shape["expert"]
    if expert > 1 and not config.num_experts:
        raise ValueError(
            f"the expert axis of the mesh is {expert} and the model has no experts; expected 1: "
            "change config.mesh.expert, the fsdp axis does for all other weights what it does for experts"
        )


def abstract_trained(config: ModelConfig, adapter: AdapterConfig | None) -> Params:
    """Shapes and dtypes of what is trained: the adapters, or all parameters."""
    return abstract_params(config) if adapter is None else abstract_adapters(adapter, config)


def model_shardings(
    config: ModelConfig, mesh: jax.sharding.Mesh, adapter: AdapterConfig | None = None
) -> Params:
    """NamedShardings of the model's parameters; raises ValueError with the numbers when it does not divide.

    ``adapter`` is what stands beside them, if they are its base: it may want them in few bits.
    """
    check_mesh(config, mesh)
    return base_shardings(config, mesh, None if adapter is None else adapter.quantization)


def state_shardings(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """A TrainState of NamedShardings; raises ValueError with the numbers when the model does not divide."""
    check_mesh(config, mesh)
    params = abstract_trained(config, adapter)
    shardings = param_shardings(mesh, params, PARAM_AXES if adapter is None else ADAPTER_AXES)
    opt_state = jax.eval_shape(optimizer.init, params)
    whole: Any = replicated(mesh)
    return TrainState(
        step=whole,
        params=shardings,
        opt_state=shardings_like(mesh, opt_state, params, shardings),
        key=whole,
    )


def abstract_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of the state, for a restore."""
    params = abstract_trained(config, adapter)
    step: Any = jax.ShapeDtypeStruct((), jnp.int32)
    key: Any = jax.ShapeDtypeStruct((2,), jnp.uint32)
    opt_state = jax.eval_shape(optimizer.init, params)
    shapes = TrainState(step=step, params=params, opt_state=opt_state, key=key)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(config, optimizer, mesh, adapter),
    )


def init_state(
    config: ModelConfig,
    params: Params,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """The state before the first update.

    Args:
      params: NumPy or JAX arrays of the decoder's layout; copied, so that donating the state leaves them alone. Those
        that are kept in few bits already are, if ``adapter`` says so.
      seed: of the state's key, and of new adapters.
      adapter: if given, new adapters of ``params``, their base, are what the state holds.
    """
    shardings = state_shardings(config, optimizer, mesh, adapter)

    def first(params: Params) -> Params:
        if adapter is None:
            return jax.tree.map(jnp.copy, params)
        return init_adapters(adapter, params, jax.random.key(seed))

    placed = jax.jit(first, out_shardings=shardings.params)(
        put(params, model_shardings(config, mesh, adapter))
    )
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed)
    step = put(np.int32(0), shardings.step)
    key = put(np.asarray(jax.random.key_data(jax.random.key(seed))), shardings.key)
    return TrainState(step=step, params=placed, opt_state=opt_state, key=key)
