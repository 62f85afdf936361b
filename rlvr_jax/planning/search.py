"""What to change: meshes, micro-batches and remat policies, ranked by the formulas of ``estimate``.

Every factorisation of the devices over the mesh's axes is tried that the model and the batch divide over, with each
size of a micro-batch, remat policy and engine batch that makes sense. Of those whose estimate fits, the one with the
shortest step is proposed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ml_collections import ConfigDict

from rlvr_jax.distributed.mesh import ROW_AXES
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.chips import CHIPS
from rlvr_jax.planning.estimate import estimate_checked
from rlvr_jax.planning.measure import Phase
from rlvr_jax.planning.plan import USABLE, roofline

MARGIN = 0.85  # of the usable memory: what an estimate may be off
WORTH_IT = 0.9  # a faster setting is proposed if its step takes at most this part


def better_settings(
    config: ConfigDict,
    model: ModelConfig,
    mesh: Mapping[str, int],
    *,
    prompt_tokens: int,
    chip: str,
) -> dict[str, Any] | None:
    """Overrides (``mesh.fsdp`` to its value) whose estimate fits, with the shortest step; None where nothing fits.

    Args:
      config: of a reinforcement learning run.
      model: shape of its model.
      mesh: its axes, -1 filled up.
      prompt_tokens: of the longest prompt.
      chip: a name of ``CHIPS``.
    """
    room = USABLE * MARGIN * CHIPS[chip].memory_bytes
    best: tuple[float, dict[str, Any]] | None = None
    for overrides in _candidates(config, model, mesh):
        try:
            phases = _estimate(config, model, mesh, overrides, prompt_tokens)
        except ValueError:
            continue  # does not divide
        if max(phase.peak_bytes for phase in phases.values()) > room:
            continue
        seconds = step_seconds(phases, chip)
        if best is None or seconds < best[0]:
            best = seconds, overrides
    if best is None:
        return None
    now = _flat(config, mesh)
    return {name: value for name, value in best[1].items() if now[name] != value}


def step_seconds(phases: Mapping[str, Phase], chip: str) -> float:
    """Of one step, by the roofline."""
    return sum(p.runs * max(roofline(p, CHIPS[chip]).values()) for p in phases.values())


def apply(config: ConfigDict, overrides: Mapping[str, Any]) -> ConfigDict:
    """A locked copy of a config with the overrides."""
    changed = config.copy_and_resolve_references().unlock()
    for name, value in overrides.items():
        group, key = name.split(".")
        changed[group][key] = value
    return changed.lock()


def flags(overrides: Mapping[str, Any]) -> str:
    """As a command line has them."""
    return " ".join(f"--config.{name}={value}" for name, value in overrides.items())


def _estimate(
    config: ConfigDict,
    model: ModelConfig,
    mesh: Mapping[str, int],
    overrides: Mapping[str, Any],
    prompt_tokens: int,
) -> dict[str, Phase]:
    sizes = {axis: overrides.get(f"mesh.{axis}", size) for axis, size in mesh.items()}
    return estimate_checked(apply(config, overrides), model, sizes, prompt_tokens=prompt_tokens)


def _flat(config: ConfigDict, mesh: Mapping[str, int]) -> dict[str, Any]:
    """What the search may change, as it is."""
    return {
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
        "train.micro_rows": config.train.micro_rows,
        "train.remat": config.train.remat,
        "rollout.max_rows": config.rollout.max_rows,
    }


def _candidates(
    config: ConfigDict, model: ModelConfig, mesh: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    num_devices = 1
    for size in mesh.values():
        num_devices *= size
    samples = config.tasks.tasks_per_step * config.rollout.group_size
    names = [axis for axis in mesh if axis != "expert" or model.num_experts]
    for sizes in factorisations(num_devices, len(names)):
        axes = {axis: 1 for axis in mesh} | dict(zip(names, sizes, strict=True))
        shards = math.prod(axes.get(axis, 1) for axis in ROW_AXES)
        if axes["data"] > 1 and axes["fsdp"] > 1:
            continue  # replicas of shards: never less memory, seldom faster
        columns = axes.get("context", 1)
        per_shard = (
            [1, 2, 4, 8, 16] if columns == 1 else [1]
        )  # a row is cut when it is all there is
        at_once = shards * columns * config.rollout.group_size
        decode = sorted({min(samples, at_once * n) for n in (1, 2, 4, 8)})
        for micro, remat, rows in itertools.product(per_shard, ("full", "dots", "none"), decode):
            yield {
                **{f"mesh.{axis}": size for axis, size in axes.items()},
                "train.micro_rows": shards * micro,
                "train.remat": remat,
                "rollout.max_rows": rows,
            }


def factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered product."""
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            for rest in factorisations(number // first, parts - 1):
                yield (first, *rest)
