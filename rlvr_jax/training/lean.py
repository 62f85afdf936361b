"""Optimizers whose numbers take less memory: bfloat16 parameters, and optimizer state that waits on the host.

A parameter of bfloat16 has 8 bits of precision: an update of less than 1/512 of it is rounded away, which is most of
them at the learning rates of reinforcement learning. Two ways out: a float32 copy that takes the updates and of which
the parameters are the rounded values (``master_weights``; 4 bytes a parameter), or rounding up or down at random so
that the mean is right (``stochastic_rounding``; nothing).

``apply_gradients`` is what every trainer calls; a plain optax transformation is one that asks for none of this.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.distributed.sharding import path_name
from rlvr_jax.models.decoder import Params, widened

HOST_MEMORY = "pinned_host"


class WithMaster(NamedTuple):
    """Optimizer state with the float32 copy that the parameters are rounded from."""

    master: Params
    inner: Any


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LeanOptimizer:
    """An optax transformation with how its parameters and its state are kept.

    Attributes:
      transformation: computes in float32, whatever the parameters are.
      param_dtype: of the parameters, ``float32`` or ``bfloat16``.
      master_weights: keep a float32 copy of bfloat16 parameters in the state, and update that.
      stochastic_rounding: round updated parameters up or down at random; without a copy.
      host_offload: keep the state in the host's memory between updates.
    """

    transformation: optax.GradientTransformation
    param_dtype: str
    master_weights: bool
    stochastic_rounding: bool
    host_offload: bool

    def init(self, params: Params) -> Any:
        """The state before the first update."""
        wide = widened(params)
        inner = self.transformation.init(wide)
        return WithMaster(wide, inner) if self.master_weights else inner

    def apply(
        self, gradients: Params, state: Any, params: Params, key: jax.Array
    ) -> tuple[Params, Any]:
        """(new parameters, new state); ``key`` is read by stochastic rounding, and must be of this update alone."""
        gradients = widened(gradients)
        if self.master_weights:
            master, inner = state
        else:
            master, inner = widened(params), state
        updates, inner = self.transformation.update(gradients, inner, master)
        master = optax.apply_updates(master, updates)
        dtype = jnp.dtype(self.param_dtype)
        if self.stochastic_rounding:
            params = round_tree(master, key)
        else:
            params = jax.tree.map(lambda wide: wide.astype(dtype), master)
        return params, WithMaster(master, inner) if self.master_weights else inner


AnyOptimizer = optax.GradientTransformation | LeanOptimizer


def param_dtype(optimizer: AnyOptimizer) -> Any:
    """The dtype of the parameters that an optimizer updates."""
    return jnp.dtype(optimizer.param_dtype if isinstance(optimizer, LeanOptimizer) else jnp.float32)


def state_memory(optimizer: AnyOptimizer) -> str | None:
    """The kind of memory that the optimizer's state is kept in; None for the devices'."""
    offloads = isinstance(optimizer, LeanOptimizer) and optimizer.host_offload
    return HOST_MEMORY if offloads else None


def apply_gradients(
    optimizer: AnyOptimizer,
    gradients: Params,
    state: Any,
    params: Params,
    *,
    usable: jax.Array,
    key: jax.Array,
) -> tuple[Params, Any]:
    """One update of parameters and optimizer state, or none.

    Args:
      usable: bool[]; if false, both stay as they are.
      key: of this update alone, for stochastic rounding.

    Returns:
      (parameters, state), in the memories they came from.
    """

    def apply(params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
        if isinstance(optimizer, LeanOptimizer):
            return optimizer.apply(gradients, state, params, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    def skip(params: Params, state: Any, gradients: Params) -> tuple[Params, Any]:
        return params, state

    if state_memory(optimizer) is None:
        # A branch, not a selection between new and old: that would hold copies of the moments.
        return jax.lax.cond(usable, apply, skip, params, state, gradients)
    # From the host they are copies anyway, and a branch would need all of them on the device before it begins.
    here = jax.device_put(state, jax.memory.Space.Device)
    chosen = jax.tree.map(
        lambda new, old: jnp.where(usable, new, old),
        apply(params, here, gradients),
        (params, here),
    )
    return chosen[0], jax.device_put(chosen[1], jax.memory.Space.Host)


def check_host_memory(mesh: jax.sharding.Mesh, setting: str) -> None:
    """Raises ValueError when the devices of a mesh have no memory of the host's to keep something in.

    Args:
      setting: that asks for it.
    """
    device: Any = mesh.devices.flat[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if HOST_MEMORY not in kinds:
        raise ValueError(
            f"{setting} keeps arrays on the host and expects devices with {HOST_MEMORY} memory; got backend "
            f"{device.platform!r} with {', '.join(kinds) or 'no memory that has a name'}: change config.{setting}"
        )


def round_tree(tree: Params, key: jax.Array) -> Params:
    """``stochastic_round`` of every array, each with a key of its own, by its path."""

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        return stochastic_round(leaf, jax.random.fold_in(key, zlib.crc32(path_name(path).encode())))

    return jax.tree_util.tree_map_with_path(one, tree)


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 to bfloat16, up or down at random: the mean is x (Gupta et al. 2015).

    The 16 bits that are cut off, as a number below 2^16, are the chance to round away from zero: they are added to 16
    random bits, and the carry rounds. The bits depend on the key and the place in the array alone, so they are the same
    on any mesh. Infinities and NaN stay what they are.
    """
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
