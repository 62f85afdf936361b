"""What to change: meshes, batches and remat policies, ranked by the formulas of ``estimate``.

Every factorisation of the devices over the mesh's axes is tried that the model and the batch divide over, with each
size of a micro-batch, remat policy and engine batch that makes sense. Of those whose estimate fits, the one with the
shortest step is proposed. Where none fits, so are more updates of smaller parts of a step, then steps of fewer tasks:
these change what is learnt.

Where a plan was compiled, estimates of temporaries are multiplied by what the compiler made of the same phase over what
the formulas had said of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlvr_jax.distributed.mesh import ROW_AXES
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.chips import CHIPS
from rlvr_jax.planning.estimate import estimate_checked
from rlvr_jax.planning.measure import Phase
from rlvr_jax.planning.plan import USABLE, roofline

MARGIN = 0.85  # of the usable memory: what an estimate may be off
WORTH_IT = 0.9  # a faster setting is proposed if its step takes at most this part


class Found(NamedTuple):
    """What a search ends with.

    Attributes:
      overrides: ``mesh.fsdp`` to its value, and so on, of what is to be changed.
      peak_bytes: by estimate.
      phase: in which.
      fits: whether that is within the device's memory, with a margin.
    """

    overrides: dict[str, Any]
    peak_bytes: int
    phase: str
    fits: bool


def better_settings(
    config: ConfigDict,
    model: ModelConfig,
    mesh: Mapping[str, int],
    *,
    prompt_tokens: int,
    chip: str,
    measured: Mapping[str, Phase],
) -> Found:
    """The settings whose estimate fits with the shortest step; else those that come closest.

    Args:
      config: of a reinforcement learning run.
      model: shape of its model.
      mesh: its axes, -1 filled up.
      prompt_tokens: of the longest prompt.
      chip: a name of ``CHIPS``.
      measured: the phases of the config as it is, whose temporaries correct the formulas'.
    """
    room = USABLE * MARGIN * CHIPS[chip].memory_bytes
    now = _flat(config, mesh)
    corrected = _corrections(measured, _estimate(config, model, mesh, {}, prompt_tokens))
    closest: tuple[int, str, dict[str, Any]] | None = None
    for batches in _batches(config):
        best: tuple[float, int, str, dict[str, Any]] | None = None
        for candidate in _candidates(config, model, mesh):
            overrides = candidate | batches
            try:
                phases = _estimate(config, model, mesh, overrides, prompt_tokens)
            except ValueError:
                continue  # does not divide
            peaks = {name: _peak(phase, corrected.get(name, 1.0)) for name, phase in phases.items()}
            largest = max(peaks, key=lambda name: peaks[name])
            if closest is None or peaks[largest] < closest[0]:
                closest = peaks[largest], largest, overrides
            if peaks[largest] > room:
                continue
            seconds = step_seconds(phases, chip)
            if best is None or seconds < best[0]:
                best = seconds, peaks[largest], largest, overrides
        if best is not None:
            _, peak, largest, overrides = best
            return Found(_changes(overrides, now), peak, largest, True)
    assert closest is not None, "the config itself was estimated"
    peak, largest, overrides = closest
    return Found(_changes(overrides, now), peak, largest, False)


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


def _corrections(measured: Mapping[str, Phase], estimated: Mapping[str, Phase]) -> dict[str, float]:
    """Phase -> temporaries of its program over those of the formulas."""
    return {
        name: measured[name].memory.temporaries / phase.memory.temporaries
        for name, phase in estimated.items()
        if name in measured and phase.memory.temporaries
    }


def _peak(phase: Phase, correction: float) -> int:
    return phase.peak_bytes + round((correction - 1) * phase.memory.temporaries)


def _changes(overrides: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in overrides.items() if now[name] != value}


def _batches(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """The batches as they are, then smaller parts of a step, then smaller steps."""
    tasks, parts = config.tasks.tasks_per_step, config.train.num_minibatches
    yield {}
    if config.schedule == "fused":
        return  # one update a step
    for factor in (2, 4, 8, 16):
        if parts * factor <= tasks:
            yield {"train.num_minibatches": parts * factor}
    for factor in (2, 4, 8):
        if tasks % factor == 0:
            fewer = min(parts, tasks // factor)
            yield {"tasks.tasks_per_step": tasks // factor, "train.num_minibatches": fewer}


def _flat(config: ConfigDict, mesh: Mapping[str, int]) -> dict[str, Any]:
    """What the search may change, as it is."""
    return {
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
        "train.micro_rows": config.train.micro_rows,
        "train.remat": config.train.remat,
        "train.num_minibatches": config.train.num_minibatches,
        "rollout.max_rows": config.rollout.max_rows,
        "tasks.tasks_per_step": config.tasks.tasks_per_step,
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
        # A row is cut when it is all there is.
        per_shard = [1, 2, 4, 8, 16] if columns == 1 else [1]
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
