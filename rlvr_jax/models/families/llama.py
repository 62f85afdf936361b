"""Llama and its likes (SmolLM2, ...): pre-norm, RoPE, grouped-query attention, SwiGLU, no biases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import Family, Tensor

ARCHITECTURE = "LlamaForCausalLM"

# Settings that the decoder computes at one value only; at another they change the maths.
_FIXED = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rope_interleaved": False,
    "pretraining_tp": 1,
}
# Settings that are read, and settings that do not touch the forward pass. Any other one that is set is refused: a
# setting nobody here has heard of is how a model computes something else without a word.
_READ = (
    "model_type architectures vocab_size num_hidden_layers hidden_size intermediate_size num_attention_heads "
    "num_key_value_heads head_dim rope_theta rope_parameters rope_scaling rms_norm_eps max_position_embeddings "
    "tie_word_embeddings"
)
_NEUTRAL = (
    "_name_or_path _attn_implementation attention_dropout bos_token_id dtype eos_token_id id2label initializer_range "
    "is_llama_config label2id num_labels output_attentions output_hidden_states pad_token_id problem_type return_dict "
    "task_specific_params torch_dtype transformers.js_config transformers_version unsloth_version use_cache "
    "unsloth_fixed"
)
_KNOWN = {*_READ.split(), *_NEUTRAL.split(), *_FIXED}


def config_from_hf(settings: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json.

    Raises:
      WeightsError: when a needed setting is missing, or one changes the maths; all offenders are named.
    """
    refused = [
        f"{name}={settings[name]!r} (expected {value!r})"
        for name, value in _FIXED.items()
        if settings.get(name, value) not in (value, None)
    ]
    refused += [
        f"{name}={value!r} (unknown)"
        for name, value in settings.items()
        if name not in _KNOWN and value not in (None, False)
    ]
    if ARCHITECTURE not in (settings.get("architectures") or [ARCHITECTURE]):
        refused.append(f"architectures={settings['architectures']!r} (expected {ARCHITECTURE!r})")
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    scaling = sorted(rope.keys() - {"rope_type", "type", "rope_theta"})
    if rope_type != "default" or scaling:
        refused.append(f"RoPE scaling {dict(rope)!r} (expected rope_type 'default' alone)")
    if refused:
        raise WeightsError(
            f"config.json asks for what the llama decoder does not compute: {'; '.join(refused)}; "
            "use a model without these settings"
        )
    needed = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    _require(settings, needed.split(), where="config.json")
    heads = settings["num_attention_heads"]
    # Absent settings have transformers' defaults: that is what absence means in config.json.
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        num_layers=settings["num_hidden_layers"],
        embed_dim=settings["hidden_size"],
        mlp_dim=settings["intermediate_size"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta") or settings.get("rope_theta") or 10000.0),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
        max_length=settings.get("max_position_embeddings", 2048),
        tie_embeddings=bool(settings.get("tie_word_embeddings", False)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes config.json; the spelling of RoPE is the one that every version of transformers reads."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
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
    refused = [f"{k}={settings[k]!r}" for k in sorted(settings.keys() - read) if settings[k]]
    refused += [
        f"{k}={settings[k]!r} (expected the head size, {head_dim})"
        for k in sorted(same & settings.keys())
        if settings[k] != head_dim
    ]
    if refused:
        raise WeightsError(
            f"the GGUF metadata asks for what the llama decoder does not compute: {'; '.join(refused)}; "
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


_HF, _GGUF = "model.layers.{layer}.", "blk.{layer}."

LLAMA = Family(
    model_type="llama",
    from_hf=config_from_hf,
    to_hf=config_to_hf,
    from_gguf=config_from_gguf,
    tensors=(
        Tensor(path="embed/embedding", hf="model.embed_tokens.weight", gguf="token_embd.weight"),
        Tensor(
            path="layers/attn_norm/scale",
            hf=_HF + "input_layernorm.weight",
            gguf=_GGUF + "attn_norm.weight",
        ),
        Tensor(
            path="layers/attn/q",
            hf=_HF + "self_attn.q_proj.weight",
            gguf=_GGUF + "attn_q.weight",
            transpose=True,
            rotary_heads="num_heads",
        ),
        Tensor(
            path="layers/attn/k",
            hf=_HF + "self_attn.k_proj.weight",
            gguf=_GGUF + "attn_k.weight",
            transpose=True,
            rotary_heads="num_kv_heads",
        ),
        Tensor(
            path="layers/attn/v",
            hf=_HF + "self_attn.v_proj.weight",
            gguf=_GGUF + "attn_v.weight",
            transpose=True,
        ),
        Tensor(
            path="layers/attn/o",
            hf=_HF + "self_attn.o_proj.weight",
            gguf=_GGUF + "attn_output.weight",
            transpose=True,
        ),
        Tensor(
            path="layers/mlp_norm/scale",
            hf=_HF + "post_attention_layernorm.weight",
            gguf=_GGUF + "ffn_norm.weight",
        ),
        Tensor(
            path="layers/mlp/gate",
            hf=_HF + "mlp.gate_proj.weight",
            gguf=_GGUF + "ffn_gate.weight",
            transpose=True,
        ),
        Tensor(
            path="layers/mlp/up",
            hf=_HF + "mlp.up_proj.weight",
            gguf=_GGUF + "ffn_up.weight",
            transpose=True,
        ),
        Tensor(
            path="layers/mlp/down",
            hf=_HF + "mlp.down_proj.weight",
            gguf=_GGUF + "ffn_down.weight",
            transpose=True,
        ),
        Tensor(path="final_norm/scale", hf="model.norm.weight", gguf="output_norm.weight"),
        Tensor(path="head/kernel", hf="lm_head.weight", gguf="output.weight", transpose=True),
    ),
)
