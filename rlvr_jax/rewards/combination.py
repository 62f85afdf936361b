"""What a step's verdicts come to, verifier by verifier. The weighted sum itself is ``Trajectory.score``."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rlvr_jax.types import Reward


def reward_metrics(rewards: Iterable[Reward]) -> dict[str, float]:
    """Returns metrics of all verdicts, by the name of the reward.

    Args:
      rewards: of any number of trajectories, in any order.

    Returns:
      For each name: ``reward/<name>/mean_all`` (a verdict that is missing counts as 0; denominator: all),
      ``reward/<name>/mean_effective`` (denominator: the verdicts that were given; NaN if none was),
      ``reward/<name>/failed`` and ``reward/<name>/timeout`` (counts). Values are unweighted.
    """
    by_name: dict[str, list[Reward]] = {}
    for reward in rewards:
        by_name.setdefault(reward.name, []).append(reward)
    metrics: dict[str, float] = {}
    for name, given in by_name.items():
        values = [reward.value for reward in given if reward.status == "ok"]
        total = math.fsum(values)
        metrics[f"reward/{name}/mean_all"] = total / len(given)
        metrics[f"reward/{name}/mean_effective"] = total / len(values) if values else math.nan
        for status in ("failed", "timeout"):
            metrics[f"reward/{name}/{status}"] = float(sum(r.status == status for r in given))
    return metrics
