"""What every test runs under: eight virtual CPU devices, strict shapes, and a shared compilation cache.

Settings go into the environment before jax is imported, so that processes started by a test inherit them. Run the
``device`` tests on an accelerator with ``JAX_PLATFORMS=cuda pytest -m device`` (or ``tpu``).
"""

import os
import pathlib

NUM_DEVICES = 8
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}"
    ).strip()
# Threads that all virtual devices share. With one each, exchanges that a device does at once can take them all, and the
# last device finds none to join.
os.environ.setdefault("NPROC", str(3 * NUM_DEVICES))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("MPLBACKEND", "agg")

import jax  # noqa: E402
import pytest  # noqa: E402

from rlvr_jax.models.config import ModelConfig  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """The smallest decoder with every feature of the real one: grouped heads, two layers, tied embeddings."""
    return ModelConfig(
        vocab_size=128,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
