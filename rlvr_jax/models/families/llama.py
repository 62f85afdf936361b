"""Llama 2 and 3, SmolLM2 and their likes: pre-norm, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig, RopeScaling
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family
from rlvr_jax.models.families.settings import Settings, activation_name


def read_biases_and_activation(s: Settings) -> dict[str, Any]:
    """``attention_bias`` is of all four projections, ``mlp_bias`` of all three."""
    return {
        "activation": s.activation(),
        "qkv_bias": bool(s["attention_bias"]),
        "o_bias": bool(s["attention_bias"]),
        "mlp_bias": bool(s["mlp_bias"]),
    }


def write_biases_and_activation(config: ModelConfig) -> dict[str, Any]:
    """The reverse."""
    return {
        "hidden_act": activation_name(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


def config_from_gguf(settings: Mapping[str, Any]) -> ModelConfig:
    """Reads GGUF metadata (keys without ``llama.``). Tied: whether there is a head is told by the tensors.

    Raises:
      WeightsError: when a needed key is missing, or one changes the maths; all offenders are named.
    """
    needed = (
        "block_count context_length embedding_length feed_forward_length attention.head_count "
        "attention.layer_norm_rms_epsilon vocab_size"
    )
    _require(settings, needed.split(), where="the GGUF metadata")
    heads = settings["attention.head_count"]
    head_dim = settings.get("attention.key_length") or settings["embedding_length"] // heads
    same = {"rope.dimension_count", "attention.key_length", "attention.value_length"}
    read = {*needed.split(), "attention.head_count_kv", "rope.freq_base", *same}
    scaling = None
    if settings.get("rope.scaling.type") == "linear" and settings.get("rope.scaling.factor"):
        scaling = RopeScaling(kind="linear", factor=_shortest(settings["rope.scaling.factor"]))
        read |= {"rope.scaling.type", "rope.scaling.factor"}
    refused = [f"{k}={settings[k]!r}" for k in sorted(settings.keys() - read) if settings[k]]
    refused += [
        f"{k}={settings[k]!r} (expected the head size, {head_dim})"
        for k in sorted(same & settings.keys())
        if settings[k] != head_dim
    ]
    if refused:
        raise WeightsError(
            f"the GGUF metadata asks for what the decoder does not compute: {'; '.join(refused)}; "
            "use a model without these settings"
        )
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        num_layers=settings["block_count"],
        embed_dim=settings["embedding_length"],
        mlp_dim=settings["feed_forward_length"],
        num_heads=heads,
        num_kv_heads=settings.get("attention.head_count_kv", heads),
        head_dim=head_dim,
        rope_theta=_shortest(settings.get("rope.freq_base", 10000.0)),
        norm_eps=_shortest(settings["attention.layer_norm_rms_epsilon"]),
        max_length=settings["context_length"],
        rope_scaling=scaling,
    )


def _shortest(number: float) -> float:
    """GGUF keeps float32; this is the number that was meant: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _require(settings: Mapping[str, Any], names: Iterable[str], *, where: str) -> None:
    missing = [name for name in names if settings.get(name) is None]
    if missing:
        raise WeightsError(
            f"{where} lacks {', '.join(missing)}; expected the settings of a llama model: copy the file again"
        )


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    fixed={"rope_interleaved": False},
    read=read_biases_and_activation,
    write=write_biases_and_activation,
    tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *MLP),
    from_gguf=config_from_gguf,
)
