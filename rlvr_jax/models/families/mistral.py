"""Mistral: Llama whose layers all see a sliding window, in the first version. Mixtral: with experts for an MLP."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family, experts
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


def read_num_experts(s: Settings, *, default: int) -> int:
    """It has two names, and transformers takes either."""
    local, plain = s["num_local_experts"], s["num_experts"]
    return next((count for count in (local, plain) if count is not None), default)


def _read_mixtral(s: Settings) -> dict[str, Any]:
    return {
        **read_window_of_all(s),
        "num_experts": read_num_experts(s, default=8),
        "experts_per_token": s["num_experts_per_tok"],
        "router_loss_coef": float(s["router_aux_loss_coef"]),
    }


def _write_mixtral(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_window_of_all(config),
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_loss_coef,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    read=_read_mixtral,
    write=_write_mixtral,
    tensors=(
        *(*OUTER, *PRE_NORMS, *ATTENTION),
        *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
)
