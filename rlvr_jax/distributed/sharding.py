"""Sharding by one table: logical axis of an array -> mesh axis.

Parameters name their logical axes in ``models.decoder.PARAM_AXES``, activations where they are made. Changing how a
model is spread over devices means changing ``RULES`` or the mesh, never the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rlvr_jax.distributed.mesh import ROW_AXES, TOKEN_AXES, num_token_shards

# Rows lie on the expert axis too: outside of the experts its devices would all compute the same. And what is not an
# expert's lies there as on fsdp, since it would be there as many times otherwise; all weights lie so on context.
RULES: dict[str, str | tuple[str, ...] | None] = {
    "rows": ROW_AXES,
    "columns": "context",
    "tokens": TOKEN_AXES,
    "vocab": "tensor",
    "embed": ("fsdp", "expert", "context"),
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "expert_embed": ("fsdp", "context"),
    "layers": None,
}


def spec(*axes: str | None) -> P:
    """PartitionSpec of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays with a row for each prompt or sequence: rows spread over data, fsdp and expert."""
    return NamedSharding(mesh, spec("rows"))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Of every array of a batch [B, T]: rows as in ``row_sharding``, the tokens of a row over context."""
    return NamedSharding(mesh, spec("rows", "columns"))


def sampler_sharding(mesh: Mesh) -> NamedSharding:
    """Of the sampler's arrays: rows over all axes but tensor, since it has one token of a row at a time."""
    return NamedSharding(mesh, spec("tokens"))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Pins x to its logical axes under the mesh in force; does nothing when there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, spec(*axes))


def per_token_shard(
    function: Callable[..., Any], axes: tuple[str | None, ...]
) -> Callable[..., Any]:
    """``function(shared, *rows)`` run by every shard of the tokens on its own, under the mesh in force.

    Args:
      function: gets ``shared`` whole (but for the ``tensor`` axis, which stays with the partitioner): it is gathered
        once before, and its gradient added up and scattered once after. What else it gets, and what it returns, has
        rows and columns in front.
      axes: the logical axes of ``shared``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or num_token_shards(mesh) == 1:
        return function
    spread = [axis if set(np.atleast_1d(axis)) <= set(TOKEN_AXES) else None for axis in spec(*axes)]

    def of_shard(shared: jax.Array, *rows: Any) -> Any:
        for dimension, axis in enumerate(spread):
            if axis is not None:
                shared = jax.lax.all_gather(shared, axis, axis=dimension, tiled=True)
        return function(shared, *rows)

    def mapped(shared: jax.Array, *rows: Any) -> Any:
        return jax.shard_map(
            of_shard,
            in_specs=(P(*spread), *[spec("rows", "columns")] * len(rows)),
            out_specs=spec("rows", "columns"),
            axis_names=set(TOKEN_AXES),
            check_vma=False,
        )(shared, *rows)

    return mapped


def axis_size(axis: str) -> int:
    """Of an axis of the mesh in force; 1 when there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[axis]


def per_device(
    function: Callable[..., Any], *, arguments: tuple[Any, ...], results: Any
) -> Callable[..., Any]:
    """``function`` run by every device on its own part, under the mesh in force; as it is when there is one device.

    Args:
      function: of arrays; it exchanges what it needs over mesh axes by name (``axis_size`` says which there are).
      arguments: for each, its logical axes, or a tree of them; ``()`` for what every device holds whole. Where a
        device has more of an argument than that, it is gathered, and its gradient added up.
      results: the same of what is returned; it must be equal on devices that are in none of its axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda axes: spec(*axes), tree, is_leaf=_is_axes)

    return jax.shard_map(
        function, in_specs=specs(arguments), out_specs=specs(results), check_vma=False
    )


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(axis is None or isinstance(axis, str) for axis in node)


def path_name(path: Any) -> str:
    """'a/b/c' of a leaf's path in a nested dict, as ``jax.tree_util`` gives it."""
    return "/".join(str(key.key) for key in path)


def tree_paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """'a/b/c' -> leaf of a nested dict, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {path_name(path): leaf for path, leaf in leaves}


def param_shardings(mesh: Mesh, params: Any, axes: Mapping[str, tuple[str | None, ...]]) -> Any:
    """A NamedSharding for every leaf of ``params`` (arrays or ShapeDtypeStructs).

    Raises:
      ValueError: a dimension is not divisible by the mesh axes it is spread over; says which, and the numbers.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = path_name(path)
        for size, axis in zip(leaf.shape, axes[name], strict=True):
            mesh_axes = RULES[axis] if axis else None
            if mesh_axes is None:
                continue
            names = (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes
            shards = 1
            for mesh_axis in names:
                shards *= mesh.shape[mesh_axis]
            if size % shards:
                raise ValueError(
                    f"{name}: axis {axis!r} of size {size} must be divisible by mesh axis "
                    f"{'x'.join(n for n in names if mesh.shape[n] > 1)} ({shards}); change config.mesh"
                )
        return NamedSharding(mesh, spec(*axes[name]))

    return jax.tree_util.tree_map_with_path(one, params)


def shardings_like(mesh: Mesh, tree: Any, params: Any, shardings: Any) -> Any:
    """Shardings of a tree that holds copies of ``params`` (an optax state): copies follow, the rest is replicated.

    A leaf is a copy when the end of its path and its shape are those of a parameter. So are the parts of a node in a
    parameter's place; one with a shorter last axis (numbers of blocks) follows too, as far as its last axis divides.
    """
    known = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            tree_paths(params).items(), jax.tree.leaves(shardings), strict=True
        )
    }

    def one(path: Any, leaf: Any) -> NamedSharding:
        names = [
            str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
        ]
        for end in (len(names), len(names) - 1):
            for start in range(end):
                shape, sharding = known.get("/".join(names[start:end]), (None, None))
                if sharding is None:
                    continue
                if shape == leaf.shape:
                    return sharding
                if end < len(names) and shape[:-1] == leaf.shape[:-1]:
                    return _last_axis_if_divisible(sharding, leaf.shape)
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(one, tree)


def _last_axis_if_divisible(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array of this shape, its last axis whole on every device if it does not divide."""
    try:
        sharding.shard_shape(shape)
    except ValueError:
        parts = tuple(sharding.spec)[: len(shape) - 1]
        return NamedSharding(sharding.mesh, P(*parts))
    return sharding
