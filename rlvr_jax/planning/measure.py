"""Compiles the programs of a config and reads off what they need: memory, FLOPs, traffic, collectives.

Decoding unrolls its layers, so that compiling it takes time in proportion to depth. Everything in it is linear in the
number of layers; where asked, it is compiled at two shallow depths and extrapolated.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.flops import matmul_flops
from rlvr_jax.planning.programs import FUSED, PHASES, Programs, make_programs
from rlvr_jax.planning.traffic import Collective, read_traffic

SHALLOW = (2, 4)  # depths that the decode loop is extrapolated from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one program on one device, as XLA's ``memory_analysis`` has them."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Arguments, outputs that are not arguments, and temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """What one run of a phase's program needs, on one device.

    Attributes:
      memory: of the program.
      resident_bytes: of what else the run keeps on the device.
      flops: of matrix products.
      bytes: read from and written to the device's memory.
      collectives: those that move most come first.
      runs: of the program in a step.
      how: ``compiled``, ``compiled at depths 2 and 4, extrapolated``, or ``estimated``.
      compile_s: seconds it took.
    """

    memory: Memory
    resident_bytes: int
    flops: float
    bytes: float
    collectives: tuple[Collective, ...]
    runs: int
    how: str
    compile_s: float

    @property
    def peak_bytes(self) -> int:
        """All that lies on the device while the program runs."""
        return self.memory.total + self.memory.code + self.resident_bytes


class Measured(NamedTuple):
    """Phases that were compiled, and what those need, in bytes, that the compiler refused for want of memory."""

    phases: dict[str, Phase]
    refused: dict[str, int]


def measure(
    config: ConfigDict,
    model: ModelConfig,
    devices: Any,
    *,
    prompt_tokens: int,
    on_cpu: bool,
    shallow_decode: bool,
    say: Callable[[str], None],
    only: Sequence[str] = (*PHASES, FUSED),
    stop_token_ids: tuple[int, ...] = (0,),
) -> Measured:
    """Compiles the phases for the devices.

    Args:
      config: of a reinforcement learning run.
      model: shape of its model.
      devices: real ones, a topology's, or stand-ins for them.
      prompt_tokens: of the longest prompt.
      on_cpu: whether the run itself is on CPU devices.
      shallow_decode: extrapolate the rollout from two depths, if the model is deeper than twice that.
      say: told what is being compiled.
      only: these phases, of those that the config runs.
      stop_token_ids: of the tokenizer.
    """

    def programs_of(shape: ModelConfig) -> Programs:
        return make_programs(
            config,
            shape,
            devices,
            prompt_tokens=prompt_tokens,
            on_cpu=on_cpu,
            stop_token_ids=stop_token_ids,
        )

    programs = programs_of(model)
    phases: dict[str, Phase] = {}
    refused: dict[str, int] = {}
    for name in (phase for phase in programs.phases if phase in only):
        began = time.perf_counter()
        try:
            if name == "rollout" and shallow_decode and model.num_layers > 2 * SHALLOW[1]:
                low, high = (
                    _compile(programs_of(with_depth(model, depth)), name, say, f", {depth} layers")
                    for depth in SHALLOW
                )
                phase = extrapolate(low, high, model.num_layers)
            else:
                phase = _compile(programs, name, say)
        except jax.errors.JaxRuntimeError as error:
            refused[name] = needed_bytes(str(error))
            if not refused[name]:
                raise
            continue
        phases[name] = dataclasses.replace(
            phase,
            resident_bytes=programs.resident_bytes(name),
            compile_s=time.perf_counter() - began,
        )
    return Measured(phases=phases, refused=refused)


def needed_bytes(message: str) -> int:
    """What XLA says a program would need when it refuses to compile it for want of memory; 0 for another message."""
    used = re.search(r"RESOURCE_EXHAUSTED.*?Used ([\d.]+)([KMGT])i?B? of", message, re.DOTALL)
    return int(float(used[1]) * 1024 ** (1 + "KMGT".index(used[2]))) if used else 0


def with_depth(model: ModelConfig, num_layers: int) -> ModelConfig:
    """The same model with its first layers only; where some have experts, all of them do."""
    per_layer = {
        name: tuple(layer for layer in getattr(model, name) if layer < num_layers)
        for name in ("local_layers", "nope_layers")
    }
    per_layer |= {"num_dense_layers": 0, "dense_mlp_dim": 0}
    return dataclasses.replace(model, num_layers=num_layers, **per_layer)


def extrapolate(low: Phase, high: Phase, num_layers: int) -> Phase:
    """The phase at ``num_layers``, from those at the two depths of ``SHALLOW``."""
    a, b = SHALLOW

    def line(x: float, y: float) -> float:
        return max(0.0, x + (y - x) * (num_layers - a) / (b - a))

    def whole(name: str) -> int:
        return round(line(getattr(low.memory, name), getattr(high.memory, name)))

    def key(c: Collective) -> tuple[str, int, int, int]:
        return (c.kind, c.bytes, c.group_size, c.span)

    counts = [{key(c): c.count for c in phase.collectives} for phase in (low, high)]
    collectives = tuple(
        Collective(kind=k[0], bytes=k[1], group_size=k[2], span=k[3], count=count)
        for k in counts[0] | counts[1]
        if (count := line(counts[0].get(k, 0.0), counts[1].get(k, 0.0)))
    )
    return dataclasses.replace(
        high,
        memory=Memory(**{field.name: whole(field.name) for field in dataclasses.fields(Memory)}),
        flops=line(low.flops, high.flops),
        bytes=line(low.bytes, high.bytes),
        collectives=tuple(sorted(collectives, key=lambda c: -c.sent_bytes)),
        how=f"compiled at depths {a} and {b}, extrapolated",
    )


def _compile(programs: Programs, name: str, say: Callable[[str], None], which: str = "") -> Phase:
    work = programs.work
    # The first token is prefill's.
    trips = max(1, work.max_tokens - 1) if name in ("rollout", FUSED) else 1
    say(f"compiling {name}{which} for {programs.learner.mesh.size} devices")
    traced = programs.trace(name)
    compiled: Any = traced.lower().compile()
    found = compiled.memory_analysis()
    traffic = read_traffic(compiled.as_text(), while_trips=trips)
    return Phase(
        memory=Memory(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes,
            aliased=found.alias_size_in_bytes,
            temporaries=found.temp_size_in_bytes,
            code=found.generated_code_size_in_bytes,
        ),
        resident_bytes=0,
        flops=matmul_flops(traced.jaxpr.jaxpr, while_trips=trips) / programs.learner.mesh.size,
        bytes=traffic.bytes,
        collectives=traffic.collectives,
        runs={
            "rollout": work.rollout_calls,
            "reference": work.minibatches,
            "update": work.updates,
            FUSED: 1,
        }[name],
        how="compiled",
        compile_s=0.0,
    )
