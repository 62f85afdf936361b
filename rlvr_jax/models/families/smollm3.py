"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.family import ATTENTION, MLP, OUTER, PRE_NORMS, Family
from rlvr_jax.models.families.llama import read_biases_and_activation, write_biases_and_activation
from rlvr_jax.models.families.settings import Settings, layer_types


def _read(s: Settings) -> dict[str, Any]:
    count, interval = s["num_hidden_layers"], s["no_rope_layer_interval"]
    rotated = s["no_rope_layers"]  # 1 where a layer has RoPE, whatever the name says
    if rotated is None:
        rotated = [(layer + 1) % interval != 0 for layer in range(count)]
    if len(rotated) < count:
        s.refuse("no_rope_layers", f"expected an entry for each of {count} layers")
        rotated = [*rotated, *[1] * count]
    nope = tuple(layer for layer in range(count) if not rotated[layer])
    window = s["sliding_window"]
    window = window if s["use_sliding_window"] else None
    return {
        **read_biases_and_activation(s),
        "nope_layers": nope,
        **s.windows(s.local_layers(default=nope if window else ()), window),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        **write_biases_and_activation(config),
        "no_rope_layers": [int(i not in config.nope_layers) for i in range(config.num_layers)],
        "use_sliding_window": bool(config.local_layers),
        "sliding_window": config.sliding_window or None,
        "layer_types": layer_types(config),
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
    },
    harmless=("max_window_layers",),
    read=_read,
    write=_write,
    tensors=(*OUTER, *PRE_NORMS, *ATTENTION, *MLP),
)
