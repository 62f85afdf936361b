"""Rows cut into columns: where the tokens of a batch [B, T] are when the ``context`` axis divides the rows themselves.

All of a decoder but attention treats every token by itself. So a batch goes through it as flat tokens [B * T, D], of
which each device has one stretch: some columns of its rows. ``flat_tokens`` puts them into that order, ``whole_rows``
shows every device all of its rows (keys and values, for its own queries), and ``take_columns`` brings tokens to where
they are asked for. Without a context axis flat tokens are row by row, and nothing is exchanged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlvr_jax.distributed.mesh import TOKEN_AXES, num_row_shards
from rlvr_jax.distributed.sharding import axis_size, spec


def flat_tokens(x: jax.Array) -> jax.Array:
    """dtype[B, T, ...] -> dtype[B * T, ...], ordered by shard of the rows, shard of the columns, row, column."""
    B, T, *rest = x.shape
    num_columns = axis_size("context")
    if num_columns > 1:
        rows = num_row_shards(jax.sharding.get_abstract_mesh())
        x = x.reshape(rows, B // rows, num_columns, T // num_columns, *rest).swapaxes(1, 2)
    return x.reshape(-1, *rest)


def whole_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Flat tokens dtype[B * T, ...] -> dtype[B * C, T, ...]: all B rows, once for each of the C shards of the columns.

    The order is that of ``flat_tokens(...).reshape(B * C, T / C, ...)``. A device gathers the rows that it has columns
    of, and no others; their gradient is added up in float32, and scattered.

    Args:
      num_rows: B.
    """
    num_columns = axis_size("context")
    if num_columns == 1:
        return x.reshape(num_rows, -1, *x.shape[1:])
    own_rows = num_rows // num_row_shards(jax.sharding.get_abstract_mesh())

    def of_shard(x: jax.Array) -> jax.Array:
        return _gather_columns(x.reshape(own_rows, -1, *x.shape[1:]))

    return jax.shard_map(
        of_shard,
        in_specs=spec("tokens"),
        out_specs=spec("tokens"),
        axis_names=set(TOKEN_AXES),
        check_vma=False,
    )(x)


@jax.custom_vjp
def _gather_columns(x: jax.Array) -> jax.Array:
    """dtype[b, T / C, ...] -> dtype[b, T, ...], inside of a shard_map."""
    return jax.lax.all_gather(x, "context", axis=1, tiled=True)


def _gather_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _gather_columns(x), None


def _gather_backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
    # Also because XLA:CPU ends the process over a bfloat16 sum in a shard_map that leaves an axis to the partitioner.
    wide = cotangent.astype(jnp.float32)
    own = jax.lax.psum_scatter(wide, "context", scatter_dimension=1, tiled=True)
    return (own.astype(cotangent.dtype),)


_gather_columns.defvjp(_gather_forward, _gather_backward)


def take_columns(x: jax.Array, columns: jax.Array) -> jax.Array:
    """Of each row of flat tokens, those in ``columns``.

    The shards of a row go round its devices, and each picks what it was asked for: no device holds more than one at a
    time, though what it asks for may lie anywhere.

    Args:
      x: dtype[B * T, D], in the order of ``flat_tokens``.
      columns: int32[B, M], each in [0, T); M must be divisible by the context axis, over which it is spread.

    Returns:
      dtype[B, M, D].
    """
    num_columns = axis_size("context")
    if num_columns == 1:
        rows = x.reshape(columns.shape[0], -1, x.shape[-1])
        return jnp.take_along_axis(rows, columns[:, :, None], axis=1)

    def of_shard(x: jax.Array, columns: jax.Array) -> jax.Array:
        part = x.reshape(columns.shape[0], -1, x.shape[-1])
        size = part.shape[1]
        own = jax.lax.axis_index("context")
        around = [(shard, (shard + 1) % num_columns) for shard in range(num_columns)]

        def pick(
            carry: tuple[jax.Array, jax.Array], step: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            part, found = carry
            at = columns - (own - step) % num_columns * size  # whose part this is by now
            here = (at >= 0) & (at < size)
            values = jnp.take_along_axis(part, jnp.clip(at, 0, size - 1)[:, :, None], axis=1)
            found = jnp.where(here[:, :, None], values, found)
            return (jax.lax.ppermute(part, "context", around), found), None

        nothing = jnp.zeros((*columns.shape, x.shape[-1]), x.dtype)
        return jax.lax.scan(pick, (part, nothing), jnp.arange(num_columns))[0][1]

    return jax.shard_map(
        of_shard,
        in_specs=(spec("tokens"), spec("rows", "columns")),
        out_specs=spec("rows", "columns"),
        axis_names=set(TOKEN_AXES),
        check_vma=False,
    )(x, columns)
