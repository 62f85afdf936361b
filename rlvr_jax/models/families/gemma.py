"""Gemma 2 and 3: sandwich norms that multiply by 1 + scale, scaled embeddings, local and global layers.

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys instead, and its local layers have a RoPE of their own.
Of a Gemma 3 that also sees images, the text model is read.
"""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, SANDWICH_NORMS, Family
from rlvr_jax.models.families.settings import Settings, activation_name, layer_types


def _read_both(s: Settings, *, local_layers: tuple[int, ...]) -> dict[str, Any]:
    bias = bool(s["attention_bias"])
    return {
        "activation": s.activation("hidden_activation"),
        "qkv_bias": bias,
        "o_bias": bias,
        "pre_norm": True,
        "post_norm": True,
        "norm_plus_one": True,
        "embed_scale": float(s["hidden_size"]) ** 0.5,
        "attn_scale_dim": s["query_pre_attn_scalar"],
        "final_softcap": float(s["final_logit_softcapping"] or 0.0),
        **s.windows(s.local_layers(default=local_layers), s["sliding_window"]),
    }


def _write_both(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": activation_name(config),
        "attention_bias": config.qkv_bias,
        "query_pre_attn_scalar": config.attn_scale_dim,
        "final_logit_softcapping": config.final_softcap or None,
        # transformers builds the mask of local layers for a model without any, too.
        "sliding_window": config.sliding_window or config.max_length,
        "layer_types": layer_types(config),
    }


def _read_gemma2(s: Settings) -> dict[str, Any]:
    return {
        **_read_both(s, local_layers=tuple(range(0, s["num_hidden_layers"], 2))),
        "attn_softcap": float(s["attn_logit_softcapping"] or 0.0),
    }


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    return {**_write_both(config), "attn_logit_softcapping": config.attn_softcap or None}


def _read_gemma3(s: Settings) -> dict[str, Any]:
    layers, period = range(s["num_hidden_layers"]), s["sliding_window_pattern"]
    return {
        **_read_both(s, local_layers=tuple(i for i in layers if (i + 1) % period)),
        "qk_norm": "head",
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    return {**_write_both(config), "rope_local_base_freq": config.local_rope_theta}


_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_FIXED = {"use_bidirectional_attention": False, "hidden_act": "gelu_pytorch_tanh"}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed=_FIXED,
    read=_read_gemma2,
    write=_write_gemma2,
    tensors=(*OUTER, *SANDWICH_NORMS, *ATTENTION, *MLP),
)

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        **_DEFAULTS,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
    },
    # transformers reads attn_logit_softcapping for Gemma 3 and does not apply it: nobody can say what it means.
    fixed={**_FIXED, "attn_logit_softcapping": None},
    harmless=("_sliding_window_pattern",),
    read=_read_gemma3,
    write=_write_gemma3,
    tensors=(*OUTER, *SANDWICH_NORMS, *ATTENTION, *MLP),
)
