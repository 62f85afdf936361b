"""Reading config.json with an account: a setting that nobody asked for, and that is not known as harmless, is refused.

A setting nobody here has heard of is how a model computes something else without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.rope_settings import read_rope, write_rope

# Settings that do not touch the forward pass, whatever their value. Dropout is off in RL; ``pretraining_tp`` cut matrix
# products into parts with the same sum.
HARMLESS = frozenset(
    """
    _name_or_path _attn_implementation architectures attention_dropout auto_map bos_token_id cache_implementation dtype
    embd_pdrop eos_token_id hidden_dropout id2label initializer_range is_llama_config label2id model_type num_labels
    output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type
    resid_pdrop return_dict router_jitter_noise task_specific_params tokenizer_class torch_dtype transformers.js_config
    transformers_version unsloth_fixed unsloth_version use_cache
    """.split()  # noqa: SIM905
)
# Settings that are harmless while they are off: older versions of transformers wrote all they had.
HARMLESS_WHEN_OFF = frozenset(
    """
    add_cross_attention chunk_size_feed_forward cross_attention_hidden_size is_decoder is_encoder_decoder pruned_heads
    rope_interleaved tie_encoder_decoder torchscript use_bfloat16 use_mrope
    """.split()  # noqa: SIM905
)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_NEEDED = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
)


class Settings:
    """config.json of one family. ``settings[name]`` is the value, or what transformers takes for an absent one.

    Raises:
      WeightsError: from ``finish``, when something was refused; when a size is missing, at once.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        family: str,
        architecture: str,
        defaults: Mapping[str, Any],
        fixed: Mapping[str, Any],
        harmless: tuple[str, ...],
    ) -> None:
        self._settings, self._defaults, self._family = settings, defaults, family
        self._known = {*HARMLESS, *harmless, *fixed}
        self._refused: list[str] = []
        for name, value in fixed.items():
            if settings.get(name, value) not in (value, None):
                self.refuse(name, f"expected {value!r}")
        if architecture not in (settings.get("architectures") or [architecture]):
            self.refuse("architectures", f"expected {architecture!r}")
        missing = [name for name in _NEEDED if self[name] is None]
        if missing:
            raise WeightsError(
                f"config.json lacks {', '.join(missing)}; expected those of a {family} model: copy the file again"
            )

    def __getitem__(self, name: str) -> Any:
        self._known.add(name)
        return self._settings.get(name, self._defaults.get(name))

    def __contains__(self, name: str) -> bool:
        """Whether the family has such a setting, present or not."""
        return name in self._defaults

    def refuse(self, name: str, why: str) -> None:
        """Notes a setting that the decoder cannot compute."""
        self._refused.append(f"{name}={self._settings.get(name)!r} ({why})")

    def finish(self) -> None:
        unknown = [
            name
            for name, value in self._settings.items()
            if name not in self._known
            and value is not None
            and not (name in HARMLESS_WHEN_OFF and not value)
        ]
        for name in unknown:
            self.refuse(name, "unknown")
        if self._refused:
            raise WeightsError(
                f"config.json asks for what the decoder does not compute in a {self._family} model: "
                f"{'; '.join(self._refused)}; use a model without these settings"
            )

    def activation(self, name: str = "hidden_act") -> str:
        """The name of an activation, as ModelConfig has it."""
        value = self[name]
        if value not in ACTIVATIONS:
            self.refuse(name, f"expected one of {sorted(ACTIVATIONS)}")
        return ACTIVATIONS.get(value, "silu")

    def local_layers(self, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The layers that ``layer_types`` calls sliding; ``default`` without that setting."""
        types, count = self["layer_types"], self["num_hidden_layers"]
        if types is None:
            return default
        if len(types) != count or set(types) - {"full_attention", "sliding_attention"}:
            self.refuse(
                "layer_types", f"expected full_attention or sliding_attention, {count} times"
            )
            return ()
        return tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")

    def windows(self, local_layers: tuple[int, ...], window: int | None) -> dict[str, Any]:
        """Fields of ModelConfig for layers that see ``window`` keys."""
        if not local_layers:
            return {}
        if not window or window < 1:
            self.refuse(
                "sliding_window",
                "layers are local; expected their window, and no use_sliding_window: false",
            )
            return {}
        return {"local_layers": local_layers, "sliding_window": window}


def common_fields(s: Settings) -> dict[str, Any]:
    """Fields of ModelConfig that all families name alike."""
    heads = s["num_attention_heads"]
    return {
        "vocab_size": s["vocab_size"],
        "num_layers": s["num_hidden_layers"],
        "embed_dim": s["hidden_size"],
        "mlp_dim": s["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": s["num_key_value_heads"] or heads,
        "head_dim": s["head_dim"] or s["hidden_size"] // heads,
        "norm_eps": s["rms_norm_eps"],
        "max_length": s["max_position_embeddings"],
        "tie_embeddings": bool(s["tie_word_embeddings"]),
        **read_rope(s),
    }


def common_settings(config: ModelConfig) -> dict[str, Any]:
    """The reverse of ``common_fields``."""
    return {
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.mlp_dim,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": config.tie_embeddings,
        **write_rope(config),
    }


def activation_name(config: ModelConfig) -> str:
    """As config.json spells it."""
    return {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}[config.activation]


def layer_types(config: ModelConfig) -> list[str]:
    """As config.json spells local and global layers."""
    local = set(config.local_layers)
    return [
        "sliding_attention" if layer in local else "full_attention"
        for layer in range(config.num_layers)
    ]
