"""Memory traffic and collectives of a compiled program, loops multiplied out.

``cost_analysis`` of XLA counts the body of a loop once, and has no collectives. Here every instruction counts as often
as the loops around it run. Bytes are those of one device: what each instruction reads and writes in the device's
memory, a fusion being one instruction, and a slice of a larger array being the slice.
"""

from __future__ import annotations

import dataclasses
import functools

from rlvr_jax.planning.hlo import (
    Computation,
    Instruction,
    Module,
    device_group,
    loop_part,
    loop_trips,
    parse_hlo,
    type_bytes,
)

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Names for what is there already: no traffic. What starts and ends asynchronously is counted at its start.
_FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
}
_SLICES = ("dynamic-slice", "gather", "slice")
_memory_bytes = functools.partial(type_bytes, everywhere=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
      kind: one of ``COLLECTIVES``.
      bytes: of the larger of operand and result of one of them, on one device.
      count: how often a device runs them, loops multiplied out.
      group_size: devices that take part.
      span: distance between the first and the last of them, in device ids, plus one.
    """

    kind: str
    bytes: int
    count: float
    group_size: int
    span: int

    @property
    def sent_bytes(self) -> float:
        """What a device sends for all of them, around a ring."""
        share = (self.group_size - 1) / self.group_size
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.count * self.bytes * factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one run of a program, on one device; the collectives that move most come first."""

    bytes: float
    collectives: tuple[Collective, ...]


def read_traffic(text: str, *, while_trips: int = 1) -> Traffic:
    """Adds up a module.

    Args:
      text: of ``compiled.as_text()``.
      while_trips: how often loops run whose count cannot be read from the program.
    """
    module = parse_hlo(text)
    total = 0.0
    found: dict[tuple[str, int, int, int], float] = {}
    channels: set[str | None] = set()  # of collectives inside fusions; the first is where it starts

    def meet(collective: Instruction, body: Computation, times: float) -> None:
        nonlocal total
        kind = collective.opcode.removesuffix("-start")
        key = (kind, _collective_bytes(collective, body), *device_group(collective))
        if key[2] > 1:
            found[key] = found.get(key, 0) + times
            total += times * _plain_bytes(collective, body)

    def walk(name: str, times: float) -> None:
        nonlocal total
        body = module.computations.get(name, {})
        for instruction in body.values():
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in COLLECTIVES:
                meet(instruction, body, times)
            elif opcode == "while":
                trips = loop_trips(module, instruction) or while_trips
                walk(loop_part(instruction, "body"), times * trips)
            elif opcode in ("call", "conditional", "async-start"):
                for callee in instruction.called:
                    walk(callee, times)
            elif opcode == "fusion":
                fused = _fused(instruction, module)
                for inner in fused.values():
                    if inner.opcode in COLLECTIVES and inner.channel not in channels:
                        channels.add(inner.channel)
                        meet(inner, fused, times)
                total += times * _fusion_bytes(instruction, body, fused)
            elif opcode not in _FREE and not opcode.endswith(("-done", "-update")):
                total += times * _plain_bytes(instruction, body)

    walk(module.entry, 1)
    collectives = (
        Collective(kind=kind, bytes=size, count=count, group_size=group, span=span)
        for (kind, size, group, span), count in found.items()
    )
    largest_first = sorted(collectives, key=lambda c: (-c.sent_bytes, c.kind, c.bytes))
    return Traffic(bytes=total, collectives=tuple(largest_first))


def _plain_bytes(instruction: Instruction, body: Computation) -> int:
    operands = [_memory_bytes(body[name].type) for name in instruction.operands if name in body]
    if instruction.opcode in _SLICES:
        return 2 * _memory_bytes(instruction.type)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * operands[1]  # in place
    return _memory_bytes(instruction.type) + sum(operands)


def _collective_bytes(instruction: Instruction, body: Computation) -> int:
    given = sum(type_bytes(body[name].type) for name in instruction.operands if name in body)
    result = type_bytes(instruction.type)
    if instruction.opcode.endswith("-start") and instruction.type.startswith("("):
        result -= given  # the type of an asynchronous start holds its operands too
    return max(given, result)


def _fused(instruction: Instruction, module: Module) -> Computation:
    return module.computations.get(next(iter(instruction.called), ""), {})


def _fusion_bytes(instruction: Instruction, body: Computation, fused: Computation) -> float:
    """What a fusion reads of each operand, and what it writes."""
    total = 0.0
    for index, name in enumerate(instruction.operands):
        whole = _memory_bytes(body[name].type) if name in body else 0
        total += min(whole, _read_of_operand(fused, index, whole))
    root = next((i for i in fused.values() if i.is_root), instruction)
    parts = [fused[n] for n in root.operands if n in fused] if root.opcode == "tuple" else [root]
    return total + sum(_written(part, fused) for part in parts)


def _read_of_operand(fused: Computation, index: int, whole: int) -> int:
    """Bytes read of a fusion's operand, which may be slices of it only, or nothing where it is passed on."""
    names = {
        i.name
        for i in fused.values()
        if i.opcode == "parameter" and i.attributes.startswith(f"({index})")
    }
    read = 0
    for user in fused.values():  # users come after what they use
        if not names.intersection(user.operands):
            continue
        if user.opcode in _SLICES and user.operands[0] in names:
            read += type_bytes(user.type)
        elif user.opcode == "bitcast":
            names.add(user.name)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] in names:
            pass  # written in place
        elif user.opcode in COLLECTIVES or (user.opcode == "tuple" and user.is_root):
            pass  # a collective is counted by itself
        else:
            return whole
    return read


def _written(root: Instruction, fused: Computation) -> int:
    """Bytes a fusion writes for one of its results: of an update in place, the update."""
    if root.opcode == "parameter" or root.opcode in COLLECTIVES:
        return 0
    source = root
    while source.opcode in ("bitcast", "copy", "convert") and source.operands[0] in fused:
        source = fused[source.operands[0]]
    if source.opcode == "dynamic-update-slice" and source.operands[1] in fused:
        return type_bytes(fused[source.operands[1]].type)
    return _memory_bytes(root.type)
