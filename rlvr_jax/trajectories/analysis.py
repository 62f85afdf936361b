"""What a report says about groups: how often, how long, and how sure. Every rate states its denominator."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rlvr_jax.types import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRate:
    """How many trajectories passed, of those that could be judged and of all."""

    num_passed: int
    num_scored: int
    num_total: int

    @property
    def rate(self) -> float:
        """Passed / scored; NaN when none could be judged."""
        return self.num_passed / self.num_scored if self.num_scored else math.nan

    @property
    def rate_of_all(self) -> float:
        """Passed / all: what could not be judged counts as not passed."""
        return self.num_passed / self.num_total if self.num_total else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of ``rate``."""
        return wilson_interval(self.num_passed, self.num_scored)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResponseLengths:
    """Sampled tokens a trajectory (all turns together); ``truncated`` is the share that ran out of tokens."""

    mean: float
    median: float
    p95: float
    max: int
    truncated: float


def _domain(group: Group) -> str:
    return group.task.domain


def pass_rates(
    groups: Iterable[Group], *, by: Callable[[Group], Any] = _domain, threshold: float = 0.999
) -> dict[Any, PassRate]:
    """Pass rates by domain, or by whatever ``by`` returns (``lambda group: group.step``), sorted by it.

    Args:
      groups: any; a trajectory passes when its score is at least ``threshold``.
      by: what to tell apart; its values must sort.
      threshold: partial credit below it is not a pass.
    """
    scores: dict[Any, list[np.ndarray]] = collections.defaultdict(list)
    for group in groups:
        scores[by(group)].append(group.scores)
    rates: dict[Any, PassRate] = {}
    for key in sorted(scores):
        all_scores = np.concatenate(scores[key])
        rates[key] = PassRate(
            num_passed=int(np.sum(all_scores >= threshold)),  # NaN, not judged, is not
            num_scored=int(np.sum(~np.isnan(all_scores))),
            num_total=len(all_scores),
        )
    return rates


def response_lengths(groups: Iterable[Group]) -> ResponseLengths:
    """Raises ValueError when there is no trajectory to measure."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise ValueError("response_lengths got no trajectories; expected at least one")
    lengths = np.array([t.response_mask.sum() for t in trajectories])
    return ResponseLengths(
        mean=float(lengths.mean()),
        median=float(np.median(lengths)),
        p95=float(np.percentile(lengths, 95)),
        max=int(lengths.max()),
        truncated=sum(t.stop_reason == "length" for t in trajectories) / len(trajectories),
    )


def reward_status_counts(groups: Iterable[Group]) -> dict[str, dict[str, int]]:
    """Verifier name -> status -> verdicts; trajectories that ended in an error count under ``trajectory``/``error``."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.error is not None:
                counts["trajectory"]["error"] += 1
            for reward in trajectory.rewards:
                counts[reward.name][reward.status] += 1
    return {name: dict(by_status) for name, by_status in sorted(counts.items())}


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples is correct, from n drawn of which c were: 1 - C(n-c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (https://arxiv.org/abs/2107.03374), in exact integers.

    Raises:
      ValueError: not 0 <= c <= n or not 1 <= k <= n.
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass_at_k got n={num_samples}, c={num_correct}, k={k}; expected 0 <= c <= n and 1 <= k <= n; "
            "draw at least k samples a task"
        )
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def wilson_interval(successes: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson score interval of a rate: (low, high), (0, 1) when n is 0.

    With p = successes / n and z the normal quantile:
    (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    """
    if not (0 <= successes <= n and 0 < confidence < 1):
        raise ValueError(
            f"wilson_interval got successes={successes}, n={n}, confidence={confidence}; "
            "expected 0 <= successes <= n and 0 < confidence < 1"
        )
    if n == 0:
        return (0.0, 1.0)
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    margin = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return (max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale))
