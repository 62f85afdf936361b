"""What a family is: a name, a table of tensors, and three translations of its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """One parameter of the decoder and its name in published files.

    Attributes:
      path: in the params tree, ``/`` between keys; paths under ``layers/`` are stacked over layers.
      hf: name in safetensors, ``{layer}`` for the layer's index.
      gguf: name in GGUF.
      transpose: whether files keep it [out, in], as torch does, where the decoder has [in, out].
      rotary_heads: the ModelConfig field that counts its heads, when GGUF reorders its rows for interleaved RoPE.
    """

    path: str
    hf: str
    gguf: str
    transpose: bool = False
    rotary_heads: str | None = None

    @property
    def stacked(self) -> bool:
        return self.path.startswith("layers/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A published layout that the decoder can compute.

    Attributes:
      model_type: as config.json and GGUF name it.
      tensors: every parameter; the head is used only by untied models.
      from_hf: config.json -> ModelConfig; raises WeightsError for settings that the decoder does not compute.
      to_hf: the reverse, for saving.
      from_gguf: GGUF metadata without its ``<model_type>.`` prefix -> ModelConfig (tied); raises likewise.
    """

    model_type: str
    tensors: tuple[Tensor, ...]
    from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    from_gguf: Callable[[Mapping[str, Any]], ModelConfig]
