import jax
import pytest

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.measure import measure
from tests.training.toys import get_config, override


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """Large enough that weights, activations and attention all show in the memory of a program."""
    return ModelConfig(
        vocab_size=4096,
        num_layers=4,
        embed_dim=256,
        mlp_dim=512,
        num_heads=8,
        num_kv_heads=4,
        head_dim=32,
    )


@pytest.fixture(scope="session")
def small_config():
    """32 groups of 8 responses of 128 tokens on all 8 devices, one copy of the weights spread over them."""
    return override(
        get_config(),
        tasks__tasks_per_step=32,
        rollout__group_size=8,
        rollout__max_tokens=128,
        rollout__max_rows=128,
        train__row_length=240,
        train__micro_rows=16,
    )


@pytest.fixture(scope="session")
def measured(small_config, small_model):
    """The phases of ``small_config``, compiled for the 8 devices."""
    return measure(
        small_config,
        small_model,
        jax.devices(),
        prompt_tokens=60,
        on_cpu=True,
        shallow_decode=False,
        say=lambda _: None,
    ).phases
