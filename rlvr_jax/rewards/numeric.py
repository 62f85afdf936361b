"""``numeric``: the answer is a number equal to the gold one, compared exactly unless a tolerance is given."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

from rlvr_jax.rewards.extraction import check_mode, extract
from rlvr_jax.rewards.numbers import Number, last_number, only_number, whole_number
from rlvr_jax.rewards.registry import VERIFIERS, accepted_answers
from rlvr_jax.types import Task

_MODES = ("whole", "last", "tagged", "boxed")


@VERIFIERS.register("numeric")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Numeric:
    """1.0 if the response's number equals ``task.answer`` (a number or its text, or a list of which any will do).

    Attributes:
      mode: ``last``: the last number in the response. ``whole``: the stripped response must be a number and nothing
        else. ``tagged``, ``boxed``: the one number in that part (see ``extraction``), after its last ``=`` if it has
        one; several numbers are no answer.
      rel_tol, abs_tol: accept ``|answer - gold| <= max(rel_tol * |gold|, abs_tol)``. With 0 (the default) the
        comparison is exact, on rationals.

    Raises:
      ValueError: the gold answer is no number.
    """

    name = "numeric"
    mode: str = "last"
    rel_tol: float = 0.0
    abs_tol: float = 0.0

    def __post_init__(self) -> None:
        check_mode(self.name, self.mode, _MODES)
        for field in ("rel_tol", "abs_tol"):
            value = getattr(self, field)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"numeric {field} is {value!r}; expected a finite number >= 0")

    def __call__(self, task: Task, response: str) -> float:
        golds = [self._gold(task, answer) for answer in accepted_answers(task)]
        answer = self._answer(response)
        return float(answer is not None and any(self._equal(gold, answer) for gold in golds))

    def _answer(self, response: str) -> Number | None:
        if self.mode == "last":
            return last_number(response)
        part = extract(response, self.mode)
        if part is None:
            return None
        whole = whole_number(part)
        return whole if whole is not None or self.mode == "whole" else only_number(part)

    @staticmethod
    def _gold(task: Task, answer: str | int | float) -> Number:
        number = Number(Fraction(answer)) if isinstance(answer, int) else whole_number(str(answer))
        if number is None:
            raise ValueError(f"task {task.key} has the answer {answer!r}; expected a number")
        return number

    def _equal(self, gold: Number, answer: Number) -> bool:
        if gold.percent and answer.percent:
            gold, answer = Number(gold.value), Number(answer.value)
        for expected in gold.values():
            tolerance = max(
                Fraction(str(self.rel_tol)) * abs(expected), Fraction(str(self.abs_tol))
            )
            if any(abs(value - expected) <= tolerance for value in answer.values()):
                return True
        return False
