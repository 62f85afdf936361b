"""RoPE's settings in config.json: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters`` (transformers 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlvr_jax.models.config import ModelConfig, RopeScaling

if TYPE_CHECKING:
    from rlvr_jax.models.families.settings import Settings

# Which keys each kind has, beside rope_type, type and rope_theta.
_KEYS = {
    "default": "",
    "linear": "factor",
    "dynamic": "factor",
    "llama3": "factor original_max_position_embeddings low_freq_factor high_freq_factor",
    "yarn": "factor original_max_position_embeddings attention_factor beta_fast beta_slow truncate mscale "
    "mscale_all_dim",
    "longrope": "factor original_max_position_embeddings attention_factor short_factor long_factor",
}


def read_rope(s: Settings) -> dict[str, Any]:
    """Fields of ModelConfig."""
    if "rope_local_base_freq" in s:
        return _read_by_kind(s)
    name, rope = rope_dictionary(s)
    theta = s["rope_theta"]
    return {"rope_theta": float(rope.get("rope_theta") or theta), **_read_scaling(s, name, rope)}


def rope_dictionary(s: Settings) -> tuple[str, Mapping[str, Any]]:
    """The setting that transformers goes by, and its value."""
    old, new = s["rope_scaling"], s["rope_parameters"]
    return ("rope_scaling", old) if old else ("rope_parameters", new or {})


def _read_by_kind(s: Settings) -> dict[str, Any]:
    """Where local layers have a base of their own: a dictionary for each kind of layer, or three settings (Gemma 3)."""
    nested, theta, local_theta = (
        s[name] for name in ("rope_parameters", "rope_theta", "rope_local_base_freq")
    )
    nested = nested or {}
    full = {**(nested.get("full_attention") or {}), **(s["rope_scaling"] or {})}
    local = nested.get("sliding_attention") or {}
    other = sorted(nested.keys() - {"full_attention", "sliding_attention"})
    if other or local.get("rope_type", "default") != "default":
        s.refuse(
            "rope_parameters", "expected full_attention, and sliding_attention without scaling"
        )
    return {
        "rope_theta": float(full.get("rope_theta") or theta),
        "local_rope_theta": float(local.get("rope_theta") or local_theta or theta),
        **_read_scaling(s, "rope_scaling" if s["rope_scaling"] else "rope_parameters", full),
    }


def _read_scaling(s: Settings, name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_scaling`` (and for longrope ``max_length``) from the dictionary found under the setting ``name``."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind not in _KEYS:
        s.refuse(name, f"expected rope_type to be one of {sorted(_KEYS)}")
        return {}
    known = {"rope_type", "type", "rope_theta", *_KEYS[kind].split()}
    if "partial_rotary_factor" in s:
        known.add("partial_rotary_factor")
    unknown = sorted(key for key in rope if key not in known and rope[key] is not None)
    if unknown:
        s.refuse(name, f"{', '.join(unknown)} unknown for rope_type {kind!r}")
    if kind == "default":
        return {}
    max_length = s["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or max_length
    if "original_max_position_embeddings" in s:
        original = s["original_max_position_embeddings"]
    if kind == "dynamic":
        original = max_length
    factor = rope.get("factor") or max_length / original
    absent = [
        key
        for key in _KEYS[kind].split()
        if key.endswith("_factor") and key != "attention_factor" and rope.get(key) is None
    ]
    if absent:
        s.refuse(name, f"expected {', '.join(absent)}")
        return {}
    scaling = RopeScaling(
        kind=kind,
        factor=float(factor),
        original_length=original if kind != "linear" else 0,
        attention_factor=_attention_factor(kind, rope, factor, original),
        low_frequency_factor=float(rope.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(rope.get("high_freq_factor", 4.0)),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
        short_factors=tuple(rope.get("short_factor", ())),
        long_factors=tuple(rope.get("long_factor", ())),
    )
    # The short factors are the ones of the original context; a greater max_length asks for the long ones.
    return {"rope_scaling": scaling} | ({"max_length": original} if kind == "longrope" else {})


def _attention_factor(kind: str, rope: Mapping[str, Any], factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if scale and all_dim:
        return (0.1 * scale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """The reverse of ``read_rope``; a context stretched beyond the published one is written as it was published."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta}
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    settings: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": rope}
    if scaling.kind in ("llama3", "yarn", "longrope"):
        rope["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        rope["low_freq_factor"] = scaling.low_frequency_factor
        rope["high_freq_factor"] = scaling.high_frequency_factor
    elif scaling.kind == "yarn":
        rope["attention_factor"] = scaling.attention_factor
        rope["beta_fast"], rope["beta_slow"] = scaling.beta_fast, scaling.beta_slow
        rope["truncate"] = scaling.truncate
    elif scaling.kind == "longrope":
        rope["attention_factor"] = scaling.attention_factor
        rope["short_factor"] = list(scaling.short_factors)
        rope["long_factor"] = list(scaling.long_factors)
        settings["max_position_embeddings"] = round(scaling.original_length * scaling.factor)
    elif scaling.kind == "dynamic":
        settings["max_position_embeddings"] = scaling.original_length
    return settings
