"""How good a policy is on tasks it can be checked on: pass@k with intervals, lengths, and what could not be judged.

``evaluate`` has tasks answered by whatever it is given (the engine, a remote server, a fake, behind a ``Rollout``) and
``measure`` turns the answers into figures, which can be done again later from groups on disk. A task is the unit:
pass@k is the mean over tasks of the unbiased estimate, and the intervals know that samples of one task are not
independent of each other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rlvr_jax.tasks.registry import DOMAINS, expand_domains
from rlvr_jax.tasks.splits import held_out_tasks
from rlvr_jax.trajectories.analysis import (
    pass_at_k,
    response_lengths,
    reward_status_counts,
    wilson_interval,
)
from rlvr_jax.types import Group, Task

PASS_SCORE = 0.999  # a trajectory passes from this score on; partial credit is not a pass


class Rollout(Protocol):
    """Has tasks answered and judged: ``envs.single_turn.run_groups`` with everything but these arguments bound."""

    def __call__(self, tasks: Sequence[Task], *, group_size: int, step: int) -> list[Group]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """An estimate of pass@k.

    Attributes:
      value: mean over the tasks with at least k judged answers; NaN when there are none.
      low, high: 95 % interval.
      num_tasks: how many tasks those are.
    """

    value: float
    low: float
    high: float
    num_tasks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DomainResult:
    """Figures of one domain.

    Attributes:
      pass_at: k -> pass@k.
      num_tasks, num_samples: tasks, and answers to all of them together.
      num_failed, num_timeout: verdicts that were none; the answers count in no rate.
      num_errors: answers that ended in an error of the environment.
      mean_length: sampled tokens an answer.
      truncated: share of the answers that ran out of tokens.
    """

    pass_at: Mapping[int, Rate]
    num_tasks: int
    num_samples: int
    num_failed: int
    num_timeout: int
    num_errors: int
    mean_length: float
    truncated: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What an evaluation found.

    Attributes:
      domains: name -> figures.
      groups: the answers, as they were judged.
    """

    domains: Mapping[str, DomainResult]
    groups: tuple[Group, ...]

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of every pass@k."""
        return tuple(next(iter(self.domains.values())).pass_at)

    def mean(self, k: int) -> float:
        """pass@k averaged over domains, each counting the same; NaN when one could not be judged at all."""
        return float(np.mean([result.pass_at[k].value for result in self.domains.values()]))

    def to_json(self) -> dict[str, Any]:
        """Plain values; pass@k under ``pass@<k>`` with ``low``, ``high`` and ``num_tasks``; NaN as None."""
        return {
            "domains": {
                name: {
                    **{f"pass@{k}": _plain(rate) for k, rate in result.pass_at.items()},
                    **{key: value for key, value in _plain(result).items() if key != "pass_at"},
                }
                for name, result in self.domains.items()
            },
            "mean": {f"pass@{k}": _number(self.mean(k)) for k in self.ks},
        }


def select_tasks(
    domains: str | Sequence[str],
    num_tasks: int,
    *,
    seed: int,
    levels: Sequence[int] | None = None,
    max_levels: int | None = None,
) -> list[Task]:
    """Held-out tasks: disjoint from everything the curriculum draws, the same for the same arguments.

    Args:
      domains: names of domains, prefixes and groups.
      num_tasks: of each domain, spread evenly over its levels.
      seed: another seed gives another choice.
      levels: only these; all by default.
      max_levels: without ``levels``: no more than the first so many of a domain, as of ``Curriculum``.

    Raises:
      ValueError: no such domain or level, or fewer distinct tasks than asked for.
    """
    tasks: list[Task] = []
    for name in expand_domains(domains):
        domain = DOMAINS.get(name)
        capped = range(min(domain.num_levels, max_levels or domain.num_levels))
        chosen = capped if levels is None else levels
        for level in chosen:
            domain.check_level(level)
        tasks += held_out_tasks(name, num_tasks, seed, chosen)
    return tasks


def evaluate(
    tasks: Sequence[Task],
    rollout: Rollout,
    *,
    num_samples: int,
    ks: Sequence[int] = (1,),
    step: int = 0,
) -> Evaluation:
    """Has every task answered ``num_samples`` times, and measures the answers.

    Args:
      tasks: of any domains.
      rollout: answers and judges.
      num_samples: answers a task.
      ks: the k of every pass@k, each at most ``num_samples``.
      step: of training that the policy has come to; it is part of the sampling keys.

    Raises:
      ValueError: no tasks, or a k that the samples do not suffice for.
    """
    if not tasks:
        raise ValueError("there are no tasks to evaluate on; expected at least one")
    check_ks(ks, num_samples)
    return measure(rollout(tasks, group_size=num_samples, step=step), ks=ks)


def measure(groups: Sequence[Group], *, ks: Sequence[int] = (1,)) -> Evaluation:
    """Figures of answers that were judged already, by domain, in the order of first appearance."""
    by_domain: dict[str, list[Group]] = {}
    for group in groups:
        by_domain.setdefault(group.task.domain, []).append(group)
    return Evaluation(
        groups=tuple(groups),
        domains={name: _measure_domain(members, ks) for name, members in by_domain.items()},
    )


def _measure_domain(groups: Sequence[Group], ks: Sequence[int]) -> DomainResult:
    lengths = response_lengths(groups)
    counts = reward_status_counts(groups)
    return DomainResult(
        pass_at={k: pass_rate(groups, k) for k in ks},
        num_tasks=len(groups),
        num_samples=sum(len(group.trajectories) for group in groups),
        num_failed=sum(by_status.get("failed", 0) for by_status in counts.values()),
        num_timeout=sum(by_status.get("timeout", 0) for by_status in counts.values()),
        num_errors=sum(t.error is not None for group in groups for t in group.trajectories),
        mean_length=lengths.mean,
        truncated=lengths.truncated,
    )


def pass_rate(groups: Sequence[Group], k: int) -> Rate:
    """pass@k over tasks, with a Wilson interval for clustered samples.

    With T tasks, m the mean and s² the sample variance of their estimates, the mean has variance s² / T. A rate of m
    from n independent draws would have m (1 - m) / n, so the answers are worth n = m (1 - m) T / s² independent ones:
    between T (all answers to a task alike) and all answers (a task tells nothing); where s is 0 it is taken to be T.
    That n goes into Wilson's formula (the effective sample size of Korn & Graubard 1998).

    Args:
      groups: of one domain.
      k: samples of which one must pass.
    """
    estimates, answers = [], 0
    for group in groups:
        judged = group.scores[~np.isnan(group.scores)]
        if len(judged) >= k:
            estimates.append(pass_at_k(len(judged), int(np.sum(judged >= PASS_SCORE)), k))
            answers += len(judged) // k
    count = len(estimates)
    if not count:
        return Rate(value=math.nan, low=0.0, high=1.0, num_tasks=0)
    mean = float(np.mean(estimates))
    variance = float(np.var(estimates, ddof=1)) / count if count > 1 else 0.0
    effective = mean * (1 - mean) / variance if variance > 0 else count
    size = int(np.clip(effective, count, max(count, answers)))
    low, high = wilson_interval(min(mean * size, size), size)
    return Rate(value=mean, low=low, high=high, num_tasks=count)


def check_ks(ks: Sequence[int], num_samples: int) -> None:
    """Raises ValueError unless every k is from 1 to the number of samples."""
    if not ks or min(ks) < 1 or max(ks) > num_samples:
        raise ValueError(
            f"k is {', '.join(map(str, ks)) or 'empty'} with num_samples={num_samples}; expected 1 <= k <= "
            "num_samples: draw more samples a task or take a smaller k"
        )


def _plain(record: Any) -> dict[str, Any]:
    return {key: _number(value) for key, value in vars(record).items()}


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
