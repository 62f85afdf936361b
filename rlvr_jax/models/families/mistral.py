"""Mistral: Llama whose layers all see a sliding window, in the first version."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family
from rlvr_jax.models.families.settings import Settings, activation_name


def read_window_of_all(s: Settings) -> dict[str, Any]:
    """``sliding_window`` is that of every layer; null for none."""
    window = s["sliding_window"]
    layers = tuple(range(s["num_hidden_layers"])) if window is not None else ()
    return {"activation": s.activation(), **s.windows(layers, window)}


def write_window_of_all(config: ModelConfig) -> dict[str, Any]:
    """The reverse."""
    return {
        "hidden_act": activation_name(config),
        "sliding_window": config.sliding_window if config.local_layers else None,
    }


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "sliding_window": 4096,
    },
    read=read_window_of_all,
    write=write_window_of_all,
    tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *MLP),
)
