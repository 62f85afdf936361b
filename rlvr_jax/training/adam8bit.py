"""Adam with moments of 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861): 2 bytes a parameter, not 8.

Each moment is cut into blocks along its last axis. A block keeps its largest magnitude, and each number the nearest
of 256 values between 0 (or -1) and 1 times that: seven decades, of which each has twice as many values as the one
below it. An update decodes the moments to float32, does what Adam does, and encodes them again. As in the paper,
embeddings keep float32 moments, since their gradients differ most from row to row; so does what is too small to matter.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlvr_jax.distributed.sharding import path_name
from rlvr_jax.models.decoder import Params

# Numbers that share a scale, at most: the paper's library has come down to it from 2048.
BLOCK = 256
LEAST_BLOCK = 32  # a last axis that is no multiple of this stays float32
LEAST_SIZE = 4096  # and so does what is smaller than this
DECADES = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """A moment in 8 bits, in a parameter's place.

    Attributes:
      codes: uint8[..., n], of the parameter's shape: which of the 256 values.
      scales: float32[..., n / block], the largest magnitude of each block.
      signed: whether the values go from -1 to 1, or from 0 to 1.
    """

    codes: jax.Array
    scales: jax.Array
    signed: bool = dataclasses.field(metadata={"static": True})


class Adam8bitState(NamedTuple):
    """``count``: int32[]; ``mu``, ``nu``: trees of ``Blocks``, or of arrays where the moments are float32."""

    count: jax.Array
    mu: Any
    nu: Any


def block_size(path: str, shape: tuple[int, ...]) -> int:
    """Numbers of a block: the largest power of two that divides the last axis, at most ``BLOCK``; 0 for float32."""
    if path.startswith("embed/") or math.prod(shape) < LEAST_SIZE:
        return 0
    size = math.gcd(shape[-1], BLOCK)
    return size if size >= LEAST_BLOCK else 0


def encode(x: jax.Array, block: int, *, signed: bool) -> Blocks:
    """float32[..., n] in blocks along the last axis."""
    parts = x.reshape(*x.shape[:-1], -1, block)
    scales = jnp.max(jnp.abs(parts), -1)
    share = parts / jnp.where(scales > 0, scales, 1.0)[..., None]
    rank = _rank(jnp.abs(share), signed=signed)
    if signed:  # ranks are 1 to 127 on either side of 0, which is code 127; 1.0 has no counterpart
        rank = 127 + jnp.where(share < 0, -jnp.minimum(rank, 127), rank)
    return Blocks(codes=rank.astype(jnp.uint8).reshape(x.shape), scales=scales, signed=signed)


def decode(blocks: Blocks) -> jax.Array:
    """float32[..., n]."""
    code = blocks.codes.astype(jnp.int32)
    if blocks.signed:
        code = code - 127
    share = jnp.sign(code) * _value(jnp.abs(code), signed=blocks.signed)
    parts = share.reshape(*blocks.scales.shape, -1) * blocks.scales[..., None]
    return parts.reshape(code.shape)


def _decade(index: int, *, signed: bool) -> tuple[int, int, float]:
    """Rank of the first value of a decade, how many there are, and its upper end."""
    count = 2**index if signed else 2 ** (index + 1)
    return count if signed else count - 1, count, 10.0 ** (index + 1 - DECADES)


def _one(*, signed: bool) -> int:
    """The rank of 1, which comes after the last decade."""
    first, count, _ = _decade(DECADES - 1, signed=signed)
    return first + count


def _value(rank: jax.Array, *, signed: bool) -> jax.Array:
    """The value of each rank: the middles of a decade's equal parts, 0 below them all, 1 above."""
    value = jnp.zeros(rank.shape, jnp.float32)
    for index in range(DECADES):
        first, count, top = _decade(index, signed=signed)
        middle = top * (0.1 + 0.9 / count * (rank - first + 0.5))
        value = jnp.where(rank >= first, middle, value)
    return jnp.where(rank >= _one(signed=signed), 1.0, value)


def _rank(share: jax.Array, *, signed: bool) -> jax.Array:
    """The rank of the value nearest to each number in [0, 1]: int32."""
    rank, below = jnp.zeros(share.shape, jnp.int32), 0.0
    for index in range(DECADES):
        first, count, top = _decade(index, signed=signed)
        part = jnp.floor((share / top - 0.1) * (count / 0.9)).astype(jnp.int32)
        # Between the last value below and the first one here.
        start = (below + top * (0.1 + 0.45 / count)) / 2
        rank = jnp.where(share >= start, first + jnp.clip(part, 0, count - 1), rank)
        below = top * (1 - 0.45 / count)
    return jnp.where(share >= (below + 1) / 2, _one(signed=signed), rank)


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """``optax.scale_by_adam`` with its moments in ``Blocks``, where ``block_size`` says so."""

    def of_leaf(path: Any, leaf: jax.Array) -> int:
        return block_size(path_name(path), leaf.shape)

    def zeros(params: Params, *, signed: bool) -> Any:
        def one(path: Any, leaf: jax.Array) -> Any:
            block, zero = of_leaf(path, leaf), jnp.zeros(leaf.shape, jnp.float32)
            return encode(zero, block, signed=signed) if block else zero

        return jax.tree_util.tree_map_with_path(one, params)

    def init(params: Params) -> Adam8bitState:
        return Adam8bitState(
            jnp.zeros((), jnp.int32), zeros(params, signed=True), zeros(params, signed=False)
        )

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        count = state.count + 1
        rest1, rest2 = 1 - b1**count, 1 - b2**count  # of the bias that zeros at the start leave

        def one(path: Any, gradient: jax.Array, mu: Any, nu: Any) -> tuple[jax.Array, Any, Any]:
            block = of_leaf(path, gradient)
            m, v = (decode(mu), decode(nu)) if block else (mu, nu)
            m = b1 * m + (1 - b1) * gradient
            v = b2 * v + (1 - b2) * gradient * gradient
            step = (m / rest1) / (jnp.sqrt(v / rest2) + eps)
            if not block:
                return step, m, v
            return step, encode(m, block, signed=True), encode(v, block, signed=False)

        found = jax.tree_util.tree_map_with_path(one, updates, state.mu, state.nu)

        def part(index: int) -> Any:
            return jax.tree.map(lambda x: x[index], found, is_leaf=lambda x: type(x) is tuple)

        return part(0), Adam8bitState(count, part(1), part(2))

    return optax.GradientTransformation(init, update)
