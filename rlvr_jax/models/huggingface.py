"""Weights in a Hugging Face directory: config.json, and safetensors in one file or in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from etils import epath
from safetensors.numpy import save_file

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.families import FAMILIES, Tensor
from rlvr_jax.models.loading import listed
from rlvr_jax.models.tensor_file import DTYPES, TensorFile

_SAFETENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
Places = dict[str, tuple[TensorFile, str]]  # tensor name -> the file it is in, and its name there


class HuggingFaceDirectory:
    """config.json and safetensors as a source of named tensors.

    Args:
      path: the directory, local or remote; of its weights only the headers are read.

    Raises:
      WeightsError: when files are missing or damaged, or config.json asks for maths that the decoder does not do.
    """

    def __init__(self, path: epath.Path) -> None:
        settings = read_object(path / "config.json")
        opened, places = _open_files(path)
        if settings.get("model_type") == "gemma3":
            settings, places = _text_part(settings, places)
        model_type = settings.get("model_type")
        if model_type not in FAMILIES:
            raise WeightsError(
                f"{path / 'config.json'} has model_type {model_type!r}; expected one of {sorted(FAMILIES)}"
            )
        self.family = FAMILIES[model_type]
        self.files = tuple(opened)
        self.remote = any(file.remote for file in opened.values())
        self._config = self.family.from_hf(settings)
        self._places = places
        # Layers after the last one (GLM's) guess further tokens, and no token that the model itself gives.
        count, extra = self._config.num_layers, settings.get("num_nextn_predict_layers") or 0
        self._extra = tuple(f"model.layers.{layer}." for layer in range(count, count + extra))

    @property
    def config(self) -> ModelConfig:
        return self._config

    def names(self) -> set[str]:
        # Old checkpoints hold RoPE's frequencies, which follow from the configuration.
        names = {name for name in self._places if not name.endswith("rotary_emb.inv_freq")}
        return {name for name in names if not name.startswith(self._extra)}

    def name_of(self, tensor: Tensor) -> str:
        return tensor.hf

    def shape(self, name: str) -> tuple[int, ...]:
        file, key = self._places[name]
        return file.entries[key].shape

    def dtype(self, name: str) -> str:
        file, key = self._places[name]
        return file.entries[key].dtype

    def readable(self, name: str) -> bool:
        return self.dtype(name) in DTYPES

    @property
    def readable_kinds(self) -> str:
        return ", ".join(DTYPES)

    def rows(self, name: str, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        file, key = self._places[name]
        return file.rows(key, start, stop)


def _text_part(settings: dict[str, Any], places: Places) -> tuple[dict[str, Any], Places]:
    """Of a model that sees images too, the settings and tensors of its text model, named as those of a text model."""
    known = {
        *("architectures", "model_type", "text_config", "vision_config", "mm_tokens_per_image"),
        *("boi_token_index", "eoi_token_index", "image_token_index"),
    }
    text = {key: value for key, value in settings.items() if key not in known}
    text |= settings.get("text_config") or {}
    named = {}
    for name, place in places.items():
        if "vision_tower." in name or "multi_modal_projector." in name:
            continue
        for prefix in ("language_model.model.", "model.language_model."):
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        named[name.removeprefix("language_model.")] = place
    return text | {"model_type": "gemma3_text", "architectures": None}, named


def _open_files(path: epath.Path) -> tuple[dict[epath.Path, TensorFile], Places]:
    """The files of weights, and where in them each tensor is."""
    if (path / _INDEX).exists():
        weight_map = read_object(path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{path / _INDEX} has no weight_map; copy the file again")
        names = sorted(set(weight_map.values()))
        absent = [name for name in names if not (path / name).exists()]
        if absent:
            raise WeightsError(
                f"{path} lacks {', '.join(absent)}, named in {_INDEX}; copy the missing files"
            )
        opened = {path / name: TensorFile(path / name) for name in names}
        moved = sorted(
            name for name, file in weight_map.items() if name not in opened[path / file].entries
        )
        if moved:
            raise WeightsError(
                f"{_INDEX} names tensors that their files do not hold: {listed(moved)}; copy the files again"
            )
    elif (path / _SAFETENSORS).exists():
        opened = {path / _SAFETENSORS: TensorFile(path / _SAFETENSORS)}
    else:
        raise WeightsError(
            f"{path} has neither {_SAFETENSORS} nor {_INDEX}; expected safetensors. Other kinds are converted once "
            "with transformers: AutoModelForCausalLM.from_pretrained(dir).save_pretrained(dir)"
        )
    return opened, {name: (file, name) for file in opened.values() for name in file.entries}


def read_object(file: epath.Path) -> dict[str, Any]:
    """The JSON object in a file of a model's directory; raises WeightsError when it is absent or something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{file.parent} has no {file.name}; expected a Hugging Face directory with config.json and safetensors"
        ) from None
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON ({error}); copy the file again") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{file} holds a {type(content).__name__}; expected a JSON object")
    return content


def write_safetensors(
    directory: Path,
    tensors: Sequence[tuple[str, int, Callable[[], np.ndarray]]],
    max_shard_bytes: int,
) -> None:
    """Writes tensors in order, into one file or into shards with an index.

    Args:
      directory: where to.
      tensors: (name, size in bytes, function that gives the array), called as its file is written, so that one shard is
        in memory at a time.
      max_shard_bytes: a file is not larger than this, unless one tensor is.

    Raises:
      OSError: when a file cannot be written.
    """
    shards: list[list[int]] = [[]]
    size = 0
    for index, (_, num_bytes, _) in enumerate(tensors):
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(index)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if shards[1:] else _SAFETENSORS
        arrays = {tensors[i][0]: np.ascontiguousarray(tensors[i][2]()) for i in shard}
        # transformers refuses files that do not say which framework's layout they follow.
        try:
            save_file(arrays, directory / file, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OSError(
                f"{directory / file} cannot be written ({error}); free some space or choose another path"
            ) from error
        weight_map |= dict.fromkeys(arrays, file)
    if shards[1:]:
        total = sum(num_bytes for _, num_bytes, _ in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
