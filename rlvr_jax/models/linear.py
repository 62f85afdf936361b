"""Matrix products, their random start, and the activations between them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from rlvr_jax.distributed.sharding import constrain
from rlvr_jax.models.quantized import QuantizedKernel

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


MATMUL = "matmul"  # the name by which a remat policy can keep the products


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedKernel:
    """A frozen kernel with an adapter beside it, in a kernel's place among the parameters.

    Attributes:
      kernel: float32[..., in, out], the base's, or that in few bits.
      a, b: float32[..., in, r] and float32[..., r, out].
      magnitude: float32[..., out], norms of the columns (DoRA); None leaves them as they come.
      scale: of a @ b.
    """

    kernel: jax.Array | QuantizedKernel
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None = None
    scale: float = dataclasses.field(metadata={"static": True})

    def __getitem__(self, index: Any) -> AdaptedKernel:
        """Of one layer, where layers are stacked; ``...`` is itself, as of an array."""
        return jax.tree.map(lambda leaf: leaf[index], self)

    def total(self) -> jax.Array:
        """float32[in, out], kernel + scale * a @ b."""
        # The scale is multiplied in before, exactly where it is a power of two, and no compiler has a sum of products
        # left to contract one way here and another there: sampler and trainer get the same bits.
        a, kernel = self.a, self.kernel
        if isinstance(kernel, QuantizedKernel):
            a, kernel = constrain(a, kernel.axes[0], None), kernel.dense()
        product = jnp.dot(a, self.scale * self.b, precision=jax.lax.Precision.HIGHEST)
        return kernel + product

    def merged(self) -> jax.Array:
        """float32[in, out], the kernel that this computes with."""
        total = self.total()
        if self.magnitude is None:
            return total
        return total * (self.magnitude / column_norms(total))[None, :]


Kernel = jax.Array | QuantizedKernel | AdaptedKernel


def column_norms(kernel: jax.Array) -> jax.Array:
    """float32[..., out] of float32[..., in, out]; of a column of zeros, a number that is not 0."""
    return jnp.sqrt(jnp.maximum(jnp.sum(kernel * kernel, -2), jnp.finfo(jnp.float32).tiny))


def in_few_bits(kernel: Any) -> bool:
    """Whether what is in a kernel's place among the parameters is a quantised one, adapted or not."""
    return isinstance(
        kernel.kernel if isinstance(kernel, AdaptedKernel) else kernel, QuantizedKernel
    )


def computed_kernel(kernel: Kernel) -> jax.Array:
    """float32[in, out], what ``matmul`` multiplies with."""
    if isinstance(kernel, AdaptedKernel):
        return kernel.merged()
    return kernel.dense() if isinstance(kernel, QuantizedKernel) else kernel


def matmul(x: jax.Array, kernel: Kernel, bias: nnx.Param | None = None) -> jax.Array:
    """x @ kernel + bias in x's dtype, accumulated in float32 and rounded once.

    In few bits or beside an adapter, kernel and bias are frozen: their gradients are zero.

    Args:
      x: dtype[N, in].
      kernel: float32[in, out]; bias: float32[out].

    Returns:
      dtype[N, out].
    """
    of_bias = None if bias is None else bias[...]
    if isinstance(kernel, AdaptedKernel):
        return _adapted_matmul(x, kernel, of_bias)
    if isinstance(kernel, QuantizedKernel):
        return _quantized_matmul(x, kernel, of_bias)
    return _matmul(x, kernel, of_bias)


@jax.custom_vjp
def _matmul(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    return _forward(x, kernel, bias)[0]


def _forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
    product = jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        product += bias.astype(jnp.float32)[None, :]
    return checkpoint_name(product.astype(x.dtype), MATMUL), (x, kernel, bias)


def _backward(
    saved: tuple[jax.Array, jax.Array, jax.Array | None], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Written out: the derivative of the rounding would hand the products a float32 copy of a bfloat16 cotangent,
    and round the kernel's gradient to bfloat16."""
    x, kernel, bias = saved
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    of_x = product(cotangent, kernel.astype(x.dtype), (((1,), (1,)), ((), ())))
    of_kernel = kernel_gradient(x, cotangent)
    of_bias = None if bias is None else cotangent.astype(jnp.float32).sum(0).astype(bias.dtype)
    return of_x.astype(x.dtype), of_kernel.astype(kernel.dtype), of_bias


_matmul.defvjp(_forward, _backward)


def kernel_gradient(x: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Sum of x[n] outer cotangent[n] over tokens: float32[in, out] from dtype[N, in] and dtype[N, out].

    Over two dimensions, one of them empty: XLA:CPU takes a bfloat16 kernel twice as fast as for one, and splits the
    sum the same way however many threads the process has.
    """
    return jax.lax.dot_general(
        x[:, None],
        cotangent[:, None],
        (((0, 1), (0, 1)), ((), ())),
        preferred_element_type=jnp.float32,
    )


@jax.custom_vjp
def matmul_by_rows(x: jax.Array, table: jax.Array) -> jax.Array:
    """x @ table^T: float32[N, out] from float32[N, in] and float32[out, in], as of a tied embedding."""
    return jax.lax.dot_general(x, table, (((1,), (1,)), ((), ())))


def _by_rows_forward(
    x: jax.Array, table: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul_by_rows(x, table), (x, table)


def _by_rows_backward(
    saved: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, table = saved
    of_x = jax.lax.dot_general(cotangent, table, (((1,), (0,)), ((), ())))
    return of_x, kernel_gradient(cotangent, x)


matmul_by_rows.defvjp(_by_rows_forward, _by_rows_backward)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(x / cap); 0 leaves x as it is."""
    return cap * jnp.tanh(x / cap) if cap else x


@jax.custom_vjp
def _adapted_matmul(x: jax.Array, adapted: AdaptedKernel, bias: jax.Array | None) -> jax.Array:
    return _adapted_forward(x, adapted, bias)[0]


def _adapted_forward(
    x: jax.Array, adapted: AdaptedKernel, bias: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, AdaptedKernel]]:
    return _forward(x, adapted.merged(), bias)[0], (x, adapted)


def _adapted_backward(
    saved: tuple[jax.Array, AdaptedKernel], cotangent: jax.Array
) -> tuple[jax.Array, Any, None]:
    """Through the thin matrices: the gradient of a whole kernel, a third of the work of training it, is never made.

    The norms that a magnitude is divided by are constants here, as in the paper (Liu et al. 2024, section 4.3).
    """
    x, adapted = saved
    product = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
    total, of_magnitude = adapted.total(), None
    if adapted.magnitude is not None:
        norms = column_norms(total)
        along = product(x, total.astype(x.dtype), (((1,), (0,)), ((), ())))
        of_magnitude = jnp.sum(cotangent.astype(jnp.float32) * along, 0) / norms
        cotangent = (cotangent * (adapted.magnitude / norms)[None, :]).astype(x.dtype)
    of_x = product(cotangent, total.astype(x.dtype), (((1,), (1,)), ((), ()))).astype(x.dtype)
    scaled = (adapted.scale * adapted.b).astype(x.dtype)
    inner = product(cotangent, scaled, (((1,), (1,)), ((), ()))).astype(x.dtype)  # [N, r]
    down = product(x, adapted.a.astype(x.dtype), (((1,), (0,)), ((), ()))).astype(x.dtype)  # [N, r]
    of_adapter: Any = dataclasses.replace(
        adapted,
        kernel=None,
        a=kernel_gradient(x, inner),
        b=adapted.scale * kernel_gradient(down, cotangent),
        magnitude=of_magnitude,
    )
    return of_x, of_adapter, None


_adapted_matmul.defvjp(_adapted_forward, _adapted_backward)


@jax.custom_vjp
def _quantized_matmul(x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None) -> jax.Array:
    return _quantized_forward(x, kernel, bias)[0]


def _quantized_forward(
    x: jax.Array, kernel: QuantizedKernel, bias: jax.Array | None
) -> tuple[jax.Array, QuantizedKernel]:
    return _forward(x, kernel.dense(), bias)[0], kernel


def _quantized_backward(kernel: QuantizedKernel, cotangent: jax.Array) -> tuple[Any, None, None]:
    """Made dense once more: what is kept for the backward pass has few bits."""
    of_x = jax.lax.dot_general(
        cotangent,
        kernel.dense().astype(cotangent.dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return of_x.astype(cotangent.dtype), None, None


_quantized_matmul.defvjp(_quantized_forward, _quantized_backward)


def init_kernel(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """normal(0, 1/sqrt(fan_in)) of shape [..., fan_in, fan_out]."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)
