"""The frozen base of adapters, its layers' kernels in few bits: which ones, where they lie, how they are made.

Kernels that ``linear.matmul`` multiplies with become ``QuantizedKernel``, adapted or not; embeddings, head, norms,
biases, routers and experts stay float32. The numbers are the same on every mesh. What differs is the layout: codes and
scales are spread as the kernel would be, if its blocks divide over the devices; where an axis that is gathered anyway
would cut blocks in parts, it is taken from the inputs to the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.distributed.sharding import (
    RULES,
    param_shardings,
    path_name,
    replicated,
    tree_paths,
)
from rlvr_jax.models.adapters import ADAPTABLE
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import GATHERED, PARAM_AXES, Params, abstract_params
from rlvr_jax.models.quantized import (
    Quantization,
    QuantizedKernel,
    block_size,
    quantize_kernel,
    quantize_scales,
)


def quantizes(path: str, quantization: Quantization | None) -> bool:
    """Whether the parameter at ``path`` is kept in few bits."""
    return quantization is not None and ADAPTABLE.fullmatch(path) is not None


def abstract_base(model: ModelConfig, quantization: Quantization | None) -> Params:
    """Shapes and dtypes of the base, without making it: what it holds is the sum of its leaves' bytes.

    Raises:
      ValueError: a kernel's inputs have no blocks.
    """

    def quantized(params: Params) -> Params:
        return _map(
            lambda path, leaf: (
                quantize_layers(leaf, path, quantization)
                if quantization is not None and quantizes(path, quantization)
                else leaf
            ),
            params,
        )

    return jax.eval_shape(quantized, abstract_params(model))


def base_shardings(
    model: ModelConfig, mesh: jax.sharding.Mesh, quantization: Quantization | None
) -> Params:
    """NamedShardings of the base.

    Raises:
      ValueError: the model, or the blocks of a kernel, do not divide over the mesh; says which, and the numbers.
    """
    shardings = param_shardings(mesh, abstract_params(model), PARAM_AXES)
    if quantization is None:
        return shardings
    shapes = tree_paths(abstract_params(model))

    def one(path: str, sharding: NamedSharding) -> Any:
        if not quantizes(path, quantization):
            return sharding
        return _shardings(path, shapes[path].shape, quantization, mesh)

    return _map(one, shardings)


def used_axes(path: str) -> tuple[str | None, str | None]:
    """Logical axes of a kernel's inputs and outputs where it is used."""
    _, inputs, outputs = (None if axis in GATHERED else axis for axis in PARAM_AXES[path])
    return inputs, outputs


def kernel_sharding(path: str, shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> NamedSharding:
    """Of the codes and scales of a kernel [L, in, out], and of a dense one that lies as they do.

    Raises:
      ValueError: its blocks do not divide over the mesh.
    """
    _, rows, columns = shape
    _, inputs, outputs = PARAM_AXES[path]
    over_rows, over_columns = (_mesh_axes(axis) for axis in (inputs, outputs))
    shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in (over_rows, over_columns)]
    size = block_size(rows)
    if rows // size % shards[0] == 0 and columns % shards[1] == 0:
        return NamedSharding(mesh, P(None, over_rows, over_columns))
    if inputs in GATHERED and columns % (shards[0] * shards[1]) == 0:
        return NamedSharding(mesh, P(None, None, over_columns + over_rows))
    names = "x".join(axis for axis in (*over_rows, *over_columns) if mesh.shape[axis] > 1)
    raise ValueError(
        f"{path}: its {rows} inputs are {rows // size} blocks of {size}, which must be divisible by {shards[0]}, and "
        f"its {columns} outputs by {shards[1]}"
        + (f", or the outputs by {shards[0] * shards[1]}" if inputs in GATHERED else "")
        + f" (mesh axes {names}); change config.mesh, or set config.adapter.quantize to none"
    )


def _mesh_axes(axis: str | None) -> tuple[str, ...]:
    mesh_axes = RULES[axis] if axis else None
    return () if mesh_axes is None else tuple(np.atleast_1d(mesh_axes).tolist())


def quantize_layers(kernel: jax.Array, path: str, quantization: Quantization) -> QuantizedKernel:
    """float32[L, in, out] in few bits, a layer at a time; a function for ``jax.jit``."""
    one = functools.partial(quantize_kernel, quantization=quantization, axes=used_axes(path))
    return jax.lax.map(one, kernel)


def quantize_piece(
    piece: np.ndarray,
    device: jax.Device | None,  # pyright: ignore[reportInvalidTypeForm]
    path: str,
    quantization: Quantization,
) -> QuantizedKernel:
    """A device's slice float32[L, in, out] of a kernel, of whole blocks: moved there and quantised a layer at a time.

    Scales are float32: what they share with other slices under double quantisation, ``quantize_scales`` does after.
    """
    single = dataclasses.replace(quantization, double=False)
    layers = [
        _quantize_one(jax.device_put(layer, device), quantization=single, axes=used_axes(path))
        for layer in piece
    ]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


_quantize_one = jax.jit(quantize_kernel, static_argnames=("quantization", "axes"))


def finished(
    kernel: QuantizedKernel, path: str, quantization: Quantization, mesh: jax.sharding.Mesh | None
) -> QuantizedKernel:
    """A kernel put together from pieces, its scales in 8 bits if that is asked for; NumPy without a mesh."""
    if quantization.double:
        spread = mesh and _shardings(path, kernel.shape, quantization, mesh)
        kernel = jax.jit(quantize_scales, out_shardings=spread)(kernel)
    return kernel if mesh is not None else jax.tree.map(np.asarray, kernel)


def quantize_base(
    params: Params, quantization: Quantization, mesh: jax.sharding.Mesh | None
) -> Params:
    """A base in few bits from float32 parameters that are there already.

    Args:
      params: on ``mesh``, or NumPy arrays without one; so is what is returned.
      quantization: how.
      mesh: where the parameters are.
    """

    def one(path: str, leaf: Any) -> Any:
        if not quantizes(path, quantization):
            return leaf
        if mesh is None:
            piece = quantize_piece(leaf, None, path, quantization)
            return finished(piece, path, quantization, None)
        of_path = functools.partial(quantize_layers, path=path, quantization=quantization)
        spread: Any = _shardings(path, leaf.shape, quantization, mesh)
        return jax.jit(of_path, out_shardings=spread)(leaf)

    return _map(one, params)


def _shardings(
    path: str, shape: tuple[int, ...], quantization: Quantization, mesh: jax.sharding.Mesh
) -> Any:
    """A QuantizedKernel of NamedShardings: the ranges of scales, few as they are, lie everywhere."""
    spread: Any = kernel_sharding(path, shape, mesh)
    whole: Any = replicated(mesh) if quantization.double else None
    return QuantizedKernel(
        codes=spread,
        scales=spread,
        low=whole,
        step=whole,
        kind=quantization.kind,
        axes=used_axes(path),
    )


def _map(function: Any, tree: Params) -> Params:
    """``function(path, leaf)`` of every leaf of a nested dict."""

    def one(path: Any, leaf: Any) -> Any:
        return function(path_name(path), leaf)

    return jax.tree_util.tree_map_with_path(one, tree)
