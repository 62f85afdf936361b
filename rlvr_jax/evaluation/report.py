"""An evaluation as a table for people."""

from __future__ import annotations

import rich.box
import rich.table
import rich.text

from rlvr_jax.evaluation.runner import DomainResult, Evaluation, Rate


def table(evaluation: Evaluation, *, title: str | None = None) -> rich.table.Table:
    """One row a domain and, if there are several, one of their mean; a column of what could not be judged if any."""
    results = evaluation.domains
    odd = any(r.num_failed or r.num_timeout or r.num_errors for r in results.values())
    made = rich.table.Table(
        title=title,
        caption="pass@k in % with 95 % Wilson intervals, for samples clustered by task",
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("domain", no_wrap=True)
    headings = ["tasks", "answers", *(f"pass@{k}" for k in evaluation.ks), "tokens", "truncated"]
    for heading in [*headings, *(["not judged"] if odd else [])]:
        made.add_column(heading, justify="right", no_wrap=True)
    for name, result in results.items():
        cells = [
            f"{result.num_tasks:,}",
            f"{result.num_samples:,}",
            *(_rate(result.pass_at[k]) for k in evaluation.ks),
            f"{result.mean_length:.1f}",
            f"{result.truncated:.0%}",
            *([_not_judged(result)] if odd else []),
        ]
        made.add_row(*(rich.text.Text(cell) for cell in (name, *cells)))
    if len(results) > 1:
        made.add_section()
        made.add_row("mean", "", "", *(f"{100 * evaluation.mean(k):.1f}" for k in evaluation.ks))
    return made


def _rate(rate: Rate) -> str:
    if not rate.num_tasks:
        return "none judged"
    value, low, high = (100 * x for x in (rate.value, rate.low, rate.high))
    return f"{value:.1f} [{low:.0f}, {high:.0f}]"


def _not_judged(result: DomainResult) -> str:
    counts = {
        "failed": result.num_failed,
        "timeout": result.num_timeout,
        "error": result.num_errors,
    }
    return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count) or "0"
