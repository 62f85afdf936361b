"""RoPE against the formula."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.rope import rotary, rotate


def test_rotation_is_that_of_hugging_face():
    """x * cos + rotate_half(x) * sin, frequencies theta^(-2i/H)."""
    H, theta = 6, 100.0
    x = np.random.default_rng(0).normal(size=(5, 2, H)).astype(np.float32)
    positions = np.array([0, 1, 2, 7, 100])
    angle = positions[:, None] * theta ** (-np.arange(0, H, 2) / H)
    angle = np.concatenate([angle, angle], -1)[:, None]
    half = np.concatenate([-x[..., H // 2 :], x[..., : H // 2]], -1)
    expected = x * np.cos(angle) + half * np.sin(angle)
    ours = rotate(jnp.asarray(x), *rotary(jnp.asarray(positions), H, theta))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_rotated_products_depend_on_the_distance_only():
    x, y = np.random.default_rng(0).normal(size=(2, 1, 1, 8)).astype(np.float32)

    def product(at, other):
        a, b = (
            rotate(jnp.asarray(z), *rotary(jnp.array([p]), 8, 1e4))
            for z, p in ((x, at), (y, other))
        )
        return float(jnp.sum(a * b))

    assert product(3, 7) == pytest.approx(product(103, 107), abs=1e-4)
    assert product(3, 7) != pytest.approx(product(3, 8), abs=1e-3)
