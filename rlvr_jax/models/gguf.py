"""Weights out of a GGUF file: metadata, and rows of tensors dequantised to float32 as they are read.

llama.cpp rotates neighbouring pairs of a head (interleaved RoPE), so its files keep the rows of the query and key
projections in another order than Hugging Face's. ``GgufFile.rows`` puts them back; without that the model still
talks, badly (perplexity 25 instead of 6.3 on a plain paragraph), which is why it is done where the file is read.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from rlvr_jax.errors import WeightsError, require
from rlvr_jax.models.config import ModelConfig, RopeScaling
from rlvr_jax.models.families import FAMILIES, Tensor

# The scaling of Llama 3.1 and later, as a divisor for each of RoPE's frequencies.
_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file as a source of named tensors.

    Args:
      path: the file; it is mapped, not read.

    Raises:
      WeightsError: when the file is damaged, of an unknown family, or asks for maths that the decoder does not do.
      MissingExtraError: when the ``gguf`` package is absent.
    """

    readable_kinds = "what the gguf package can dequantise, such as Q8_0 or F16"
    remote = False

    def __init__(self, path: Path | epath.Path) -> None:
        gguf = require("gguf", "smollm2")
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise WeightsError(
                f"{path} cannot be read as GGUF ({error}); it may be cut short: copy the file again"
            ) from error
        self.files = (epath.Path(path),)
        self._dequantize = gguf.dequantize
        self._readable: dict[Any, bool] = {}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        field = reader.fields.get("general.architecture")
        architecture = None if field is None else field.contents()
        readable = [name for name, family in FAMILIES.items() if family.from_gguf is not None]
        if architecture not in readable:
            raise WeightsError(
                f"{path} is of architecture {architecture!r}; expected one of {sorted(readable)}"
            )
        self.family = FAMILIES[architecture]
        assert self.family.from_gguf is not None
        prefix = f"{architecture}."
        settings = {
            name.removeprefix(prefix): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(prefix)
        }
        if "token_embd.weight" in self._tensors:
            settings.setdefault("vocab_size", self.shape("token_embd.weight")[0])
        head = next(t.gguf for t in self.family.tensors if t.path == "head/kernel")
        self._config = dataclasses.replace(
            self.family.from_gguf(settings), tie_embeddings=head not in self._tensors
        )
        if _ROPE_FACTORS in self._tensors:
            factors = tuple(map(float, self._tensors[_ROPE_FACTORS].data))
            scaling = RopeScaling(
                kind="longrope",
                factor=1.0,
                original_length=self._config.max_length,
                short_factors=factors,
                long_factors=factors,
            )
            self._config = dataclasses.replace(self._config, rope_scaling=scaling)

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> set[str]:
        return set(self._tensors) - {_ROPE_FACTORS}

    def name_of(self, tensor: Tensor) -> str:
        return tensor.gguf

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in], as torch has it; the file counts dimensions from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> str:
        return self._tensors[name].tensor_type.name

    def readable(self, name: str) -> bool:
        entry = self._tensors[name]
        if entry.tensor_type not in self._readable:
            try:
                self._dequantize(entry.data[:1], entry.tensor_type)
                self._readable[entry.tensor_type] = True
            except NotImplementedError:
                self._readable[entry.tensor_type] = False
        return self._readable[entry.tensor_type]

    def rows(self, name: str, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """float32, dequantised, rows in Hugging Face's order."""
        entry, shape = self._tensors[name], self.shape(name)
        if len(shape) == 1:  # its blocks of numbers run across what is asked for
            return self._dequantize(entry.data, entry.tensor_type).reshape(shape)[start:stop]
        wanted: Any = slice(start, stop)
        if tensor.rotary_heads is not None:
            heads = getattr(self._config, tensor.rotary_heads)
            in_file = np.arange(shape[0]).reshape(heads, shape[0] // heads // 2, 2)
            wanted = in_file.swapaxes(1, 2).ravel()[start:stop]
        rows = self._dequantize(entry.data[wanted], entry.tensor_type)
        return rows.reshape(stop - start, *shape[1:])
