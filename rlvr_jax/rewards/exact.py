"""``exact``: the answer is, after the chosen normalisations, one of the accepted strings."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from rlvr_jax.rewards.extraction import check_mode, extract
from rlvr_jax.rewards.registry import VERIFIERS, accepted_answers
from rlvr_jax.types import Task

_EMPHASIS = re.compile(  # Markdown
    r"(?<!\S)(\*\*|__|[*_`])(?=\S)([^*_`\n]+)(?<=\S)\1(?![\w*_`])"
)
_OPENING = "([{\"'“‘«"
_CLOSING = ".,;:!?)]}\"'”’»"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact:
    """1.0 if the response's answer equals ``task.answer`` (or any of its items, when it is a list), else 0.0.

    Attributes:
      mode: where the answer is: ``whole``, ``tagged`` or ``boxed`` (see ``extraction``).
      ignore_case: compare case-folded.
      ignore_whitespace: any run of white space is one space.
      ignore_punctuation: drop punctuation and Markdown emphasis around words; inside them, and signs, it stays (-3 is
        never 3).
    """

    name = "exact"
    mode: str = "whole"
    ignore_case: bool = False
    ignore_whitespace: bool = True
    ignore_punctuation: bool = False

    def __post_init__(self) -> None:
        check_mode(self.name, self.mode)

    def __call__(self, task: Task, response: str) -> float:
        answer = extract(response, self.mode)
        if answer is None:
            return 0.0
        answer = self.normalise(answer)
        return float(any(answer == self.normalise(str(gold)) for gold in accepted_answers(task)))

    def normalise(self, text: str) -> str:
        """The text as it is compared."""
        text = unicodedata.normalize("NFC", text).strip()
        if self.ignore_case:
            text = text.casefold()
        if self.ignore_punctuation:
            words = _EMPHASIS.sub(r"\2", text)
            words = re.split(r"(\s+)", words)
            words = [word.lstrip(_OPENING).rstrip(_CLOSING) for word in words]
            text = "".join(words).strip() or text  # an answer that is punctuation stays what it is
        return " ".join(text.split()) if self.ignore_whitespace else text


VERIFIERS.register("exact")(Exact)  # not as a decorator, which would leave no type to inherit from
