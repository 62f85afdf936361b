"""Qwen2 and 2.5 (biases on queries, keys and values), Qwen3 (norms on queries and keys instead), and their mixtures."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import (
    ATTENTION,
    MLP,
    OUTER,
    PRE_NORMS,
    Family,
    Tensor,
    dense_layers,
    experts,
    shared_expert,
)
from rlvr_jax.models.families.mistral import read_num_experts, write_window_of_all
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


def _read_mixture(s: Settings, *, num_experts: int) -> dict[str, Any]:
    if s["decoder_sparse_step"] != 1:
        s.refuse("decoder_sparse_step", "expected 1")
    dense, count = s["mlp_only_layers"] or [], s["num_hidden_layers"]
    if sorted(dense) != list(range(len(dense))) or len(dense) >= count:
        s.refuse("mlp_only_layers", f"expected the first layers, fewer than {count}")
        dense = []
    return {
        "mlp_dim": s["moe_intermediate_size"],
        "num_experts": num_experts,
        "experts_per_token": s["num_experts_per_tok"],
        "norm_expert_weights": bool(s["norm_topk_prob"]),
        "router_loss_coef": float(s["router_aux_loss_coef"]),
        "num_dense_layers": len(dense),
        "dense_mlp_dim": s["intermediate_size"] if dense else 0,
    }


def _write_mixture(config: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": config.dense_mlp_dim or config.mlp_dim,
        "moe_intermediate_size": config.mlp_dim,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_expert_weights,
        "router_aux_loss_coef": config.router_loss_coef,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(config.num_dense_layers)),
    }


_MIXTURE_TENSORS: tuple[Tensor, ...] = (
    *(*OUTER, *PRE_NORMS, *ATTENTION),
    *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *dense_layers((*PRE_NORMS, *ATTENTION, *MLP)),
)


def _read_qwen2_moe(s: Settings) -> dict[str, Any]:
    window, last = s["sliding_window"], min(s["max_window_layers"], s["num_hidden_layers"])
    window = window if s["use_sliding_window"] else None
    local = tuple(range(0, last, 2)) if window else ()
    return {
        **_read_mixture(s, num_experts=s["num_experts"]),
        **s.windows(s.local_layers(default=local), window),
        "activation": s.activation(),
        "qkv_bias": bool(s["qkv_bias"]),
        "shared_mlp_dim": s["shared_expert_intermediate_size"],
        "shared_gate": True,
    }


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_mixture(config),
        **_write_windows(config),
        "hidden_act": activation_name(config),
        "qkv_bias": config.qkv_bias,
        "shared_expert_intermediate_size": config.shared_mlp_dim,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "qkv_bias": True,
    },
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    tensors=(
        *_MIXTURE_TENSORS,
        *shared_expert("shared_expert"),
        Tensor(
            path="layers/shared/token_gate",
            hf="model.layers.{layer}.mlp.shared_expert_gate.weight",
            transpose=True,
        ),
    ),
)


def _read_qwen3_moe(s: Settings) -> dict[str, Any]:
    bias = bool(s["attention_bias"])
    window, layers = s["sliding_window"], range(s["num_hidden_layers"])
    local = tuple(layers) if s["use_sliding_window"] and window is not None else ()
    return {
        **_read_mixture(s, num_experts=read_num_experts(s, default=128)),
        **s.windows(local, window),
        "activation": s.activation(),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_mixture(config),
        **write_window_of_all(config),
        "use_sliding_window": bool(config.local_layers),
        "attention_bias": config.qkv_bias,
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
    },
    # transformers gives every layer the window, or none.
    harmless=("max_window_layers",),
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    tensors=_MIXTURE_TENSORS,
)
