"""The reports of the benchmarks as text."""

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


def format_updates(report: Mapping[str, Any]) -> str:
    """A table of the updates of ``benchmarks.train``: ours, and how many times ours the peers take."""
    machine = report["machine"]
    lines = [
        f"{report['model']}, {report['dtype']}, mesh {report['mesh']} on {machine['device']}, remat {report['remat']}; "
        f"peak {report['peak_gflops']:,.0f} GFLOP/s ({report['peak_of']})",
        f"{'':<24}{'tokens/s':>12}{'median s':>12}{'best s':>12}{'times ours':>12}{'of peak':>10}",
    ]
    for name, update in report["updates"].items():
        ours = {"peer": "rlvr_jax", **update, "times_ours": 1.0}
        for row in (ours, *update["peers"]):
            label = f"{name} {row['peer']}"
            if "error" in row:
                lines.append(f"{label:<24}{row['error']}")
                continue
            share = update["flops"] / row["step_s"] / report["peak_gflops"] / 1e9
            lines.append(
                f"{label:<24}{row['tok_s']:>12,.1f}{row['step_s']:>12.4g}{row['best_s']:>12.4g}"
                f"{row['times_ours']:>12.2f}{share:>10.1%}"
            )
        lines.append(
            f"  {update['tokens']} tokens, rows {update['fill']:.0%} full; compile {update['compile_s']} s; "
            f"peak arrays {update['peak_arrays_gib']} GiB; other processes took {update['foreign_cpu_share']:.0%} "
            "of the machine"
        )
    return "\n".join(lines)


def format_packing(report: Mapping[str, Any]) -> str:
    """Packed against padded rows."""
    lines = [
        f"{report['model']}, {report['dtype']}: fine-tuning on {report['rows']} rows of {report['length']} tokens, "
        f"conversations that leave {report['padding']:.0%} of a row empty",
        f"{'':<12}{'real tokens/s':>16}{'median s':>12}{'full':>8}",
    ]
    for name in ("packed", "padded"):
        kind = report[name]
        lines.append(
            f"{name:<12}{kind['tok_s']:>16,.1f}{kind['step_s']:>12.4g}{kind['fill']:>8.0%}"
        )
    lines.append(
        f"packed is {report['speedup']:.2f} times as fast; packing a batch takes the host {report['pack_s']} s"
    )
    return "\n".join(lines)


def format_startup(report: Mapping[str, Any]) -> str:
    """First and second runs."""
    lines = [f"{'':<12}{'first s':>10}{'second s':>10}{'ratio':>8}{'cache':>12}"]
    for name in ("sft", "train"):
        run = report[name]
        lines.append(
            f"rlvr {name:<7}{run['first_s']:>10.1f}{run['second_s']:>10.1f}{run['speedup']:>8.2f}"
            f"{run['cache_mib']:>8.1f} MiB"
        )
    return "\n".join(lines)
