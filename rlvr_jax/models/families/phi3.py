"""Phi-3, 3.5 and 4 (all ``phi3``): Llama with fused projections, heads rotated in part, and LongRoPE."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family, Tensor
from rlvr_jax.models.families.mistral import read_window_of_all, write_window_of_all
from rlvr_jax.models.families.rope_settings import rope_dictionary
from rlvr_jax.models.families.settings import Settings


def _read(s: Settings) -> dict[str, Any]:
    name, rope = rope_dictionary(s)
    partial = s["partial_rotary_factor"]
    if rope.get("rope_type", rope.get("type", "default")) not in ("default", "longrope", "su"):
        s.refuse(name, "expected rope_type 'longrope'")
    s["original_max_position_embeddings"]  # of LongRoPE, and known when there is none
    partial = float(rope.get("partial_rotary_factor") or partial)
    return {"partial_rotary_factor": partial, **read_window_of_all(s)}


def _write(config: ModelConfig) -> dict[str, Any]:
    settings = {
        **write_window_of_all(config),
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    if config.rope_scaling is not None:
        settings["original_max_position_embeddings"] = config.rope_scaling.original_length
    return settings


def _fuse(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Queries, keys and values in one tensor, gate and up in another."""
    fused = {
        **dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv_proj"),
        **dict.fromkeys(["gate_proj", "up_proj"], "gate_up_proj"),
    }
    renamed = []
    for tensor in tensors:
        parts = [fused.get(part, part) for part in tensor.hf.split(".")]
        renamed.append(dataclasses.replace(tensor, hf=".".join(parts)))
    return tuple(renamed)


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    fixed={
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    read=_read,
    write=_write,
    tensors=_fuse((*OUTER, *PRE_NORMS, *ATTENTION, *MLP)),
)
