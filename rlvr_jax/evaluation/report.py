"""An evaluation as a table for people."""

from __future__ import annotations

import rich.table

from rlvr_jax.evaluation.runner import DomainResult, Evaluation, Rate


def table(evaluation: Evaluation, *, title: str | None = None) -> rich.table.Table:
    """One row a domain and, if there are several, one of their mean; a column of what could not be judged if any."""
    results = evaluation.domains
    odd = any(r.num_failed or r.num_timeout or r.num_errors for r in results.values())
    made = rich.table.Table(
        title=title,
        caption="95 % Wilson intervals; samples of one task count for less than as many tasks would",
        caption_justify="left",
    )
    headings = ["tasks", "answers", *(f"pass@{k}" for k in evaluation.ks), "length", "truncated"]
    made.add_column("domain")
    for heading in [*headings, *(["not judged"] if odd else [])]:
        made.add_column(heading, justify="right")
    for name, result in results.items():
        cells = [
            f"{result.num_tasks:,}",
            f"{result.num_samples:,}",
            *(_rate(result.pass_at[k]) for k in evaluation.ks),
            f"{result.mean_length:.1f}",
            f"{result.truncated:.1%}",
        ]
        made.add_row(name, *cells, *([_not_judged(result)] if odd else []))
    if len(results) > 1:
        made.add_section()
        made.add_row("mean", "", "", *(f"{evaluation.mean(k):.1%}" for k in evaluation.ks))
    return made


def _rate(rate: Rate) -> str:
    if not rate.num_tasks:
        return "none judged"
    return f"{rate.value:.1%} [{rate.low:.1%}, {rate.high:.1%}]".replace("[", r"\[")


def _not_judged(result: DomainResult) -> str:
    parts = {
        "failed": result.num_failed,
        "timeout": result.num_timeout,
        "error": result.num_errors,
    }
    return ", ".join(f"{count} {kind}" for kind, count in parts.items() if count) or "0"
