"""The matrix product of the layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlvr_jax.models.linear import matmul


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_written_out_gradient_is_the_derivative(dtype, biased):
    """In float64 from the rounded inputs: only the result for x is rounded to its dtype, the kernel's never."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(48, 24)), dtype)
    kernel = jnp.asarray(rng.normal(size=(24, 40)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=40), jnp.float32)
    cotangent = jnp.asarray(rng.normal(size=(48, 40)), dtype)

    def product(x, kernel, bias):
        return matmul(x, kernel, nnx.Param(bias) if biased else None)

    out, pull = jax.vjp(product, x, kernel, bias)
    of_x, of_kernel, of_bias = pull(cotangent)
    wide_x, wide_kernel, wide_cotangent = (
        np.asarray(a.astype(dtype), np.float64) for a in (x, kernel, cotangent)
    )
    rounding = 1e-6 if dtype == jnp.float32 else 8e-3
    scale = np.abs(wide_x @ wide_kernel).max()
    expected = wide_x @ wide_kernel + (np.asarray(bias, np.float64) if biased else 0)
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=rounding * scale)
    np.testing.assert_allclose(
        of_x.astype(jnp.float32), wide_cotangent @ wide_kernel.T, atol=rounding * scale
    )
    np.testing.assert_allclose(of_kernel, wide_x.T @ wide_cotangent, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(
        of_bias, wide_cotangent.sum(0) * biased, rtol=1e-5, atol=1e-5 if biased else 0
    )
    assert (of_x.dtype, of_kernel.dtype, of_bias.dtype) == (dtype, jnp.float32, jnp.float32)
