"""Qwen2 and 2.5 (biases on queries, keys and values), Qwen3 (norms on queries and keys instead)."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family
from rlvr_jax.models.families.settings import Settings, activation_name, layer_types


def _read_windows(s: Settings) -> dict[str, Any]:
    """Layers from ``max_window_layers`` on are local, if ``use_sliding_window``."""
    first, window = s["max_window_layers"], s["sliding_window"]
    window = window if s["use_sliding_window"] else None
    layers = tuple(range(min(first, s["num_hidden_layers"]), s["num_hidden_layers"]))
    return s.windows(s.local_layers(default=layers if window else ()), window)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": bool(config.local_layers),
        "sliding_window": config.sliding_window or None,
        "layer_types": layer_types(config),
    }


def _read_qwen2(s: Settings) -> dict[str, Any]:
    return {"activation": s.activation(), "qkv_bias": True, **_read_windows(s)}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": activation_name(config), **_write_windows(config)}


def _read_qwen3(s: Settings) -> dict[str, Any]:
    bias = bool(s["attention_bias"])
    return {
        "activation": s.activation(),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
        **_read_windows(s),
    }


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation_name(config),
        "attention_bias": config.qkv_bias,
        **_write_windows(config),
    }


_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=_DEFAULTS,
    read=_read_qwen2,
    write=_write_qwen2,
    tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *MLP),
)

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
    read=_read_qwen3,
    write=_write_qwen3,
    tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *MLP),
)
