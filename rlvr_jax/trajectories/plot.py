"""One picture of a run: training reward, held-out pass rates before and after (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlvr_jax.errors import require
from rlvr_jax.trajectories.analysis import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GREY, _BLUE, _LIGHT_BLUE = "#9aa0a6", "#1a73e8", "#aecbfa"


def plot_curve(
    path: str | os.PathLike[str],
    *,
    steps: Sequence[int],
    rewards: Sequence[float],
    domains: Mapping[str, Mapping[str, float]],
    window: int = 10,
    title: str = "",
) -> None:
    """Writes a PNG: left the reward of each step, raw and smoothed; right, bars for each domain.

    Args:
      path: where the PNG goes; it replaces what is there.
      steps: the steps, ascending.
      rewards: mean reward of each step; NaN where nothing could be scored.
      domains: name -> ``before``, ``after`` (pass rates in [0, 1]) and ``n`` (responses judged), as
        in ``summary.json``; drawn with 95 % Wilson intervals. Without any, only the reward is drawn.
      window: the smoothed reward is the mean of the last ``window`` steps, as far as they have one.
      title: of the whole picture.

    Raises:
      MissingExtraError: matplotlib is not installed.
      ValueError: steps and rewards differ in number, or ``window`` is not positive.
    """
    if len(steps) != len(rewards) or window < 1:
        raise ValueError(
            f"plot_curve got {len(steps)} steps, {len(rewards)} rewards, window {window}; "
            "expected as many rewards as steps and a window of at least 1"
        )
    require("matplotlib", "plot")
    # A canvas of its own, not pyplot: no display, no global backend, nothing to close.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = 6.0 + (max(4.0, 1.0 + 1.1 * len(domains)) if domains else 0.0)
    figure = Figure(figsize=(width, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title)
    ratios = [6.0, width - 6.0] if domains else [1.0]
    [axes] = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)
    _draw_rewards(axes[0], steps, np.asarray(rewards, np.float64), window)
    if domains:
        _draw_domains(axes[1], domains)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _draw_rewards(axes: Axes, steps: Sequence[int], rewards: np.ndarray, window: int) -> None:
    from matplotlib.ticker import MaxNLocator

    smooth = _trailing_mean(rewards, window)
    axes.plot(steps, rewards, ".-", color=_LIGHT_BLUE, linewidth=1, markersize=4, label="each step")
    axes.plot(steps, smooth, color=_BLUE, linewidth=2, label=f"mean of the last {window}")
    axes.set(title="Training reward", xlabel="step", ylabel="mean reward of scored responses")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="best")


def _draw_domains(axes: Axes, domains: Mapping[str, Mapping[str, float]]) -> None:
    places = np.arange(len(domains))
    for key, color, shift in (("before", _GREY, -0.2), ("after", _BLUE, 0.2)):
        rates = np.array([domain[key] for domain in domains.values()])
        counts = [int(domain["n"]) for domain in domains.values()]
        low, high = np.array(
            [wilson_interval(p * n, n) for p, n in zip(rates, counts, strict=True)]
        ).T
        errors = np.maximum(0.0, [rates - low, high - rates])
        bar = {"color": color, "label": key, "error_kw": {"alpha": 0.5, "capsize": 2}}
        axes.bar(places + shift, rates, 0.38, yerr=errors, **bar)
        for place, rate, top in zip(places + shift, rates, high, strict=True):
            axes.text(place, top + 0.01, f"{rate:.0%}", ha="center", va="bottom", fontsize=8)
    axes.set(title="Held-out pass rate", ylim=(0, 1.22), yticks=np.linspace(0, 1, 6))
    slant = {"rotation": 30, "ha": "right"} if max(map(len, domains)) > 9 else {}
    axes.set_xticks(places, list(domains), **slant)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend(frameon=False, loc="upper left", ncols=2)


def _trailing_mean(values: np.ndarray, window: int) -> list[float]:
    """Mean of the last ``window`` entries up to each one, NaNs left out; NaN where all are."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        recent = values[max(0, end - window) : end]
        recent = recent[~np.isnan(recent)]
        means.append(float(recent.mean()) if recent.size else float("nan"))
    return means
