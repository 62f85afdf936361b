"""Frozen kernels in 4 or 8 bits (QLoRA, Dettmers et al. 2023): codes, and a scale for every block of inputs.

A block is 64 inputs of one output, and its scale their largest magnitude (int8: that over 127). NF4 codes are the
nearest of sixteen values that a normally distributed weight takes equally often, two to a byte; int8 codes are the
nearest multiples of the scale. These are the blocks, codes and scales of bitsandbytes. Double quantisation keeps the
scales in 8 bits too, between the least and the greatest of 256 (the paper takes floats around their mean).

Bytes a parameter: nf4 0.5625, 0.516 with double quantisation; int8 1.0625 and 1.016.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.distributed.sharding import constrain

KINDS = ("nf4", "int8")
BLOCK = 64  # inputs that share a scale, and
GROUP = 256  # outputs whose scales share a range, where so many divide the kernel
LEAST_BLOCK = 16

# Appendix E of the paper.
NF4 = np.array(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    np.float32,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a kernel is kept. Hashable.

    Attributes:
      kind: ``nf4`` or ``int8``.
      double: keep scales in 8 bits too.

    Raises:
      ValueError: another kind.
    """

    kind: str
    double: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(
                f"adapter.quantize is {self.kind!r}; expected none, {' or '.join(KINDS)}"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedKernel:
    """A kernel [..., in, out] in few bits, in its place among the parameters.

    Attributes:
      codes: nf4: uint8[..., in / 2, out], of row 2 i in the high and of row 2 i + 1 in the low four bits; int8:
        int8[..., in, out].
      scales: float32[..., in / block, out]; with double quantisation uint8 of that shape.
      low, step: float32[..., in / block, out / group], a scale is low + step * code; None without.
      kind: ``nf4`` or ``int8``.
      axes: logical axes of the two dimensions where the kernel is used; what is None there is gathered, as codes.
    """

    codes: jax.Array
    scales: jax.Array
    low: jax.Array | None = None
    step: jax.Array | None = None
    kind: str = dataclasses.field(metadata={"static": True})
    axes: tuple[str | None, str | None] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> QuantizedKernel:
        """Of one layer, where layers are stacked; ``...`` is itself, as of an array."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel."""
        *stacked, rows, columns = self.codes.shape
        return (*stacked, rows * (2 if self.kind == "nf4" else 1), columns)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dense(self) -> jax.Array:
        """float32[in, out], the kernel that this computes with: the same bits in every program."""
        codes, scales = (constrain(part, *self.axes) for part in (self.codes, self.scales))
        if self.low is not None:
            scales = self._spread(self.low) + _product(
                scales.astype(jnp.float32), self._spread(self.step)
            )
        if self.kind == "nf4":
            pairs = (codes[:, None] >> jnp.array([4, 0], jnp.uint8)[None, :, None]) & 15
            values = jnp.asarray(NF4)[pairs.astype(jnp.int32)]
        else:
            values = codes.astype(jnp.float32)
        rows, columns = self.shape
        blocks = values.reshape(scales.shape[0], -1, columns)
        return _product(blocks, scales[:, None]).reshape(rows, columns)

    def _spread(self, of_groups: Any) -> jax.Array:
        """float32[in / block, out] of float32[in / block, out / group]."""
        return jnp.repeat(of_groups, self.shape[-1] // of_groups.shape[-1], axis=-1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a * b, rounded to a bit less than float32 has.

    What follows adds something to it, and XLA:CPU contracts a product and a sum into one operation with one rounding
    in one program and not in another: sampler and trainer would differ. Over this rounding it cannot.
    """
    return jax.lax.reduce_precision(a * b, 8, 22)


def block_size(inputs: int) -> int:
    """Inputs that share a scale: 64, or the largest power of two that divides them.

    Raises:
      ValueError: it is smaller than 16.
    """
    size = math.gcd(inputs, BLOCK)
    if size < LEAST_BLOCK:
        raise ValueError(
            f"a kernel with {inputs} inputs has blocks of {size}; expected a multiple of {LEAST_BLOCK}, better of "
            f"{BLOCK}: set config.adapter.quantize to none for this model"
        )
    return size


def quantize_kernel(
    kernel: jax.Array, quantization: Quantization, axes: tuple[str | None, str | None]
) -> QuantizedKernel:
    """float32[in, out] in few bits; ``axes`` is as of ``QuantizedKernel``."""
    scales = jnp.max(jnp.abs(_blocks(kernel)), axis=1)  # [in / block, out]
    if quantization.kind == "int8":
        scales = scales / 127
    divisor = jnp.where(scales > 0, scales, 1)[:, None]
    values = _blocks(kernel) / divisor
    if quantization.kind == "int8":
        codes = jnp.clip(jnp.round(values), -127, 127).astype(jnp.int8).reshape(kernel.shape)
    else:
        middles = (NF4[1:] + NF4[:-1]) / 2
        nearest = jnp.zeros(values.shape, jnp.uint8)
        for middle in middles:
            nearest += (values > middle).astype(jnp.uint8)
        pairs = nearest.reshape(-1, 2, kernel.shape[1])
        codes = (pairs[:, 0] << 4) | pairs[:, 1]
    quantized = QuantizedKernel(codes=codes, scales=scales, kind=quantization.kind, axes=axes)
    return quantize_scales(quantized) if quantization.double else quantized


def quantize_scales(kernel: QuantizedKernel) -> QuantizedKernel:
    """Double quantisation of a kernel [..., in, out] with scales in float32.

    Least and greatest of a group: exact in any order, so that the codes are the same on any mesh.
    """
    *stacked, rows, columns = kernel.scales.shape
    groups = kernel.scales.reshape(*stacked, rows, -1, math.gcd(columns, GROUP))
    low, high = jnp.min(groups, -1), jnp.max(groups, -1)
    step = (high - low) / 255
    divisor = jnp.where(step > 0, step, 1)[..., None]
    codes = jnp.clip(jnp.round((groups - low[..., None]) / divisor), 0, 255).astype(jnp.uint8)
    return dataclasses.replace(
        kernel, scales=codes.reshape(kernel.scales.shape), low=low, step=step
    )


def _blocks(kernel: jax.Array) -> jax.Array:
    """float32[in / block, block, out]."""
    rows, columns = kernel.shape
    return kernel.reshape(-1, block_size(rows), columns)
