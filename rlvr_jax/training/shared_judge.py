"""Verdicts of a run of several processes: each has its own share of the responses judged, and all get all verdicts.

What follows from the verdicts (which groups are trained on, the packing, the curriculum) is then computed by every
process from the same numbers, and needs no further exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from rlvr_jax.distributed.processes import gather
from rlvr_jax.envs.single_turn import Judge
from rlvr_jax.types import JSON, Reward, Task


class SharedJudge:
    """A ``Judge`` that all processes call with the same pairs. With one process it is the judge it was given.

    Args:
      judge: of this process.
      timeout_s: longest time ``judge`` may take for one response.
    """

    def __init__(self, judge: Judge, *, timeout_s: float) -> None:
        self._judge, self._timeout_s = judge, timeout_s

    def __call__(self, pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]:
        """Raises ProcessError when the share of another process does not come."""
        count, index = jax.process_count(), jax.process_index()
        if count == 1:
            return self._judge(pairs)
        first, last = (len(pairs) * place // count for place in (index, index + 1))
        shares = gather(
            "verdicts",
            encode_rewards(self._judge(pairs[first:last])),
            deadline_s=deadline_s(len(pairs), self._timeout_s),
        )
        return [rewards for share in shares for rewards in decode_rewards(share)]


def deadline_s(num_responses: int, timeout_s: float) -> float:
    """Seconds for that many verdicts, one after another, each at its deadline, and a minute to start with."""
    return 60.0 + timeout_s * num_responses


def encode_rewards(verdicts: Sequence[tuple[Reward, ...]]) -> JSON:
    return [[list(dataclasses.astuple(reward)) for reward in rewards] for rewards in verdicts]


def decode_rewards(encoded: JSON) -> list[tuple[Reward, ...]]:
    names = [field.name for field in dataclasses.fields(Reward)]
    return [
        tuple(Reward(**dict(zip(names, values, strict=True))) for values in rewards)
        for rewards in encoded
    ]
