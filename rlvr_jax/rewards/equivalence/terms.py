"""What an answer is read into: terms, and the scalar ones among them.

A *term* is ``Term(head, args, value)``. Scalars: ``number`` (value: a Fraction, and its digits after the point),
``symbol`` (name), ``constant`` (e, pi, i, infinity), and ``add mul div pow neg root factorial abs floor ceil percent
degree binomial call plus_minus`` (value of call: the function). Answers: ``list`` (bare commas, and, or), ``group``
(brackets with commas; value: the brackets), ``set``, ``union``, ``difference``, ``relation`` (value: operators),
``ratio``, ``matrix`` (of ``row``), ``text``, ``quantity`` (value: unit), ``based`` (digits with a base), ``numbers``
(R, Z, ...), ``ellipsis``, ``choice`` (value: the letter).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlvr_jax.rewards.numbers import parse_decimal


class Unreadable(ValueError):
    """The text is not, as a whole, an answer in the grammar."""


@dataclasses.dataclass(frozen=True)
class Term:
    head: str
    args: tuple[Term, ...] = ()
    value: Any = None


NUMBER_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12", "thirteen": "13", "fourteen": "14",
    "fifteen": "15", "sixteen": "16", "seventeen": "17", "eighteen": "18", "nineteen": "19", "twenty": "20",
}  # fmt: skip
SCALARS = frozenset({
    "abs", "add", "binomial", "call", "ceil", "constant", "degree", "div", "factorial", "floor", "mul",
    "neg", "number", "percent", "plus_minus", "pow", "root", "symbol",
})  # fmt: skip


def scalar(term: Term) -> Term:
    if term.head not in SCALARS:
        raise Unreadable(f"{term.head} in arithmetic")
    return term


def negative(term: Term) -> Term:
    return Term("neg", (term,))


def letter_term(letter: str) -> Term:
    return Term("constant", value=letter) if letter in ("e", "i") else Term("symbol", value=letter)


def number_term(text: str) -> Term:
    """A literal: its value and how many digits it gives after the point (None for an integer)."""
    value = parse_decimal(text)
    if value is None:
        raise Unreadable("number out of bounds")
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0) if "." in mantissa else None
    return Term("number", value=(value, places))


def text_term(words: str) -> Term:
    """A text answer: words compared without case; a choice such as (C) is its letter."""
    words = " ".join(words.replace("~", " ").split()).strip(" .,;:!")
    if len(words) >= 3 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1].strip()
    if len(words) == 1 and words.isalpha():
        return Term("symbol", value=words)
    if words.casefold() in NUMBER_WORDS:
        return number_term(NUMBER_WORDS[words.casefold()])
    if words.casefold() in ("no solution", "no solutions"):
        return Term("set")
    if words.casefold() == "infinity":
        return Term("constant", value="infinity")
    if words.casefold() in ("all real numbers", "all reals", "real numbers"):
        return Term("numbers", value="R")
    words = words.casefold()
    return Term("text", value="does not exist" if words == "dne" else words)
