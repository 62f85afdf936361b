"""``regex``: the response matches a pattern. Catastrophic backtracking is the deadline's business (see ``pool``)."""

from __future__ import annotations

import dataclasses
import re

from rlvr_jax.rewards.registry import VERIFIERS
from rlvr_jax.types import Task


@VERIFIERS.register("regex")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Regex:
    """1.0 if the pattern matches, else 0.0.

    Attributes:
      pattern: Python regular expression; None takes ``task.answer``.
      mode: ``fullmatch`` of the stripped response, or ``search`` anywhere in it.
      ignore_case, multiline, dotall: the flags of the same names.

    Raises:
      TypeError, re.error: the task's pattern is no string, or no regular expression.
    """

    name = "regex"
    pattern: str | None = None
    mode: str = "fullmatch"
    ignore_case: bool = False
    multiline: bool = False
    dotall: bool = False

    def __post_init__(self) -> None:
        if self.mode not in ("fullmatch", "search"):
            raise ValueError(f"regex mode is {self.mode!r}; expected fullmatch or search")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(
                    f"regex pattern {self.pattern!r} is no regular expression: {error}"
                ) from error

    def __call__(self, task: Task, response: str) -> float:
        pattern = task.answer if self.pattern is None else self.pattern
        if not isinstance(pattern, str):
            raise TypeError(
                f"task {task.key} has the answer {pattern!r}; expected a regular expression"
            )
        flags = (
            (re.IGNORECASE if self.ignore_case else 0)
            | (re.MULTILINE if self.multiline else 0)
            | (re.DOTALL if self.dotall else 0)
        )
        compiled = re.compile(pattern, flags)
        match = compiled.fullmatch if self.mode == "fullmatch" else compiled.search
        return float(match(response.strip()) is not None)
