"""Which tasks to train on: levels drawn so that success stays where there is something to learn, 20 to 80 %.

A group whose samples all fail or all succeed has no advantage and teaches nothing; p (1 - p), the variance of a
success, is what a group is worth. The curriculum keeps, per domain and level, decayed counts of success, and draws a
level in three moves (``difficulty="adaptive"``):

1. *Posterior.* Success at level l is Beta distributed: the counts, plus a prior of a few pseudo-trials whose mean is
   ``NEXT_LEVEL_RATIO`` times the posterior mean of level l - 1 (0.5 for level 0). A level nobody has tried is thus
   taken to be somewhat harder than the one below it: the curriculum climbs as levels are mastered, and looks again at
   what it has not seen for long.
2. *Thompson draw.* One success rate p is drawn for each level: levels known little about are tried now and then.
3. *Choice.* The level whose p is nearest to the middle of the target range; when none is inside it, that is the one
   that fails most of those mastered, or the easiest of those that do not work yet. Drawing among all levels inside the
   range instead, in proportion to p (1 - p), had a fifth fewer tasks inside it in simulation: near its edges the range
   is missed by chance, and by learning.

Counts are of scored trajectories only: a failed verifier says nothing about difficulty.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from rlvr_jax.tasks.registry import DOMAINS, expand_domains
from rlvr_jax.tasks.splits import content_hash, draw
from rlvr_jax.types import JSON, Group, Message, Task

Difficulty = Literal["adaptive", "uniform"] | int

NEXT_LEVEL_RATIO = 0.6
PRIOR_TRIALS = 4.0
# Steps for which a task is not drawn again.
REPEAT_WINDOW = 4
# Redraws that still avoid the tasks of recent steps, and those that avoid only the tasks of this step.
_FRESH_REDRAWS, _REDRAWS = 16, 256


class Curriculum:
    """Draws the tasks of each step and learns from what became of them.

    Args:
      domains: names of domains, prefixes and groups (``expand_domains``); each gets an equal share of every step.
      difficulty: ``adaptive``; ``uniform`` over the levels; or one level for all domains.
      seed: of every draw.
      target: success rates between which a level is worth training on.
      half_life: groups of a domain after which what a group said counts half: the policy has changed since.
      max_levels: use no more than the first so many levels of a domain; all of them when None.

    Raises:
      ValueError: no domains, an unknown one, or a setting out of range.
    """

    def __init__(
        self,
        domains: str | Sequence[str],
        *,
        difficulty: Difficulty = "adaptive",
        seed: int = 0,
        target: tuple[float, float] = (0.2, 0.8),
        half_life: float = 48.0,
        max_levels: int | None = None,
    ) -> None:
        self.domains = expand_domains(domains)
        if isinstance(difficulty, str) and difficulty.isdecimal():  # a config's value is a string
            difficulty = int(difficulty)
        if isinstance(difficulty, int):
            for name in self.domains:
                DOMAINS.get(name).check_level(difficulty)
        elif difficulty not in ("adaptive", "uniform"):
            raise ValueError(
                f"difficulty is {difficulty!r}; expected 'adaptive', 'uniform' or a level (an integer)"
            )
        if not 0 <= target[0] < target[1] <= 1:
            raise ValueError(
                f"target is {target}; expected two success rates, 0 <= low < high <= 1"
            )
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}; expected a positive number of groups")
        self.difficulty: Difficulty = difficulty
        self.seed, self.target = seed, target
        self._decay = 0.5 ** (1 / half_life)
        if max_levels is not None and max_levels < 1:
            raise ValueError(f"max_levels is {max_levels}; expected None or at least 1")
        most = max_levels or sys.maxsize
        if isinstance(difficulty, int) and difficulty >= most:
            raise ValueError(
                f"difficulty is level {difficulty}, and max_levels={max_levels} leaves it out; expected a level below "
                "max_levels: change config.tasks.difficulty or config.tasks.max_levels"
            )
        levels = {name: min(DOMAINS.get(name).num_levels, most) for name in self.domains}
        # float64[L] per domain, decayed: successes and trials (scored trajectories), and groups.
        self._successes = {name: np.zeros(n) for name, n in levels.items()}
        self._trials = {name: np.zeros(n) for name, n in levels.items()}
        self._groups = {name: np.zeros(n) for name, n in levels.items()}
        # Keys of the tasks drawn for (step, attempt), of the last steps.
        self._drawn: dict[tuple[int, int], list[tuple[str, str]]] = {}

    @property
    def levels(self) -> dict[str, range]:
        """The levels that are drawn, by domain."""
        return {name: range(len(counts)) for name, counts in self._trials.items()}

    def sample(self, step: int, num_tasks: int, attempt: int = 0) -> list[Task]:
        """Draws tasks to train on, no two the same, none that this step or, if it can be helped, the last steps had.

        The same seed, step, attempt and state give the same tasks, in any process.

        Args:
          step: of training.
          num_tasks: how many.
          attempt: 0 for a step's first tasks; 1, 2, ... for those that stand in for groups without variance.

        Raises:
          ValueError: num_tasks is below 1, or a domain has too few distinct tasks for the step.
        """
        if num_tasks < 1:
            raise ValueError(f"num_tasks is {num_tasks}; expected at least 1")
        rng = np.random.default_rng(content_hash("curriculum", self.seed, step, attempt))
        before = {at: keys for at, keys in self._drawn.items() if at < (step, attempt)}
        recent = {
            key for at, keys in before.items() if step - REPEAT_WINDOW <= at[0] for key in keys
        }
        taken = {key for at, keys in before.items() if at[0] == step for key in keys}
        order = rng.permutation(len(self.domains))
        tasks = []
        for number in range(num_tasks):
            name = self.domains[order[number % len(order)]]
            tasks.append(self._draw_new(name, rng, recent, taken))
            taken.add(tasks[-1].key)
        # Samples may be taken ahead of time (or again): twice the window is kept, and later draws are left alone.
        kept = {at: keys for at, keys in self._drawn.items() if at[0] >= step - 2 * REPEAT_WINDOW}
        self._drawn = {**kept, (step, attempt): [task.key for task in tasks]}
        return tasks

    def _draw_new(
        self,
        name: str,
        rng: np.random.Generator,
        recent: set[tuple[str, str]],
        taken: set[tuple[str, str]],
    ) -> Task:
        for redraw in range(_REDRAWS):
            level = self._draw_level(name, rng)
            task = draw(name, level, "train", self.seed, int(rng.integers(2**62)))
            if task.key not in taken and (redraw >= _FRESH_REDRAWS or task.key not in recent):
                return task
        raise ValueError(
            f"domain {name!r} has too few distinct tasks for one step: {_REDRAWS} draws brought nothing new "
            f"after {sum(key[0] == name for key in taken)}; draw fewer tasks a step, or add domains or levels"
        )

    def _draw_level(self, name: str, rng: np.random.Generator) -> int:
        if isinstance(self.difficulty, int):
            return self.difficulty
        num_levels = len(self._trials[name])
        if self.difficulty == "uniform":
            return int(rng.integers(num_levels))
        a, b = self._posterior(name)
        return int(np.argmin(np.abs(rng.beta(a, b) - sum(self.target) / 2)))

    def _posterior(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Parameters of the Beta posterior of success, float64[L] each."""
        successes, trials = self._successes[name], self._trials[name]
        a, b = np.empty_like(trials), np.empty_like(trials)
        prior_mean = 0.5
        for level in range(len(trials)):
            a[level] = PRIOR_TRIALS * prior_mean + successes[level]
            b[level] = PRIOR_TRIALS * (1 - prior_mean) + trials[level] - successes[level]
            prior_mean = NEXT_LEVEL_RATIO * a[level] / (a[level] + b[level])
        return a, b

    def update(self, groups: Sequence[Group]) -> None:
        """Learns from the groups of a step, those without variance included.

        Raises:
          ValueError: a group is of a domain that is not in the curriculum.
        """
        self.record([group.task for group in groups], [group.scores for group in groups])

    def record(self, tasks: Sequence[Task], scores: Sequence[Sequence[float] | np.ndarray]) -> None:
        """Learns from scores: one row a task, one score a sample, clipped to 0..1; NaN (not scored) is left out."""
        for task, row in zip(tasks, scores, strict=True):
            if task.domain not in self._trials:
                raise ValueError(
                    f"a group is of domain {task.domain!r}, which this curriculum does not draw; "
                    f"expected one of {', '.join(self.domains)}"
                )
            scored = np.asarray(row, np.float64)
            scored = np.clip(scored[~np.isnan(scored)], 0.0, 1.0)
            for counts, seen in (
                (self._successes, scored.sum()),
                (self._trials, scored.size),
                (self._groups, 1.0),
            ):
                counts[task.domain] *= self._decay
                counts[task.domain][task.level] += seen

    def metrics(self) -> dict[str, float]:
        """Decayed figures, by domain and level that has been tried.

        ``curriculum/success/<domain>/<level>``, the share of scored trajectories that succeeded;
        ``curriculum/share/<domain>/<level>``, of the domain's groups; ``curriculum/level/<domain>``, their mean level.
        """
        found: dict[str, float] = {}
        for name in self.domains:
            groups = self._groups[name]
            if not groups.any():
                continue
            share = groups / groups.sum()
            found[f"curriculum/level/{name}"] = float(share @ np.arange(len(share)))
            for level in np.flatnonzero(groups):
                found[f"curriculum/share/{name}/{level}"] = float(share[level])
                if self._trials[name][level] > 0:
                    rate = self._successes[name][level] / self._trials[name][level]
                    found[f"curriculum/success/{name}/{level}"] = float(rate)
        return found

    def state_dict(self) -> dict[str, JSON]:
        """Everything later draws depend on, as JSON; floats survive the round trip exactly."""
        return {
            "successes": {name: counts.tolist() for name, counts in self._successes.items()},
            "trials": {name: counts.tolist() for name, counts in self._trials.items()},
            "groups": {name: counts.tolist() for name, counts in self._groups.items()},
            "drawn": [[*at, [list(key) for key in keys]] for at, keys in self._drawn.items()],
        }

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Restores what ``state_dict`` gave; the next draws are those that would have followed it.

        Raises:
          ValueError: the state is of other domains or levels.
        """
        saved = {name: len(counts) for name, counts in state["trials"].items()}
        own = {name: len(counts) for name, counts in self._trials.items()}
        if saved != own:
            raise ValueError(
                f"the curriculum's state is of domains (levels) {saved}; expected {own}: resume with the domains "
                "the run was started with"
            )
        self._successes, self._trials, self._groups = (
            {name: np.asarray(counts, np.float64) for name, counts in state[kind].items()}
            for kind in ("successes", "trials", "groups")
        )
        self._drawn = {
            (step, attempt): [(domain, task_id) for domain, task_id in keys]
            for step, attempt, keys in state["drawn"]
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskBatch:
    """The tasks of a step.

    Attributes:
      step: from 0.
      tasks: P of them.
      curriculum: that drew them.
    """

    step: int
    tasks: tuple[Task, ...]
    curriculum: Curriculum

    @property
    def prompts(self) -> tuple[tuple[Message, ...], ...]:
        """The conversations to answer, P of them."""
        return tuple(task.prompt for task in self.tasks)

    def report(self, scores: Sequence[Sequence[float] | np.ndarray]) -> None:
        """Tells the curriculum how it went: P rows of G scores, NaN where there is none."""
        self.curriculum.record(self.tasks, scores)


def task_sampler(
    domains: str | Sequence[str],
    *,
    difficulty: Difficulty = "adaptive",
    batch_size: int = 8,
    seed: int = 0,
) -> Iterator[TaskBatch]:
    """Endless batches of tasks for a loop of one's own; ``batch.report(scores)`` is what ``adaptive`` adapts to.

    Args:
      domains: names of domains, prefixes and groups.
      difficulty: as of Curriculum.
      batch_size: tasks a batch.
      seed: of every draw.

    Raises:
      ValueError: at once, for what Curriculum refuses or a batch size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; expected at least 1")
    curriculum = Curriculum(domains, difficulty=difficulty, seed=seed)

    def batches() -> Iterator[TaskBatch]:
        step = 0
        while True:
            tasks = tuple(curriculum.sample(step, batch_size))
            yield TaskBatch(step=step, tasks=tasks, curriculum=curriculum)
            step += 1

    return batches()
