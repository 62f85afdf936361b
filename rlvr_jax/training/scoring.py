"""From responses to rewards, for a loop of one's own: a batch's verifiers, or scores from anywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rlvr_jax.envs.single_turn import DomainJudge, make_trajectory
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.tasks.curriculum import TaskBatch
from rlvr_jax.training.policy import Responses
from rlvr_jax.types import Group, Message, Reward, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards:
    """Scored responses: P groups of G trajectories, whose ``rewards`` are the verdicts."""

    groups: tuple[Group, ...]

    @property
    def scores(self) -> np.ndarray:
        """float64[P, G]: weighted sums of the verdicts, NaN where one is missing."""
        return np.stack([group.scores for group in self.groups])

    @property
    def mean(self) -> float:
        """Mean over the responses that could be judged; NaN when none could."""
        scores = self.scores[np.isfinite(self.scores)]
        return float(scores.mean()) if scores.size else float("nan")


class DomainVerifier:
    """Has responses judged by the verifiers of their tasks' domains, in worker processes with a deadline.

    Close it, or use it as a context manager; at exit it closes itself.

    Args:
      num_workers: processes; by default one a core, at most 16.
      timeout_s: deadline of one verdict, in seconds.
    """

    def __init__(self, num_workers: int | None = None, timeout_s: float = 5.0) -> None:
        self._pool = VerifierPool(num_workers, timeout_s)
        self._judge = DomainJudge(self._pool)

    def score(self, batch: TaskBatch, responses: Responses) -> Rewards:
        """Judges the responses to a batch and tells its curriculum how it went, which ``adaptive`` adapts to.

        A verifier that raises or takes too long leaves a response without a score (NaN): it is not trained on.

        Raises:
          ValueError: the responses are to other prompts than the batch's.
        """
        if responses.prompts != batch.prompts:
            raise ValueError(
                f"the {len(responses)} prompts that were answered are not the {len(batch.tasks)} of the batch; "
                "expected policy.generate(batch.prompts, ...)"
            )
        pairs = [
            (task, text)
            for task, texts in zip(batch.tasks, responses.texts, strict=True)
            for text in texts
        ]
        verdicts = iter(self._judge(pairs))
        rewards = Rewards(
            groups=_groups(
                batch.tasks,
                responses,
                [[next(verdicts) for _ in texts] for texts in responses.texts],
            )
        )
        batch.report(list(rewards.scores))
        return rewards

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.close()

    def __enter__(self) -> DomainVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _groups(
    tasks: Sequence[Task], responses: Responses, verdicts: Sequence[Sequence[tuple[Reward, ...]]]
) -> tuple[Group, ...]:
    return tuple(
        Group(
            task=task,
            step=responses.policy_version,
            trajectories=tuple(
                make_trajectory(
                    responses.prompt_ids[row],
                    completion,
                    rewards=verdicts[row][index],
                    index=index,
                    text=responses.texts[row][index],
                )
                for index, completion in enumerate(responses.completions[row])
            ),
        )
        for row, task in enumerate(tasks)
    )


def scored_groups(responses: Responses, rewards: Rewards | ArrayLike) -> tuple[Group, ...]:
    """The groups of a verifier's rewards, or groups made of plain scores, float[P, G], NaN where there is none.

    Raises:
      ValueError: the rewards are not one for each response.
    """
    expected = (len(responses), responses.group_size)
    scores = rewards.scores if isinstance(rewards, Rewards) else np.asarray(rewards, np.float64)
    if scores.shape != expected:
        raise ValueError(
            f"rewards have shape {list(scores.shape)}; expected {list(expected)}, one for each response: "
            "score the responses that are given"
        )
    if isinstance(rewards, Rewards):
        return rewards.groups
    tasks = [
        Task(
            id=str(row),
            domain="prompts",
            prompt=tuple(turn for turn in prompt if isinstance(turn, Message)),
            answer=None,
        )
        for row, prompt in enumerate(responses.prompts)
    ]
    verdicts = [
        [
            (Reward(name="score", value=float(score)),)
            if np.isfinite(score)
            else (Reward(name="score", value=0.0, status="failed", detail="not scored"),)
            for score in row
        ]
        for row in scores
    ]
    return _groups(tasks, responses, verdicts)
