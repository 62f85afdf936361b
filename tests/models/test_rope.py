"""RoPE against the formula, its scalings against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.config import SMOLLM2_135M
from rlvr_jax.models.families.llama import LLAMA
from rlvr_jax.models.rope import rotary, rotate, scaled_frequencies


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


def test_a_part_of_a_head_is_rotated_and_the_rest_passes():
    x = np.random.default_rng(0).normal(size=(5, 2, 10)).astype(np.float32)
    table = rotary(jnp.arange(5), 6, 100.0)
    turned = rotate(jnp.asarray(x), *table)
    np.testing.assert_array_equal(turned[..., 6:], x[..., 6:])
    np.testing.assert_allclose(turned[..., :6], rotate(jnp.asarray(x[..., :6]), *table), atol=1e-6)


SCALINGS = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-exact": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "longrope": {
        "factor": 32.0,
        "original_max_position_embeddings": 512,
        "short_factor": [1.0 + i / 9 for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
    },
}


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("longer", [False, True])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, longer, theta):
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = name.split("-")[0]
    settings = {"rope_type": kind, "rope_theta": theta, **SCALINGS[name]}
    theirs = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters=settings,
    )
    config = LLAMA.from_hf(theirs.to_dict())
    length = 2048 if longer else 512
    expected, attention_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
    scaling = config.rope_scaling
    got = scaled_frequencies(scaling, 64, config.rope_theta, length)
    np.testing.assert_allclose(got, expected.numpy(), rtol=1e-5)  # theirs are float32
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_survives_config_json(name):
    settings = {"rope_type": name.split("-")[0], "rope_theta": 5e5, **SCALINGS[name]}
    config = LLAMA.from_hf(
        LLAMA.to_hf(SMOLLM2_135M) | {"rope_theta": None, "rope_parameters": settings}
    )
    assert config.rope_theta == 5e5
    assert LLAMA.from_hf(LLAMA.to_hf(config)) == config
