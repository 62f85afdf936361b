"""OLMo 2: norms after attention and MLP instead of before, and over all heads' queries and keys."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, SANDWICH_NORMS, Family
from rlvr_jax.models.families.settings import Settings, activation_name


def _read(s: Settings) -> dict[str, Any]:
    bias = bool(s["attention_bias"])
    return {
        "activation": s.activation(),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": "all",
        "pre_norm": False,
        "post_norm": True,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": activation_name(config), "attention_bias": config.qkv_bias}


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
    },
    read=_read,
    write=_write,
    tensors=(*OUTER, *SANDWICH_NORMS, *ATTENTION, *MLP),
)
