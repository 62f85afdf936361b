"""What a family is: a table of tensors, and a table of settings that is read both ways. No maths lives here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families.settings import Settings, common_fields, common_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter of the decoder and its name in published files.

    Several parameters with one name are one tensor in the file, whose rows are theirs, in the order of the table.

    Attributes:
      path: in the params tree, ``/`` between keys; paths under ``layers/`` are stacked over layers.
      hf: name in safetensors; ``{layer}`` and ``{expert}`` stand for indices.
      gguf: name in GGUF; empty when the family is not read from GGUF.
      transpose: whether files keep it [out, in], as torch does, where the decoder has [in, out].
      rotary_heads: the ModelConfig field that counts its heads, when GGUF reorders its rows for interleaved RoPE.
    """

    path: str
    hf: str
    gguf: str = ""
    transpose: bool = False
    rotary_heads: str | None = None

    @property
    def num_indices(self) -> int:
        """How many leading axes of the parameter are indices in the name: layer, expert."""
        return self.hf.count("{")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A published layout that the decoder can compute.

    Attributes:
      model_type: as config.json names it (and GGUF, as ``general.architecture``).
      architecture: the class of transformers.
      defaults: what transformers takes for a setting that is absent from config.json.
      fixed: settings that the decoder computes at one value only; at another they change the maths.
      harmless: settings of this family that do not touch the forward pass, beside ``settings.HARMLESS``.
      read: the fields of ModelConfig beyond ``common_fields``, from the settings.
      write: the settings beyond ``common_settings``.
      tensors: every parameter that a model of the family may have.
      from_gguf: GGUF metadata without its ``<model_type>.`` prefix -> ModelConfig (tied), for families read from GGUF.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    harmless: tuple[str, ...] = ()
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    tensors: tuple[Tensor, ...]
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig] | None = None

    def from_hf(self, settings: Mapping[str, Any]) -> ModelConfig:
        """Reads config.json.

        Raises:
          WeightsError: when a needed setting is missing, or one changes the maths; all offenders are named.
        """
        reader = Settings(
            settings,
            family=self.model_type,
            architecture=self.architecture,
            defaults=self.defaults,
            fixed=self.fixed,
            harmless=self.harmless,
        )
        fields = {**common_fields(reader), **self.read(reader)}
        reader.finish()
        return ModelConfig(family=self.model_type, **fields)

    def to_hf(self, config: ModelConfig) -> dict[str, Any]:
        """Writes config.json, in the spelling that every version of transformers reads.

        Raises:
          ValueError: the family has no word for a setting of ``config``: read back, it would be another model.
        """
        settings = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **common_settings(config),
            **self.write(config),
        }
        wrote, meant = (dataclasses.asdict(c) for c in (self.from_hf(settings), config))
        lost = [f"{name}={meant[name]!r}" for name in meant if wrote[name] != meant[name]]
        if lost:
            raise ValueError(
                f"a {self.model_type} model cannot be written with {', '.join(lost)}; expected settings that this "
                "family has: change config.family or these"
            )
        return settings


def _named(path: str, hf: str, gguf: str, heads: str | None = None) -> Tensor:
    """A kernel, or a vector when the file's name says so."""
    kernel = hf.endswith("_proj.weight")
    prefix = ("model.layers.{layer}.", "blk.{layer}.")
    return Tensor(
        path=f"layers/{path}",
        hf=prefix[0] + hf,
        gguf=prefix[1] + gguf,
        transpose=kernel,
        rotary_heads=heads,
    )


# What nearly all families share. A model has those of them that its configuration implies.
OUTER = (
    Tensor(path="embed/embedding", hf="model.embed_tokens.weight", gguf="token_embd.weight"),
    Tensor(path="final_norm/scale", hf="model.norm.weight", gguf="output_norm.weight"),
    Tensor(path="head/kernel", hf="lm_head.weight", gguf="output.weight", transpose=True),
)
ATTENTION = (
    _named("attn/q", "self_attn.q_proj.weight", "attn_q.weight", "num_heads"),
    _named("attn/k", "self_attn.k_proj.weight", "attn_k.weight", "num_kv_heads"),
    _named("attn/v", "self_attn.v_proj.weight", "attn_v.weight"),
    _named("attn/o", "self_attn.o_proj.weight", "attn_output.weight"),
    _named("attn/q_bias", "self_attn.q_proj.bias", "attn_q.bias"),
    _named("attn/k_bias", "self_attn.k_proj.bias", "attn_k.bias"),
    _named("attn/v_bias", "self_attn.v_proj.bias", "attn_v.bias"),
    _named("attn/o_bias", "self_attn.o_proj.bias", "attn_output.bias"),
    _named("attn/q_norm/scale", "self_attn.q_norm.weight", "attn_q_norm.weight"),
    _named("attn/k_norm/scale", "self_attn.k_norm.weight", "attn_k_norm.weight"),
)
MLP = (
    _named("mlp/gate", "mlp.gate_proj.weight", "ffn_gate.weight"),
    _named("mlp/up", "mlp.up_proj.weight", "ffn_up.weight"),
    _named("mlp/down", "mlp.down_proj.weight", "ffn_down.weight"),
    _named("mlp/gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias"),
    _named("mlp/up_bias", "mlp.up_proj.bias", "ffn_up.bias"),
    _named("mlp/down_bias", "mlp.down_proj.bias", "ffn_down.bias"),
)
PRE_NORMS = (
    _named("attn_norm/scale", "input_layernorm.weight", "attn_norm.weight"),
    _named("mlp_norm/scale", "post_attention_layernorm.weight", "ffn_norm.weight"),
)
# Where there are norms after attention and MLP, the same names mean other norms.
SANDWICH_NORMS = (
    _named("attn_norm/scale", "input_layernorm.weight", ""),
    _named("attn_post_norm/scale", "post_attention_layernorm.weight", ""),
    _named("mlp_norm/scale", "pre_feedforward_layernorm.weight", ""),
    _named("mlp_post_norm/scale", "post_feedforward_layernorm.weight", ""),
)


def dense_layers(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same tensors of the layers before the ones with experts."""
    return tuple(dataclasses.replace(t, path=f"dense_{t.path}") for t in tensors)


def shared_expert(name: str) -> tuple[Tensor, ...]:
    """The tensors of an MLP beside the experts."""
    named = {path: f"mlp.{name}.{path}_proj.weight" for path in ("gate", "up", "down")}
    return tuple(_named(f"shared/{path}", hf, "") for path, hf in named.items())


def experts(block: str, *, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """The tensors of a mixture of experts, one a file's name for each expert's kernel."""
    prefix = "model.layers.{layer}." + block
    kernels = {"gate": gate, "up": up, "down": down}
    return (
        Tensor(path="layers/experts/router", hf=f"{prefix}.gate.weight", transpose=True),
        Tensor(path="layers/experts/router_bias", hf=f"{prefix}.gate.e_score_correction_bias"),
        *(
            Tensor(
                path=f"layers/experts/{path}",
                hf=f"{prefix}.experts.{{expert}}.{name}.weight",
                transpose=True,
            )
            for path, name in kernels.items()
        ),
    )
