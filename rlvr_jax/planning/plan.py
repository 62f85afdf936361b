"""The plan of a run: what each phase needs, whether it fits, and how long a step takes at the very least.

Seconds are the roofline's: the longest of arithmetic, memory traffic and communication at published peak figures,
perfectly overlapped. No run is faster; a good one reaches about half of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlvr_jax.planning.chips import CHIPS, Chip
from rlvr_jax.planning.measure import Phase
from rlvr_jax.planning.traffic import Collective

USABLE = 0.95  # of a device's memory; the rest is the runtime's, and lost between buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known of a run before it starts.

    Attributes:
      topology, num_devices: of the plan.
      chip: a name of ``CHIPS``; None for a device that is not in the table, which has no roofline.
      memory_bytes: of one device; None when unknown.
      model: name or path, parameters and where the shape was read.
      num_params: of the model.
      assumptions: prompt and response tokens, mesh, dtype and so on, by name.
      phases: by name, in the order they run.
      sampled_tokens: of a step.
      notes: on what is compiled and what is estimated.
      suggestions: overrides that would make it fit, or faster, each with what it brings.
    """

    topology: str
    num_devices: int
    chip: str | None
    memory_bytes: int | None
    model: str
    num_params: int
    assumptions: dict[str, Any]
    phases: dict[str, Phase]
    sampled_tokens: int
    notes: tuple[str, ...]
    suggestions: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most that lies on a device at once."""
        return max(phase.peak_bytes for phase in self.phases.values())

    @property
    def fits(self) -> bool | None:
        """Whether that is within ``USABLE`` of the device's memory; None when its size is unknown."""
        if self.memory_bytes is None:
            return None
        return self.peak_bytes <= USABLE * self.memory_bytes

    @property
    def compiled(self) -> bool:
        """Whether a compiler has seen every phase; else figures are estimated from the shapes."""
        return all(phase.how.startswith(("compiled", "refused")) for phase in self.phases.values())

    def seconds(self, name: str) -> float | None:
        """Of a phase in one step."""
        if self.chip is None:
            return None
        phase = self.phases[name]
        return phase.runs * max(roofline(phase, CHIPS[self.chip]).values())

    @property
    def step_seconds(self) -> float | None:
        """Of all phases, one after another."""
        if self.chip is None:
            return None
        return sum(self.seconds(name) or 0.0 for name in self.phases)

    def to_json(self) -> dict[str, Any]:
        """Plain values; figures of a phase are those of one device, in one step, its memory apart."""
        step = self.step_seconds
        return {
            "topology": self.topology,
            "num_devices": self.num_devices,
            "chip": self.chip,
            "fits": self.fits,
            "compiled": self.compiled,
            "device_memory_bytes": self.memory_bytes,
            "peak_bytes": self.peak_bytes,
            "model": self.model,
            "num_params": self.num_params,
            "assumptions": self.assumptions,
            "phases": {name: self._phase_json(name) for name in self.phases},
            "step_seconds": step,
            "sampled_tokens": self.sampled_tokens,
            "tokens_per_s": self.sampled_tokens / step if step else None,
            "hours_per_1000_steps": step * 1000 / 3600 if step else None,
            "notes": list(self.notes),
            "suggestions": list(self.suggestions),
        }

    def _phase_json(self, name: str) -> dict[str, Any]:
        phase = self.phases[name]
        return {
            "memory_bytes": phase.memory.total,
            "memory": dataclasses.asdict(phase.memory),
            "resident_bytes": phase.resident_bytes,
            "peak_bytes": phase.peak_bytes,
            "runs": phase.runs,
            "flops": phase.runs * phase.flops,
            "bytes": phase.runs * phase.bytes,
            "collectives": [
                dataclasses.asdict(c) | {"count": phase.runs * c.count} for c in phase.collectives
            ],
            "collective_bytes": {
                kind: phase.runs * size for kind, size in by_kind(phase.collectives).items()
            },
            "seconds": self.seconds(name),
            "limited_by": limit(phase, CHIPS[self.chip]) if self.chip else None,
            "how": phase.how,
            "compile_s": round(phase.compile_s, 1),
        }


def roofline(phase: Phase, chip: Chip) -> dict[str, float]:
    """Seconds of one run of a phase by what takes them, at published peak figures."""
    links = network = 0.0
    for collective in phase.collectives:
        if chip.node_chips and collective.span > chip.node_chips:
            network += collective.sent_bytes
        else:
            links += collective.sent_bytes
    return {
        "arithmetic": phase.flops / chip.bf16_flops,
        "memory": phase.bytes / chip.memory_bytes_per_s,
        "communication": links / chip.link_bytes_per_s
        + (network / chip.network_bytes_per_s if network else 0.0),
    }


def limit(phase: Phase, chip: Chip) -> str:
    """What takes longest."""
    seconds = roofline(phase, chip)
    return max(seconds, key=lambda name: seconds[name])


def by_kind(collectives: tuple[Collective, ...]) -> dict[str, float]:
    """Bytes that a device sends in one run, by kind."""
    total: dict[str, float] = {}
    for collective in collectives:
        total[collective.kind] = total.get(collective.kind, 0.0) + collective.sent_bytes
    return total
