"""The report of a run as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_report(report: Mapping[str, Any]) -> str:
    """A table of medians and bests, and what else was measured, a line each."""
    best, share, machine = report["best"], report["roofline_share"], report["machine"]
    lines = [
        f"{report['model']}: {report['prompts']} prompts x {report['group']} samples, "
        f"{report['prompt_len']} + {report['new_tokens']} tokens, {report['dtype']}, mesh {report['mesh']} on "
        f"{machine['device']}, remat {report['remat']}, rows of {report['row_length']} ({report['fill']:.0%} full)",
        f"{'':<24}{'median':>12}{'best':>12}{'of peak':>10}",
    ]
    shown = (
        ("rollout tokens/s", "rollout_tok_s", "rollout"),
        ("trained tokens/s", "update_tok_s", "update"),
        ("rollout s", "rollout_s", "rollout"),
        ("verifiers s", "verify_s", None),
        ("reference s", "ref_s", "ref"),
        ("update s", "update_s", "update"),
        ("other (host) s", "other_s", None),
        ("step s", "step_s", "step"),
    )
    for label, key, phase in shown:
        of_peak = f"{share[phase]:.1%}" if phase else ""
        lines.append(f"{label:<24}{report[key]:>12.5g}{best[key]:>12.5g}{of_peak:>10}")
    arrays = ", ".join(f"{name} {size}" for name, size in report["peak_arrays_gib"].items())
    counts = ", ".join(f"{name} {count}" for name, count in report["compiles"].items())
    lines += [
        f"compile {report['compile_s']} s; compilations: {counts}; of small host-side operations "
        f"{report['other_compiles']}",
        f"peak arrays GiB: {arrays}; bound {report['memory_bound_gib']} "
        f"({'kept' if report['memory_bound_ok'] else 'EXCEEDED'}); peak RSS {report['peak_rss_gib']} GiB",
        f"matrix-product peak {report['matmul_peak_gflops']} GFLOP/s; other processes took "
        f"{report['foreign_cpu_share']:.0%} of the machine; load {report['loadavg']}",
    ]
    return "\n".join(lines)
