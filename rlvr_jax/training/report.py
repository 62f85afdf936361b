"""What a run comes to: the held-out table, ``summary.json`` and the curve."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.console
import rich.table

from rlvr_jax.errors import MissingExtraError
from rlvr_jax.trajectories.analysis import pass_rates
from rlvr_jax.trajectories.plot import plot_curve
from rlvr_jax.types import Group

SUMMARY_FILE = "summary.json"


def write_report(
    workdir: Path,
    *,
    before: Sequence[Group],
    after: Sequence[Group],
    metrics: Sequence[Mapping[str, Any]],
    seconds: float,
    steps: int,
    seed: int,
    device: str,
    model: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Writes ``summary.json`` and ``curve.png`` and says the table.

    Args:
      before, after: answers to the same held-out tasks, before the first and after the last update.
      metrics: the records of the run, for the curve.
      seconds: of training and both evaluations, over all parts of a resumed run.
      say: prints a line or more.

    Returns:
      ``domains`` (name -> before, after, n), ``mean_before``, ``mean_after`` (over domains), ``seconds``, ``steps``,
      ``seed``, ``device``, ``model``. Pass rates are passed / judged, None where nothing could be judged; n is the
      number of judged answers after training.
    """
    old, new = pass_rates(before), pass_rates(after)
    domains = {
        name: {
            "before": _number(old[name].rate),
            "after": _number(new[name].rate),
            "n": new[name].num_scored,
        }
        for name in old
    }
    summary = {
        "domains": domains,
        "mean_before": _mean([row["before"] for row in domains.values()]),
        "mean_after": _mean([row["after"] for row in domains.values()]),
        "seconds": seconds,
        "steps": steps,
        "seed": seed,
        "device": device,
        "model": model,
    }
    partial = workdir / "summary.partial"
    partial.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    partial.replace(workdir / SUMMARY_FILE)
    say(_table(summary))
    rewards = [record for record in metrics if "reward/mean" in record]
    try:
        plot_curve(
            workdir / "curve.png",
            steps=[record["step"] for record in rewards],
            rewards=[record["reward/mean"] for record in rewards],
            domains={
                name: row for name, row in domains.items() if None not in row.values() and row["n"]
            },
            title=f"{model}, seed {seed}",
        )
    except MissingExtraError as error:
        say(f"no curve.png: {error}")
    say(f"everything is in {workdir}: summary.json, curve.png, checkpoints, trajectories, held_out")
    return summary


def read_summary(workdir: Path) -> dict[str, Any] | None:
    """What ``write_report`` wrote, or None."""
    file = workdir / SUMMARY_FILE
    return json.loads(file.read_text()) if file.exists() else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _mean(values: Sequence[float | None]) -> float | None:
    """Of all domains, or None: a mean over those that could be judged would be another figure."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _table(summary: Mapping[str, Any]) -> str:
    table = rich.table.Table(title="held-out pass rate, same sampling settings")
    for heading in ("domain", "before", "after", "gain", "answers"):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for name, row in summary["domains"].items():
        table.add_row(name, *_cells(row["before"], row["after"]), str(row["n"]))
    table.add_section()
    table.add_row("mean", *_cells(summary["mean_before"], summary["mean_after"]), "")
    console = rich.console.Console(file=io.StringIO(), width=90, force_jupyter=False)
    console.print(table)
    minutes = summary["seconds"] / 60
    console.print(f"{summary['steps']} steps in {minutes:.1f} minutes on {summary['device']}")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def _cells(before: float | None, after: float | None) -> tuple[str, str, str]:
    if before is None or after is None:
        first, second = ("-" if rate is None else f"{rate:.1%}" for rate in (before, after))
        return first, second, "-"
    return f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points"
