"""Adapters alone, in the layout of PEFT: what ``peft.PeftModel.from_pretrained(base, directory)`` reads.

Where a published tensor holds several kernels of ours, one after another (``qkv_proj``), their adapters become one:
A's are stacked, B's stand on the diagonal, so that rank and alpha are as many times larger. Read back, each kernel has
the whole A and its rows of B: the same maths at the larger rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from etils import epath
from safetensors.numpy import save_file

from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.adapters import ADAPTABLE, AdapterConfig, target_kernels
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, abstract_params
from rlvr_jax.models.families import FAMILIES
from rlvr_jax.models.huggingface import listed, read_object
from rlvr_jax.models.layout import nest
from rlvr_jax.models.quantized import Quantization

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
QUANTIZATION_FILE = (
    "quantization.json"  # beside them, if the base was in few bits: PEFT has no word for it
)
# Settings that change the maths, at the only value that is computed here.
FIXED: dict[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "layer_replication": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_qalora": False,
    "alora_invocation_tokens": None,
    "arrow_config": None,
}


def check_layout(config: AdapterConfig, model: ModelConfig) -> None:
    """Raises ValueError when PEFT's layout cannot hold the adapters, which is known before they are trained."""
    targets = target_kernels(config, abstract_params(model))
    for (_, name), rows_of in _modules(model).items():
        left = [path for path in rows_of if path not in targets]
        if config.dora and left and len(left) < len(rows_of):
            raise ValueError(
                f"adapter.targets {config.targets!r} adapts a part of {name}, without {', '.join(left)}; with "
                "adapter.dora all or none of it is expected: change config.adapter.targets"
            )


def save_adapters(
    path: str | Path, config: AdapterConfig, model: ModelConfig, adapters: Params, *, base: str
) -> None:
    """Writes ``adapter_config.json`` and ``adapter_model.safetensors``; what is at ``path`` is replaced.

    Args:
      path: the directory.
      config, model: of the adapters.
      adapters: NumPy or fully addressable JAX arrays.
      base: name or directory of the model that the adapters belong to, as PEFT is to find it.

    Raises:
      ValueError: see ``check_layout``.
      OSError: it cannot be written; nothing is left behind.
    """
    check_layout(config, model)
    path = Path(path)
    flat = {name: np.asarray(array) for name, array in tree_paths(adapters).items()}
    arrays: dict[str, np.ndarray] = {}
    modules: dict[str, int] = {}  # name of a module -> how many adapters it has in one
    for (stack, name), rows_of in _modules(model).items():
        adapted = [kernel for kernel in rows_of if f"{kernel}/a" in flat]
        if not adapted:
            continue
        # mlp.up_proj is that of the layers without experts, up_proj would be each expert's too.
        modules[".".join(name.split(".")[-2 if model.num_experts else -1 :])] = len(adapted)
        height = max(rows.stop for rows in rows_of.values())
        for index, layer in enumerate(model.stacks[stack]):
            a = np.concatenate([flat[f"{kernel}/a"][index].T for kernel in adapted])
            b = np.zeros((height, len(a)), a.dtype)
            for at, kernel in enumerate(adapted):
                columns = slice(at * config.rank, (at + 1) * config.rank)
                b[rows_of[kernel], columns] = flat[f"{kernel}/b"][index].T
            prefix = f"base_model.model.{name.format(layer=layer)}"
            arrays[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(a)
            arrays[f"{prefix}.lora_B.weight"] = b
            if config.dora:
                magnitudes = [flat[f"{kernel}/magnitude"][index] for kernel in adapted]
                arrays[f"{prefix}.lora_magnitude_vector"] = np.concatenate(magnitudes)
    several = {name: count for name, count in modules.items() if count > 1}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(modules),
        "rank_pattern": {name: count * config.rank for name, count in several.items()},
        "alpha_pattern": {name: count * config.alpha for name, count in several.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": config.dora,
        "inference_mode": True,
    }
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        save_file(arrays, partial / WEIGHTS_FILE, metadata={"format": "pt"})
        (partial / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if config.quantization is not None:
            kept = json.dumps(dataclasses.asdict(config.quantization)) + "\n"
            (partial / QUANTIZATION_FILE).write_text(kept, encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        partial.replace(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def base_of(path: Path) -> tuple[str, Quantization | None]:
    """Name or directory of the model that the adapters in ``path`` belong to, and in which bits they had it.

    Raises:
      WeightsError: their settings are missing or damaged.
    """
    base = read_object(epath.Path(path) / CONFIG_FILE).get("base_model_name_or_path")
    if not isinstance(base, str):
        raise WeightsError(
            f"{path / CONFIG_FILE} has base_model_name_or_path {base!r}; expected the name or directory of a model"
        )
    if not (path / QUANTIZATION_FILE).is_file():
        return base, None
    kept = read_object(epath.Path(path) / QUANTIZATION_FILE)
    try:
        return base, Quantization(**kept)
    except (TypeError, ValueError) as error:
        raise WeightsError(
            f"{path / QUANTIZATION_FILE} holds {kept}; expected kind nf4 or int8, and double true or false"
        ) from error


def load_adapters(path: str | Path, model: ModelConfig) -> tuple[AdapterConfig, Params]:
    """Reads adapters of ``model`` that PEFT or ``save_adapters`` wrote.

    Returns:
      (config, adapters), NumPy, for ``with_adapters`` and ``merge_adapters``. Ranks are those of the file, and may
      differ from kernel to kernel; what scales differ by is multiplied into B.

    Raises:
      WeightsError: files are missing or damaged, settings ask for other maths, or tensors are not those of ``model``;
        all are named.
    """
    path = Path(path)
    settings = read_object(epath.Path(path) / CONFIG_FILE)
    wrong = [
        f"{name} {settings[name]!r} (expected {value!r})"
        for name, value in FIXED.items()
        if name in settings and settings[name] != value and (settings[name] or value)
    ]
    wrong += [f"no {name}" for name in ("r", "lora_alpha") if not settings.get(name)]
    if wrong:
        raise WeightsError(
            f"{path / CONFIG_FILE} is of adapters that are not read here: {listed(wrong)}; "
            "merge them into their base with peft"
        )
    try:
        file: Any = safetensors.safe_open(path / WEIGHTS_FILE, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path / WEIGHTS_FILE} cannot be read as safetensors ({error}): copy it again"
        ) from error
    unread = set(file.keys())
    dora = bool(settings.get("use_dora"))
    scale = _scale(settings, "")
    shapes = tree_paths(abstract_params(model))
    flat: dict[str, list[np.ndarray]] = {}
    problems: list[str] = []

    def read(name: str) -> np.ndarray:
        unread.discard(name)
        return file.get_tensor(name).astype(np.float32)

    for (stack, name), rows_of in _modules(model).items():
        for layer in model.stacks[stack]:
            module = name.format(layer=layer)
            names = [f"base_model.model.{module}.lora_{part}.weight" for part in "AB"]
            names += [f"base_model.model.{module}.lora_magnitude_vector"] * dora
            if not unread.intersection(names):
                continue
            if missing := [tensor for tensor in names if tensor not in unread]:
                problems.append(f"without {listed(missing)}")
                continue
            a, b, *magnitude = (read(tensor) for tensor in names)
            inputs = shapes[next(iter(rows_of))].shape[1]
            height = max(rows.stop for rows in rows_of.values())
            expected = [(len(a), inputs), (height, len(a)), *[(height,)] * dora]
            got = [array.shape for array in (a, b, *magnitude)]
            if got != expected:
                problems.append(f"{module} has shapes {got} (expected {expected})")
                continue
            b = b * (_scale(settings, module) / scale)
            for kernel, rows in rows_of.items():
                flat.setdefault(f"{kernel}/a", []).append(a.T)
                flat.setdefault(f"{kernel}/b", []).append(b[rows].T)
                if dora:
                    flat.setdefault(f"{kernel}/magnitude", []).append(magnitude[0][rows])
    problems += [f"{name} is not part of the model" for name in sorted(unread)]
    problems += [
        f"{kernel} in {len(layers)} of {count} layers, or in several ranks"
        for kernel, layers in flat.items()
        for count in [len(model.stacks[kernel.partition("/")[0]])]
        if len(layers) != count or len({array.shape for array in layers}) > 1
    ]
    if problems or not flat:
        raise WeightsError(
            f"the tensors in {path / WEIGHTS_FILE} are not adapters of the model: {listed(problems) or 'it has none'}; "
            "take them with the model that they were trained beside"
        )
    kernels = {name.rpartition("/")[0].removeprefix("dense_") for name in flat}
    targets = "|".join(sorted(map(re.escape, kernels)))
    rank = int(settings["r"])
    config = AdapterConfig(rank=rank, alpha=scale * rank, targets=targets, dora=dora)
    return config, nest({name: np.stack(layers) for name, layers in flat.items()})


def _modules(model: ModelConfig) -> dict[tuple[str, str], dict[str, slice]]:
    """Of each module (stack of layers, name in the published layout): kernel that can be adapted -> its rows."""
    shapes = tree_paths(abstract_params(model))
    kernels: dict[tuple[str, str], list[str]] = {}
    for tensor in FAMILIES[model.family].tensors:
        if ADAPTABLE.fullmatch(tensor.path) and tensor.path in shapes:
            stack, module = tensor.path.partition("/")[0], tensor.hf.removesuffix(".weight")
            kernels.setdefault((stack, module), []).append(tensor.path)
    modules = {}
    for name, paths in kernels.items():
        bounds = [0, *itertools.accumulate(shapes[path].shape[2] for path in paths)]
        rows = [slice(*pair) for pair in itertools.pairwise(bounds)]
        modules[name] = dict(zip(paths, rows, strict=True))
    return modules


def _scale(settings: Mapping[str, Any], module: str) -> float:
    """Of B @ A in a module; patterns are of the ends of names, or regular expressions for them, as PEFT has it."""

    def of(pattern: str, default: str) -> float:
        found = (
            value
            for key, value in (settings.get(pattern) or {}).items()
            if re.match(rf"(.*\.)?({key})$", module)
        )
        return float(next(found, settings[default]))

    rank, alpha = of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")
    return alpha / (rank**0.5 if settings.get("use_rslora") else rank)
