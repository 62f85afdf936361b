"""Arrays between the hosts and the mesh, whichever process the devices belong to.

With one process these are ``jax.device_put`` and ``jax.device_get``. With several, each holds the same host values,
puts its own devices' parts in place, and gets whole arrays back.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def put(tree: Any, shardings: Any) -> Any:
    """Host values, the same on every process, as arrays on the mesh.

    Args:
      tree: pytree of NumPy or JAX arrays or scalars.
      shardings: a sharding, or a tree of them (a prefix of ``tree``).
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)

    def one(sharding: jax.sharding.Sharding, value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, sharding)  # from one layout on the mesh to another
        # Not device_put: with several processes it gathers the whole value from all of them, to compare.
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(
        lambda sharding, values: jax.tree.map(lambda value: one(sharding, value), values),
        shardings,
        tree,
        is_leaf=lambda node: isinstance(node, jax.sharding.Sharding),
    )


def fetch(tree: Any) -> Any:
    """Arrays on the mesh as NumPy arrays, whole, on every process; all of them call this."""
    if jax.process_count() == 1:
        return jax.device_get(tree)

    def one(array: Any) -> np.ndarray:
        here = not isinstance(array, jax.Array) or array.is_fully_addressable
        if here or array.is_fully_replicated:
            return np.asarray(array)
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(one, tree)
