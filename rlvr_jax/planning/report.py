"""A plan as a table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rlvr_jax.planning.chips import CHIPS
from rlvr_jax.planning.plan import USABLE, Plan, by_kind, limit

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def show(plan: Plan, console: Console) -> None:
    """Prints the plan: one row a phase, then the verdict and the notes."""
    title = f"rlvr plan: {plan.model}, {count(plan.num_params)} parameters, on {plan.topology}"
    table = Table(title=title, title_justify="left")
    table.add_column("per device, in one step")
    for name in plan.phases:
        table.add_column(name, justify="right")
    for label, values in _rows(plan):
        table.add_row(label, *values)
    console.print(table)
    for line in _verdict(plan):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rows(plan: Plan) -> list[tuple[str, list[str]]]:
    phases = list(plan.phases.values())
    chip = CHIPS[plan.chip] if plan.chip else None
    rows = [
        ("runs of the program", [str(p.runs) for p in phases]),
        ("memory of the program", [size(p.memory.total) for p in phases]),
        ("  of that, temporaries", [size(p.memory.temporaries) for p in phases]),
        ("beside it on the device", [size(p.resident_bytes) for p in phases]),
        ("peak", [size(p.peak_bytes) for p in phases]),
        ("FLOPs of matmuls", [f"{p.runs * p.flops:.3g}" for p in phases]),
        ("memory traffic", [size(p.runs * p.bytes) for p in phases]),
    ]
    kinds = sorted({kind for p in phases for kind in by_kind(p.collectives)})
    for kind in kinds:
        sent = [by_kind(p.collectives).get(kind, 0.0) * p.runs for p in phases]
        rows.append((f"{kind}, sent", [size(x) if x else "" for x in sent]))
    if any(p.collectives for p in phases):
        largest = [
            max(p.collectives, key=lambda c: c.bytes) if p.collectives else None for p in phases
        ]
        rows.append(
            ("largest collective", [f"{c.kind} {size(c.bytes)}" if c else "" for c in largest])
        )
    if chip:
        rows.append(("roofline", [duration(plan.seconds(name)) for name in plan.phases]))
        rows.append(("  set by", [limit(p, chip) for p in phases]))
    rows.append(("figures", [p.how for p in phases]))
    return rows


def _verdict(plan: Plan) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in plan.assumptions.items())]
    peak = size(plan.peak_bytes)
    if plan.memory_bytes is None:
        lines.append(f"peak {peak} a device; the memory of this device is not known")
    else:
        verdict = "fits" if plan.fits else "DOES NOT FIT"
        lines.append(
            f"{verdict}: peak {peak} of {size(plan.memory_bytes)} a device "
            f"({plan.peak_bytes / plan.memory_bytes:.0%}; up to {USABLE:.0%} is usable)"
        )
    step = plan.step_seconds
    if step and plan.chip:
        lines.append(
            f"at best {duration(step)} a step, {plan.sampled_tokens / step:,.0f} sampled tokens/s, "
            f"{step * 1000 / 3600:.3g} hours per 1000 steps (peak figures: {CHIPS[plan.chip].source})"
        )
    elif plan.chip is None:
        lines.append("no roofline: this device is not in the table of published figures")
    lines += [f"note: {note}" for note in plan.notes]
    lines += [f"try: {suggestion}" for suggestion in plan.suggestions]
    return lines


def size(num_bytes: float) -> str:
    """12.3 GiB."""
    power = 0
    while abs(num_bytes) >= 1024 and power < len(_BYTES) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return (
        f"{num_bytes:.3g} {_BYTES[power]}"
        if num_bytes < 1000
        else f"{num_bytes:.0f} {_BYTES[power]}"
    )


def count(number: float) -> str:
    """8.19 B, 135 M."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def duration(seconds: float | None) -> str:
    """1.23 s, or 45.6 ms."""
    if seconds is None:
        return ""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
