"""Mesh and model of the Tunix scripts, which have set the environment before they import this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params


def make_mesh() -> jax.sharding.Mesh:
    """All devices on ``fsdp``."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((len(jax.devices()), 1), ("fsdp", "tp"), axis_types=auto)


def load(model_dir: Path, mesh: jax.sharding.Mesh, dtype: str, remat: str = "none") -> Any:
    """The model of a Hugging Face directory of the llama layout."""
    settings = common.model_settings(model_dir)
    config = llama.ModelConfig(
        num_layers=settings["num_hidden_layers"],
        vocab_size=settings["vocab_size"],
        embed_dim=settings["hidden_size"],
        hidden_dim=settings["intermediate_size"],
        num_heads=settings["num_attention_heads"],
        head_dim=settings["head_dim"],
        num_kv_heads=settings["num_key_value_heads"],
        rope_theta=int(settings["rope_theta"]),
        norm_eps=settings["rms_norm_eps"],
        weight_tying=True,
        remat_config=llama.RematConfig[remat.upper()],
    )
    return llama_params.create_model_from_safe_tensors(
        str(model_dir), config, mesh, jnp.dtype(dtype)
    )
