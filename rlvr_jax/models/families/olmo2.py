"""OLMo 2: norms after attention and MLP instead of before, and over all heads' queries and keys.

OLMo 3: most of its layers are local, and RoPE is not scaled in these.
"""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, SANDWICH_NORMS, Family
from rlvr_jax.models.families.rope_settings import write_rope
from rlvr_jax.models.families.settings import Settings, activation_name, layer_types


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


def _read_olmo3(s: Settings) -> dict[str, Any]:
    default = tuple(i for i in range(s["num_hidden_layers"]) if (i + 1) % 4)
    return {**_read(s), **s.windows(s.local_layers(default=default), s["sliding_window"])}


def _write_olmo3(config: ModelConfig) -> dict[str, Any]:
    # In both spellings: transformers 5 has the local layers' base here alone, transformers 4 in rope_theta.
    by_kind = {
        "full_attention": {"rope_type": "default", "rope_theta": config.rope_theta}
        | write_rope(config).get("rope_scaling", {}),
        "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
    }
    return {
        "rope_parameters": by_kind,
        **_write(config),
        # transformers builds the mask of local layers for a model without any, too.
        "sliding_window": config.sliding_window or config.max_length,
        "layer_types": layer_types(config),
    }


OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults={
        **OLMO2.defaults,
        "rope_theta": 500000.0,
        "rope_local_base_freq": None,
        "sliding_window": 4096,
    },
    fixed={"rope_local_base_freq": None},
    read=_read_olmo3,
    write=_write_olmo3,
    tensors=OLMO2.tensors,
)
