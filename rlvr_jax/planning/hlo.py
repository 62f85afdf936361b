"""The text of a compiled XLA module, taken apart: computations, instructions, sizes, loop counts, device groups."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2}
_BYTES |= {"f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r"|f8\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; ``attributes`` is all that follows the opcode, arguments included."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def called(self) -> list[str]:
        """Computations that it runs once, all branches of a conditional among them."""
        if listed := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            return re.findall(r"[\w.\-]+", listed[1])
        return _CALLED.findall(self.attributes)

    @property
    def channel(self) -> str | None:
        """Identifies a collective that XLA:TPU has spread over several fusions."""
        match = re.search(r"channel_id=(\d+)", self.attributes)
        return match[1] if match else None


Computation = dict[str, Instruction]  # by name, in order


@dataclasses.dataclass(frozen=True)
class Module:
    """All computations by name, and which is the program's entry."""

    computations: dict[str, Computation]
    entry: str


def parse_hlo(text: str) -> Module:
    """Reads ``compiled.as_text()``."""
    computations: dict[str, Computation] = {}
    body: Computation = {}
    entry = ""
    for line in text.splitlines():
        if line.endswith("{") and (header := re.match(r"(ENTRY )?%?([\w.\-]+) \(", line)):
            body = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
        elif match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line):
            rest = line[match.end() :]
            end = _closing(rest) if rest.startswith("(") else rest.index(" ")
            if call := re.match(r"\s*([\w\-]+)\(", rest[end:]):
                start = end + call.end() - 1
                operands = re.findall(r"%([\w.\-]+)", rest[start : start + _closing(rest[start:])])
                body[match[2]] = Instruction(
                    match[2], rest[:end], call[1], tuple(operands), rest[start:], bool(match[1])
                )
    return Module(computations, entry)


def _closing(text: str) -> int:
    """Where the bracket that ``text`` begins with is closed, one past it."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return index + 1
    return len(text)


@functools.lru_cache(maxsize=1 << 16)
def type_bytes(type_text: str, *, everywhere: bool = True) -> int:
    """Bytes of a type, tuples added up; without ``everywhere`` only of what lies in the device's main memory."""
    total = 0.0
    for dtype, dims, layout in _ARRAY.findall(type_text):
        if everywhere or "S(" not in layout:  # S(1): on-chip memory of a TPU
            total += _BYTES.get(dtype, 1) * math.prod(int(n) for n in dims.split(",") if n)
    return int(total)


def loop_trips(module: Module, loop: Instruction) -> int | None:
    """How often a ``while`` runs: as XLA says, or the one constant that its condition compares with; else None."""
    known = re.search(r"known_trip_count\D+(\d+)", loop.attributes)
    if known:
        return int(known[1])
    condition = module.computations.get(loop_part(loop, "condition"), {})
    names = [name for line in condition.values() for name in line.called]
    bounds = set()
    for lines in [condition, *(module.computations.get(name, {}) for name in names)]:
        for line in lines.values():
            constant = re.match(r"\((\d+)\)", line.attributes)
            if line.opcode == "constant" and line.type.startswith(("s32[]", "u32[]")) and constant:
                bounds.add(int(constant[1]))
    bounds.discard(0)
    return bounds.pop() if len(bounds) == 1 else None


def loop_part(loop: Instruction, part: str) -> str:
    """The name of a loop's ``body`` or ``condition``."""
    match = re.search(part + r"=%?([\w.\-]+)", loop.attributes)
    assert match is not None
    return match[1]


def device_group(collective: Instruction) -> tuple[int, int]:
    """(how many devices of a group take part, distance between their first and last id plus one)."""
    text = collective.attributes
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", text):
        ids = [tuple(map(int, pair)) for pair in re.findall(r"(\d+),(\d+)", pairs[1])]
        return 2, max((abs(a - b) for a, b in ids), default=0) + 1
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text):
        sizes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])]
        used = re.findall(r"'([^']+)'", mesh[2])
        strides = {n: math.prod(s for _, s in sizes[i + 1 :]) for i, (n, _) in enumerate(sizes)}
        span = sum((size - 1) * strides[name] for name, size in sizes if name in used)
        return math.prod(size for name, size in sizes if name in used), span + 1
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        ids = [int(n) for n in groups[1].split(",")]
        return len(ids), max(ids) - min(ids) + 1
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        dims = [int(n) for n in iota[3].split(",")]
        order = [int(n) for n in iota[4].split(",")] if iota[4] else list(range(len(dims)))
        ids = np.arange(math.prod(dims)).reshape(dims).transpose(order)
        first = ids.reshape(int(iota[1]), int(iota[2]))[0]
        return len(first), int(first.max() - first.min()) + 1
    return 1, 1
