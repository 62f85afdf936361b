"""``similarity``: how close the answer is to the gold one, character by character: a way up to ``exact``."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlvr_jax.rewards.exact import Exact
from rlvr_jax.rewards.extraction import extract
from rlvr_jax.rewards.registry import VERIFIERS, accepted_answers
from rlvr_jax.types import Task

_MAX_RATIO = 100


@VERIFIERS.register("similarity")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Similarity(Exact):
    """1 - edit distance / length of the longer one, in [0, 1], to the closest of the accepted strings.

    An answer a hundred times longer or shorter than the gold one counts as 0.

    Its parameters are those of ``Exact``, beside which it belongs with a smaller weight: alone it pays for what is only
    nearly right.
    """

    name = "similarity"

    def __call__(self, task: Task, response: str) -> float:
        answer = extract(response, self.mode)
        if answer is None:
            return 0.0
        answer = self.normalise(answer)
        return max(_similarity(answer, self.normalise(str(g))) for g in accepted_answers(task))


def _similarity(answer: str, gold: str) -> float:
    longer, shorter = max(len(answer), len(gold), 1), min(len(answer), len(gold))
    if longer > _MAX_RATIO * (shorter + 1):  # it is below 1 / _MAX_RATIO: not worth minutes
        return 0.0
    return 1.0 - edit_distance(answer, gold) / longer


def edit_distance(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of a character that make ``b`` of ``a`` (Levenshtein)."""
    a, b = sorted((a, b), key=len)  # the loop is over the shorter one
    codes = np.array([ord(character) for character in b], np.int64)
    index = np.arange(len(b) + 1)
    row = index  # distances of the part of a before this character to every beginning of b
    for number, character in enumerate(a, start=1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        # An insertion takes the distance to the left: a running minimum, once the slope is taken off.
        row = np.minimum.accumulate(np.concatenate([[number], changed]) - index) + index
    return int(row[-1])
