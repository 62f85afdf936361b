"""The shape of a config's model, without its weights: from a directory's config.json, or from published ones.

``published/`` holds config.json files as their publishers wrote them (what the decoder does not read left out), so that
a run can be planned before a byte of the model is fetched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from etils import epath

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import SMOLLM2_135M, ModelConfig
from rlvr_jax.models.families import FAMILIES
from rlvr_jax.models.gguf import GgufFile
from rlvr_jax.models.weights import PACKAGED_MODELS, resolve_model
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.workdir import CONFIG_FILE

PUBLISHED = Path(__file__).parent / "published"


class Shape(NamedTuple):
    """A decoder's shape, and where it was read."""

    config: ModelConfig
    source: str


def model_shape(name_or_path: str | Path) -> Shape:
    """The shape of what ``load_pretrained`` would load.

    Args:
      name_or_path: as of ``load_pretrained``; a directory needs only its config.json. Where there is nothing, the last
        part of the path may be a published name (``models/Qwen3-8B``).

    Raises:
      WeightsError: no such model; the message lists the published names.
    """
    name = str(name_or_path)
    path = resolve_model(name) if "://" in name else epath.Path(name).expanduser()
    if name == TINY:
        return Shape(load_pretrained(name).config, "random weights")
    if name in PACKAGED_MODELS:
        return Shape(SMOLLM2_135M, "packaged weights")
    if (path / "checkpoints").is_dir() and (path / CONFIG_FILE).is_file():
        return model_shape(json.loads((path / CONFIG_FILE).read_text())["model"])
    if path.is_file() and path.suffix == ".gguf":
        return Shape(GgufFile(path).config, str(path))
    if (path / "config.json").is_file():
        return Shape(_read(path / "config.json"), str(path / "config.json"))
    published = PUBLISHED / f"{path.name}.json"
    if published.is_file():
        return Shape(_read(published), f"published config.json of {path.name}")
    raise WeightsError(
        f"no model {name!r} to plan for; expected one of {', '.join([TINY, *PACKAGED_MODELS])}, a .gguf file, a "
        f"directory with config.json, or a published shape: {', '.join(published_names())}"
    )


def published_names() -> list[str]:
    """Names of the shapes that come with the package."""
    return sorted(file.stem for file in PUBLISHED.glob("*.json"))


def _read(file: Path | epath.Path) -> ModelConfig:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{file} is not JSON ({error}); copy the file again") from error
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        raise WeightsError(
            f"{file} has model_type {model_type!r}; expected one of {sorted(FAMILIES)}"
        )
    return FAMILIES[model_type].from_hf(settings)
