"""The train state: made, placed on the mesh, described for a restore. And the optimizer, from plain numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from rlvr_jax.distributed.placement import put
from rlvr_jax.distributed.sharding import param_shardings, replicated, shardings_like
from rlvr_jax.errors import ConfigError
from rlvr_jax.models.adapters import (
    ADAPTER_AXES,
    AdapterConfig,
    abstract_adapters,
    adapter_config,
    init_adapters,
)
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, Params, abstract_params, widened
from rlvr_jax.models.frozen import base_shardings
from rlvr_jax.training.adam8bit import scale_by_adam_8bit
from rlvr_jax.training.lean import (
    AnyOptimizer,
    LeanOptimizer,
    check_host_memory,
    param_dtype,
    state_memory,
)
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
      name: ``adamw``, or ``adamw_8bit`` with block-wise quantised moments (``adam8bit.py``).
      param_dtype: of what is trained, ``float32`` or ``bfloat16``; the update itself is float32.
      master_weights: of bfloat16 parameters, a float32 copy that takes the updates; without it and without
        stochastic rounding, updates below 1/512 of a parameter are lost.
      stochastic_rounding: of bfloat16 parameters without that copy (``lean.py``).
      host_offload: keep moments and copy in the host's memory between updates.
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
    name: str = "adamw"
    param_dtype: str = "float32"
    master_weights: bool = True
    stochastic_rounding: bool = False
    host_offload: bool = False

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
        if self.name not in ("adamw", "adamw_8bit"):
            raise ValueError(f"optimizer.name is {self.name!r}; expected adamw or adamw_8bit")
        if self.param_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"param_dtype is {self.param_dtype!r}; expected float32 or bfloat16")
        if self.stochastic_rounding and self.param_dtype == "float32":
            raise ValueError(
                "optimizer.stochastic_rounding is on and what is trained is float32, which is not rounded; expected "
                "parameters of bfloat16: set config.param_dtype='bfloat16' (adapters are float32), or turn it off"
            )
        if self.stochastic_rounding and self.master_weights:
            raise ValueError(
                "optimizer.stochastic_rounding and optimizer.master_weights are both on; expected one of them, since "
                "the float32 copy loses nothing: set config.optimizer.master_weights=False, or turn rounding off"
            )

    @property
    def lean(self) -> bool:
        """Whether parameters or state are kept in another way than as float32 on the devices."""
        return self.param_dtype != "float32" or self.host_offload


def optimizer_config(config: ConfigDict, *, num_steps: int) -> OptimizerConfig:
    """Of a run: its section ``optimizer``, for what it trains. Adapters are float32 beside a base of any dtype."""
    adapted = adapter_config(**config.adapter) is not None
    dtype = "float32" if adapted else config.param_dtype
    return OptimizerConfig(num_steps=num_steps, param_dtype=dtype, **config.optimizer)


def check_param_dtype(dtype: str, adapter: AdapterConfig | None) -> None:
    """Raises ConfigError for a dtype that parameters cannot have."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"param_dtype is {dtype!r}; expected float32 or bfloat16")
    if dtype != "float32" and adapter is not None and adapter.quantization is not None:
        raise ConfigError(
            f"param_dtype is {dtype} and adapter.quantize keeps the base's kernels in few bits; expected float32 for "
            "what is left of it: set config.param_dtype='float32', or config.adapter.quantize='none'"
        )


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


def make_optimizer(config: OptimizerConfig) -> AnyOptimizer:
    """AdamW (Loshchilov & Hutter 2019); norms and biases (arrays of rank 1 a layer) do not decay."""
    transformation = _adamw(config)
    if not config.lean:
        return transformation
    return LeanOptimizer(
        transformation=transformation,
        param_dtype=config.param_dtype,
        master_weights=config.master_weights and config.param_dtype != "float32",
        stochastic_rounding=config.stochastic_rounding,
        host_offload=config.host_offload,
    )


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:

    def decays(params: Params) -> Any:
        def is_kernel(path: Any, _: jax.Array) -> bool:
            name = path[-1].key
            return name not in ("scale", "magnitude") and not name.endswith("_bias")

        return jax.tree_util.tree_map_with_path(is_kernel, params)

    schedule = learning_rate_schedule(config)
    if config.name == "adamw_8bit":
        adam = optax.chain(
            scale_by_adam_8bit(config.b1, config.b2, config.eps),
            optax.add_decayed_weights(config.weight_decay, decays),
            optax.scale_by_learning_rate(schedule),
        )
    else:
        adam = optax.adamw(
            schedule,
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


def abstract_trained(
    config: ModelConfig, adapter: AdapterConfig | None, dtype: Any = jnp.float32
) -> Params:
    """Shapes and dtypes of what is trained: the adapters, or all parameters."""
    shapes = abstract_params(config) if adapter is None else abstract_adapters(adapter, config)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


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
    optimizer: AnyOptimizer,
    mesh: jax.sharding.Mesh,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """A TrainState of NamedShardings; raises ValueError with the numbers when the model does not divide.

    Raises:
      ValueError: also when the optimizer's state shall be on the host, and the devices have no such memory.
    """
    check_mesh(config, mesh)
    memory = state_memory(optimizer)
    if memory is not None and isinstance(mesh, jax.sharding.Mesh):
        check_host_memory(mesh, "optimizer.host_offload")
    params = abstract_trained(config, adapter, param_dtype(optimizer))
    shardings = param_shardings(mesh, params, PARAM_AXES if adapter is None else ADAPTER_AXES)
    opt_state = jax.eval_shape(optimizer.init, params)
    whole: Any = replicated(mesh)
    of_state = shardings_like(mesh, opt_state, params, shardings)
    if memory is not None:
        of_state = jax.tree.map(lambda sharding: sharding.with_memory_kind(memory), of_state)
    return TrainState(step=whole, params=shardings, opt_state=of_state, key=whole)


def abstract_state(
    config: ModelConfig,
    optimizer: AnyOptimizer,
    mesh: jax.sharding.Mesh,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """Shapes, dtypes and shardings of the state, for a restore."""
    params = abstract_trained(config, adapter, param_dtype(optimizer))
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
    optimizer: AnyOptimizer,
    mesh: jax.sharding.Mesh,
    *,
    seed: int,
    adapter: AdapterConfig | None = None,
) -> TrainState:
    """The state before the first update.

    Args:
      params: NumPy or JAX arrays of the decoder's layout; copied, so that donating the state leaves them alone, and
        rounded to the dtype that the optimizer keeps. Those that are kept in few bits already are, if ``adapter`` says
        so.
      seed: of the state's key, and of new adapters.
      adapter: if given, new adapters of ``params``, their base, are what the state holds.
    """
    shardings = state_shardings(config, optimizer, mesh, adapter)
    dtype = param_dtype(optimizer)

    def first(params: Params) -> Params:
        if adapter is None:
            return jax.tree.map(lambda leaf: jnp.array(leaf, dtype), params)
        return init_adapters(adapter, widened(params), jax.random.key(seed))

    placed = jax.jit(first, out_shardings=shardings.params)(
        put(params, model_shardings(config, mesh, adapter))
    )
    opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(placed)
    step = put(np.int32(0), shardings.step)
    key = put(np.asarray(jax.random.key_data(jax.random.key(seed))), shardings.key)
    return TrainState(step=step, params=placed, opt_state=opt_state, key=key)
