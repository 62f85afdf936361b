r"""A reader of mathematical answers in LaTeX or plain text. It reads all of the text by its grammar, or nothing.

``parse`` gives a term or raises ``Unreadable``: there is no recovery, so a number inside broken LaTeX is never
salvaged, and no text is ever evaluated. The grammar is an allow-list: an unknown command makes the answer unreadable.

The terms are described in ``terms``.
"""

from __future__ import annotations

import re

from rlvr_jax.rewards.equivalence.commands import Commands
from rlvr_jax.rewards.equivalence.expression import MAX_DEPTH
from rlvr_jax.rewards.equivalence.terms import (
    SCALARS,
    Term,
    Unreadable,
    number_term,
    text_term,
)
from rlvr_jax.rewards.equivalence.words import (
    CURRENCY,
    SCALES,
    SEPARATOR_WORDS,
    as_prose,
    check_unit,
    unit_name,
)

MAX_LENGTH = 2000
RELATIONS = {
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">",
    "ne": "!=", "neq": "!=", "in": "in", "approx": "=", "equiv": "==",
}  # fmt: skip
_CHOICE = re.compile(  # (B) 12
    r"(?:\\text(?:bf|rm)?\s*\{\s*\(?([A-E])[).:]\s*\}|([A-E])[).:]\s|\(([A-E])\)(?=\s*[\d$]))"
    r"[\s~]*(?:\\q?quad|\\[ ,;:])*(?=[\w\\($-])"
)


def parse(text: str, *, thousands: bool = True) -> Term:
    """Reads a tidied answer.

    Args:
      text: as ``notation.tidy`` returns it.
      thousands: whether ``1,234`` outside brackets is one number (else a list of two).

    Raises:
      Unreadable: it is not, as a whole, in the grammar, or it is too long or nested too deeply.
    """
    if len(text) > MAX_LENGTH:
        raise Unreadable("too long")
    prose = as_prose(text)
    if prose is not None:
        return prose
    choice = _CHOICE.match(text)
    if choice is not None:
        letter = next(group for group in choice.groups() if group)
        return Term("choice", (parse(text[choice.end() :], thousands=thousands),), letter)
    reader = _Reader(text, thousands)
    term = reader.answer()
    if reader.peek():
        raise Unreadable(f"unexpected {reader.peek()!r}")
    return term


class _Reader(Commands):
    """Answers: lists of relations between quantities."""

    def answer(self) -> Term:
        """item (separator item)*: a bare list, or its only item."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        items = [self.item()]
        joiners = []
        while joiner := self.separator():
            joiners.append(joiner)
            items.append(self.item())
        self.depth -= 1
        if len(items) == 1:
            return items[0]
        joiner = joiners[0] if len(set(joiners)) == 1 else ","
        return Term("list", tuple(items), joiner)

    def separator(self) -> str:
        """Consumes and names what separates two items, or returns ''."""
        found = ""
        while True:
            if self.take(",") or self.take(";"):
                found = found or ","
                continue
            text = self.upcoming_text().casefold()
            if text in SEPARATOR_WORDS:
                self.take_text()
                found = text
                continue
            return found

    def item(self) -> Term:
        """relation [unit]"""
        if self.take("\\ldots") or self.take("\\dots") or self.take("\\cdots"):
            return Term("ellipsis")
        while self.take("=") or self.take("\\approx"):
            pass  # "= 5"
        if self.upcoming_text() and self.upcoming_text().casefold() not in SEPARATOR_WORDS:
            words = self.take_texts()
            if not (words.endswith(":") or self.take("=") or self.take(":")):
                return text_term(words)
        operands, operators = [self.operand()], []
        while operator := self.relation_operator():
            operators.append(operator)
            operands.append(self.operand())
        return operands[0] if not operators else Term("relation", tuple(operands), tuple(operators))

    def relation_operator(self) -> str:
        character = self.peek()
        if character in ("=", "<", ">"):
            self.position += 1
            return character
        name = self.command()
        if name in RELATIONS:
            self.position += len(name) + 1
            return RELATIONS[name]
        return ""

    def operand(self) -> Term:
        """sum (: sum)*, or unions of sets; then a unit"""
        if (self.peek() and self.peek() in CURRENCY) or self.command() == "$":
            if self.command() == "$":
                self.position += 1
            unit = self.text[self.position]
            self.position += 1
            return Term("quantity", (self.scalar_sum(),), unit)
        if self.upcoming_text() and self.upcoming_text().casefold() not in SEPARATOR_WORDS:
            return text_term(self.take_texts())
        first = self.sum()
        if self.peek() == ":" and first.head in SCALARS:
            parts = [first]
            while self.take(":"):
                parts.append(self.scalar_sum())
            first = Term("ratio", tuple(parts))
        scale = SCALES.get(self.upcoming_text().casefold())
        if scale and first.head in SCALARS:
            self.take_text()
            first = Term("mul", (first, number_term(scale)))
        while True:
            if self.take("\\cup"):
                first = Term("union", (first, self.sum()))
            elif self.take("\\setminus") or self.take("\\backslash"):
                first = Term("difference", (first, self.sum()))
            else:
                break
        unit = self.unit()
        if not unit:
            return first
        if first.head == "text":
            raise Unreadable("text after text")
        return Term("quantity", (first,), unit)

    def unit(self) -> str:
        """Consumes a unit: text, perhaps with powers and quotients ("cm^2", "m/s", "square units")."""
        if self.command() in ("pmod", "mod", "bmod"):
            self.position += len(self.command()) + 1
            modulus = self.argument(whole_numbers=True)
            if modulus.head != "number":
                raise Unreadable("modulus")
            return f"mod {modulus.value[0]}"
        text = self.upcoming_text()
        if not text or text.casefold() in SEPARATOR_WORDS:
            return ""
        pieces = []
        while True:
            text = self.upcoming_text()
            if text and text.casefold() not in SEPARATOR_WORDS:
                check_unit(text)
                pieces.append(self.take_text())
            elif self.peek() == "^":
                self.position += 1
                match = re.compile(r"\s*(?:\{\s*(-?\d)\s*\}|(-?\d))").match(
                    self.text, self.position
                )
                if match is None:
                    raise Unreadable("power of a unit")
                self.position = match.end()
                pieces.append("^" + (match.group(1) or match.group(2)))
            elif self.peek() == "/" or self.command() == "cdot":
                pieces.append("/" if self.take("/") else ".")
                self.take("\\cdot")
                if not self.upcoming_text():
                    letter = self.word()
                    if len(letter) != 1:
                        raise Unreadable("unit")
                    self.position += 1
                    pieces.append(letter)
            else:
                return unit_name(" ".join(pieces))
