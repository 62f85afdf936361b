"""A tiny model whose samples are worth comparing: neither uniform nor stuck on one token."""

import jax
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, init_params
from rlvr_jax.rollout.engine import Engine


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig(
        vocab_size=320,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_length=128,
        tie_embeddings=False,
    )


@pytest.fixture(scope="session")
def params(config: ModelConfig) -> Params:
    params = init_params(config, jax.random.key(0))
    params["embed"]["embedding"] *= 50
    params["head"]["kernel"] *= 3
    return params


@pytest.fixture(scope="session")
def engine(config: ModelConfig, params: Params) -> Engine:
    """One device; its compiled programs are shared by the tests. ``decode`` gives two letters a token."""
    mesh = make_mesh(devices=jax.devices()[:1])
    return Engine(config, params, mesh=mesh, decode=letters)


def letters(ids) -> str:
    """Token i as two letters: strings can span tokens, and begin in the middle of one."""
    return "".join(chr(97 + i % 26) + chr(97 + i // 26 % 26) for i in ids)
