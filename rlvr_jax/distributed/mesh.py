"""The mesh: which devices, in which shape.

Axes ``data`` (replicas), ``fsdp`` (sharded replicas), ``expert`` (of a mixture: the experts are divided over it),
``context`` (the tokens of a row are divided over it) and ``tensor`` (every product is divided over it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")  # neighbours last: they exchange most
ROW_AXES = ("data", "fsdp", "expert")  # over which the rows of a batch are spread
# Over which its tokens are: the columns of a row over context. The sampler, which has one column at a time, spreads
# its rows over all of them.
TOKEN_AXES = (*ROW_AXES, "context")


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    context: int = 1,
    *,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> jax.sharding.Mesh:
    """Arranges the devices of all processes.

    Args:
      data, fsdp, tensor, expert, context: sizes of the axes; at most one is -1 and takes what is left.
      devices: all of ``jax.devices()`` by default.

    Raises:
      ValueError: when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, expert, context, tensor]
    asked = dict(zip(MESH_AXES, sizes, strict=True))
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(
            f"mesh sizes must be >= 1, at most one of them -1 (takes the rest); got {asked}"
        )
    if len(devices) % known or (-1 not in sizes and known != len(devices)):
        raise ValueError(
            f"mesh {asked} needs {'a multiple of ' if -1 in sizes else ''}{known} devices; "
            f"there are {len(devices)}: change config.mesh"
        )
    sizes = [len(devices) // known if size == -1 else size for size in sizes]
    # Not jax.make_mesh, which refuses an axis that is a part of one of a TPU's: tensor=4 on 8x8x8 chips.
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    auto = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    return jax.sharding.Mesh(arranged, MESH_AXES, axis_types=auto)


def num_row_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Over how many shards the rows of a batch are spread; batch sizes must be multiples of it."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def num_column_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Over how many shards the tokens of a row are spread; the length of rows must be a multiple of it."""
    return mesh.shape["context"]


def num_token_shards(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> int:
    """Over how many shards the tokens of a batch are spread, and the rows of the sampler."""
    return num_row_shards(mesh) * num_column_shards(mesh)
