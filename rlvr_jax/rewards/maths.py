r"""``math``: the answer is mathematically the same as the gold one.

The answer is taken out by ``extraction``, read and compared by ``equivalence``, whose grammar is strict. Sums,
integrals and limits are beyond that grammar and go to math-verify, whose parser salvages what it can and whose
comparison rounds absolutely: it sees them only when the text passes an allow-list, and its "equal" counts only if it
stands up to a relative comparison. Anything else that cannot be read is right only if it is the gold answer letter by
letter.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from rlvr_jax.rewards.equivalence.compare import equivalent
from rlvr_jax.rewards.equivalence.grammar import parse
from rlvr_jax.rewards.equivalence.notation import tidy
from rlvr_jax.rewards.equivalence.terms import Term, Unreadable
from rlvr_jax.rewards.extraction import check_mode, extract, last_boxed
from rlvr_jax.rewards.registry import VERIFIERS, accepted_answers, require_extra
from rlvr_jax.types import Task

MAX_ANSWER = 2000
_CALCULUS = re.compile(r"\\(?:int|sum|prod|lim)(?![a-zA-Z])")
_COMMANDS = re.compile(
    r"\\(?:int|sum|prod|lim|to|infty|rightarrow|[dt]?frac|sqrt|cdot|times|pi|sin|cos|tan|ln|log|exp|[lg]eq?|mathrm"
    r"|alpha|beta|gamma|theta|lambda|mu|phi|omega)(?![a-zA-Z])|\\[,;:! ]"
)
# A power of a number in an exponent. x^2 in one is harmless: in e^{-x^2}.
_TOWER = re.compile(r"\^\s*(?:[{(][^})]*\d\s*\^|\w\s*\^)")
_CHARACTERS = re.compile(r"[A-Za-z0-9\\{}()\[\]+\-*/^_=.,!;:|\s]*")
_WHITE_SPACE = re.compile(
    r"(?:\s|~|\\[,;:! ]|\\q?quad(?![a-zA-Z])|\\left(?![a-zA-Z])|\\right(?![a-zA-Z]))+"
)


@VERIFIERS.register("math")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Math:
    r"""1.0 if the response's answer is equivalent to ``task.answer`` (or to any of its items, if a list), else 0.0.

    Attributes:
      mode: where the answer is: ``boxed`` (the last complete ``\boxed{}``; without one, 0.0), ``tagged`` or ``whole``
        (see ``extraction``).

    Raises:
      MissingExtraError: math-verify is not installed.
    """

    name = "math"
    mode: str = "boxed"

    def __post_init__(self) -> None:
        check_mode(self.name, self.mode)
        require_extra("math_verify", "math")

    def warm(self) -> None:
        answers_equal("1/3", "2/6")
        answers_equal(r"\int_0^1 x dx", r"\frac{1}{2}")

    def __call__(self, task: Task, response: str) -> float:
        answer = extract(response, self.mode)
        if answer is None:
            return 0.0
        return float(any(answers_equal(str(gold), answer) for gold in accepted_answers(task)))


def answers_equal(gold: str, answer: str) -> bool:
    """Returns whether two answers, each without the text around it, are the same. Never raises on any text."""
    if len(answer) > MAX_ANSWER or len(gold) > MAX_ANSWER:
        return gold.strip() == answer.strip()
    gold, answer = _unboxed(gold), _unboxed(answer)
    gold, answer = tidy(gold), tidy(answer)
    if _without_space(gold) == _without_space(answer):
        return True
    gold_terms, answer_terms = _readings(gold), _readings(answer)
    if gold_terms and answer_terms:
        return any(equivalent(gold_terms[0], term) for term in answer_terms)
    return _verified(gold, answer)


def _unboxed(text: str) -> str:
    """A gold answer may come in its box."""
    inner = last_boxed(text) if re.match(r"\s*\\(?:boxed|fbox)", text) else None
    return inner or text


def _without_space(text: str) -> str:
    """The text without the white space that says nothing: 1 2 is not 12."""
    return re.sub(r"(?<!\w) | (?!\w)", "", _WHITE_SPACE.sub(" ", text))


def _readings(text: str) -> list[Term]:
    """How the text can be read: 1,234 as a number first, then as a list. Empty if it cannot be."""
    readings = []
    for thousands in (True, False):
        try:
            term = parse(text, thousands=thousands)
        except Unreadable:
            continue
        if term not in readings:
            readings.append(term)
    return readings


def _verified(gold: str, answer: str) -> bool:
    """math-verify's opinion, where one side is an integral, sum, product or limit and both pass the guards."""
    if not (_CALCULUS.search(gold) or _CALCULUS.search(answer)) or not (
        _allowed(gold) and _allowed(answer)
    ):
        return False
    terms = [_to_sympy(gold), _to_sympy(answer)]
    if terms[0] is None or terms[1] is None:
        return False
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns: its timeouts are off
    if not verify(terms[0], terms[1], timeout_seconds=None):
        return False
    return _close(*terms)


def _allowed(text: str) -> bool:
    """Whether every character and command is known, braces balance and numbers are small enough to compute with."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return (
        depth == 0
        and len(text) <= 300
        and _CHARACTERS.fullmatch(text) is not None
        and "\\" not in _COMMANDS.sub("", text)
        and not re.search(r"\d{7}|\^\s*\{?\s*-?\d{4}", text)
        and not _TOWER.search(text)
        and not re.search(r"(?<!\\)\b[A-Za-z]{4,}", re.sub(r"\\[a-zA-Z]+", " ", text))
    )


def _to_sympy(text: str) -> Any:
    """What latex2sympy makes of all of the text, or None."""
    from latex2sympy2_extended import latex2sympy

    try:
        return latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    except Exception:  # its parser raises plain Exception on what it cannot read
        return None


def _close(gold: Any, answer: Any) -> bool:
    """Whether two constants are relatively equal; True when one is no constant."""
    try:
        a, b = gold.doit().evalf(30), answer.doit().evalf(30)
        if not (a.is_number and b.is_number):
            return True
        return bool(abs(a - b) <= max(abs(a), abs(b)) * 1e-20)
    except Exception:  # not evaluable: no confirmation
        return False
