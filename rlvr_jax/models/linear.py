"""Matrix products, their random start, and the activations between them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


MATMUL = "matmul"  # the name by which a remat policy can keep the products


def matmul(x: jax.Array, kernel: jax.Array, bias: nnx.Param | None = None) -> jax.Array:
    """x @ kernel + bias in x's dtype, accumulated in float32 and rounded once.

    Args:
      x: dtype[N, in].
      kernel: float32[in, out]; bias: float32[out].

    Returns:
      dtype[N, out].
    """
    return _matmul(x, kernel, None if bias is None else bias[...])


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


def init_kernel(rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """normal(0, 1/sqrt(fan_in)) of shape [..., fan_in, fan_out]."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)
