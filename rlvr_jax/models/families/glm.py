"""GLM-4.5 and dots.llm1: DeepSeek-V3's mixture (sigmoids with a bias, groups, shared experts, dense layers first).

Their attention is grouped-query attention, which DeepSeek's own models do without.
"""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import (
    ATTENTION,
    MLP,
    OUTER,
    PRE_NORMS,
    Family,
    dense_layers,
    experts,
    shared_expert,
)
from rlvr_jax.models.families.rope_settings import rope_dictionary
from rlvr_jax.models.families.settings import Settings, activation_name, layer_types


def _read_mixture(s: Settings) -> dict[str, Any]:
    dense, count = s["first_k_dense_replace"] or 0, s["num_hidden_layers"]
    if dense >= count:
        s.refuse("first_k_dense_replace", f"expected fewer than {count} layers")
        dense = 0
    for name in ("n_routed_experts", "num_experts_per_tok"):
        if s[name] is None:
            s.refuse(name, "expected a number")
    return {
        "activation": s.activation(),
        "mlp_dim": s["moe_intermediate_size"],
        "num_experts": s["n_routed_experts"],
        "experts_per_token": s["num_experts_per_tok"],
        "norm_expert_weights": bool(s["norm_topk_prob"]),
        "routed_scale": float(s["routed_scaling_factor"]),
        "router_scores": "sigmoid",
        "router_bias": True,
        "expert_groups": s["n_group"],
        "groups_per_token": s["topk_group"],
        "shared_mlp_dim": (s["n_shared_experts"] or 0) * s["moe_intermediate_size"],
        "num_dense_layers": dense,
        "dense_mlp_dim": s["intermediate_size"] if dense else 0,
    }


def _write_mixture(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_act": activation_name(config),
        "intermediate_size": config.dense_mlp_dim or config.mlp_dim,
        "moe_intermediate_size": config.mlp_dim,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.norm_expert_weights,
        "routed_scaling_factor": config.routed_scale,
        "n_group": config.expert_groups,
        "topk_group": config.groups_per_token,
        "n_shared_experts": config.shared_mlp_dim // config.mlp_dim,
        "first_k_dense_replace": config.num_dense_layers,
    }


_TENSORS = (
    *(*OUTER, *PRE_NORMS, *ATTENTION),
    *experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *shared_expert("shared_experts"),
    *dense_layers((*PRE_NORMS, *ATTENTION, *MLP)),
)


def _read_glm(s: Settings) -> dict[str, Any]:
    of_all = s["partial_rotary_factor"]
    return {
        **_read_mixture(s),
        "qkv_bias": bool(s["attention_bias"]),
        "qk_norm": "head" if s["use_qk_norm"] else "none",
        "partial_rotary_factor": float(
            rope_dictionary(s)[1].get("partial_rotary_factor") or of_all
        ),
    }


def _write_glm(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_mixture(config),
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm == "head",
        "partial_rotary_factor": config.partial_rotary_factor,
        "num_nextn_predict_layers": 0,
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    # Layers after the last one, which guess further tokens: no part of the model proper (``huggingface.py``).
    harmless=("num_nextn_predict_layers", "num_mtp_layers"),
    read=_read_glm,
    write=_write_glm,
    tensors=_TENSORS,
)


def _read_dots(s: Settings) -> dict[str, Any]:
    bias, first, window = bool(s["attention_bias"]), s["max_window_layers"], s["sliding_window"]
    local = range(first, s["num_hidden_layers"]) if window is not None else ()
    return {
        **_read_mixture(s),
        **s.windows(s.local_layers(default=tuple(local)), window),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "head",
    }


def _write_dots(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_mixture(config),
        "attention_bias": config.qkv_bias,
        "sliding_window": config.sliding_window or None,
        "layer_types": layer_types(config),
    }


DOTS1 = Family(
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    fixed={"moe_layer_freq": 1, "use_sliding_window": False},
    # It says noaux_tc where DeepSeek's configurations say sigmoid; transformers computes sigmoids whatever it says.
    harmless=("scoring_func",),
    read=_read_dots,
    write=_write_dots,
    tensors=_TENSORS,
)
