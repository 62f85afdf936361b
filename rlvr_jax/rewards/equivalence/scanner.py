"""The lexical layer of the grammar: characters, commands, words and number literals. One pass, no backtracking."""

from __future__ import annotations

import re
from fractions import Fraction

from rlvr_jax.rewards.equivalence.terms import Term, Unreadable, number_term
from rlvr_jax.rewards.equivalence.words import (
    NAMES_BEFORE_LETTERS,
    PLAIN_FUNCTIONS,
    PLAIN_NAMES,
    SEPARATOR_WORDS,
    SHORT_WORDS,
    UNIT_LETTERS,
    UNITS,
)

TEXT_COMMANDS = frozenset({
    "hbox", "mathrm", "mbox", "operatorname", "rm", "text", "textbf", "textit", "textnormal", "textrm",
    "textsf",
})  # fmt: skip
_SPACE = re.compile(
    r"(?:\s|~|\\[,;:!> ]|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z])|\{\})*"
)
_COMMAND = re.compile(r"\\([a-zA-Z]+|.)", re.DOTALL)
_GROUPED = r"\d{1,3}(?:(?:\{,\}|,\\!|\\[,;:! ]|~)\d{3})+(?!\d)"
_NUMBER = re.compile(rf"(?:{_GROUPED}|\d+)(?:\.\d+)?|\.\d+")
_TOP_GROUPED = re.compile(
    r"(?:\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}|\d{1,3}(?: \d{3})+)(?:\.\d+)?(?![\d.])"
)
_REPEATING = re.compile(
    r"(\d*)\.(\d*?)(?:\\(?:overline|dot|bar)\s*\{(\d+)\}|(\d)\4{2,}\s*\\[lc]?dots(?![a-zA-Z]))"
)
_SCIENTIFIC = re.compile(r"(\d+\.\d+[eE]|1[eE]|\d+E|\d+e(?=\d))([-+]?\d{1,6})(?![\w.])")
_MIXED = re.compile(
    r"(\d+)(?: +(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)(\d)))(?![\d.^/])"
)
_WORD = re.compile(r"[A-Za-z]+")


class Scanner:
    """A position in a text, and what can be read there."""

    def __init__(self, text: str, thousands: bool) -> None:
        self.text = text
        self.position = 0
        self.thousands = thousands
        self.brackets = 0
        self.bars = 0
        self.depth = 0
        self.operations = 0

    def peek(self) -> str:
        """The next character that is no space, or ''."""
        match = _SPACE.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def command(self) -> str:
        """The name of the command that comes next, or ''. It is not consumed."""
        if self.peek() != "\\":
            return ""
        match = _COMMAND.match(self.text, self.position)
        return match.group(1) if match else ""

    def take(self, token: str) -> bool:
        """Consumes ``token`` (one character, or a backslash and a name) if it comes next."""
        self.peek()
        if token.startswith("\\"):
            if self.command() != token[1:]:
                return False
        elif not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def expect(self, token: str) -> None:
        if not self.take(token):
            raise Unreadable(f"expected {token!r} at {self.position}")

    def word(self) -> str:
        """The letters that come next, without consuming them; of sinx, lnx or pir only the name."""
        self.peek()
        match = _WORD.match(self.text, self.position)
        word = match.group() if match else ""
        return word[:-1] if word[:-1] in NAMES_BEFORE_LETTERS and word[-1:] in "xyzrn" else word

    def raw_group(self) -> str:
        """Consumes ``{...}`` without commands inside and returns the content."""
        self.expect("{")
        end = self.text.find("}", self.position)
        content = self.text[self.position : end]
        if end < 0 or "{" in content or "\\" in content.replace("\\ ", "").replace("\\,", ""):
            raise Unreadable("text group")
        self.position = end + 1
        return content.replace("\\ ", " ").replace("\\,", " ")

    def upcoming_text(self) -> str:
        """The words that come next, as \\text{} or as plain letters that are no product of symbols; not consumed."""
        start = self.position
        try:
            return self.take_text()
        finally:
            self.position = start

    def take_text(self) -> str:
        """Consumes the text that comes next and returns it, or ''. One letter in an upright font is a symbol."""
        name = self.command()
        if name in TEXT_COMMANDS:
            start = self.position
            self.position += len(name) + 1
            content = self.raw_group().strip() if self.peek() == "{" else ""
            upright_letter = name in ("mathrm", "operatorname", "rm") and (
                len(content) == 1 and (content in "eid" or content not in UNIT_LETTERS)
            )
            if not content or upright_letter or content in PLAIN_FUNCTIONS:
                self.position = start
                return ""
            return content
        word = self.word()
        if word in PLAIN_FUNCTIONS or word in PLAIN_NAMES:
            return ""
        if word in SEPARATOR_WORDS or word in UNITS or word in SHORT_WORDS or len(word) >= 4:
            self.position += len(word)
            return word
        return ""

    def take_texts(self) -> str:
        words = []
        while text := self.take_text():
            words.append(text)
        return " ".join(words)

    def number(self) -> Term:
        before = self.text[self.position - 1 : self.position]
        mixed = None if before in ("^", "_") else _MIXED.match(self.text, self.position)
        if mixed is not None:
            whole, *parts = (int(part) for part in mixed.groups() if part is not None)
            if 0 < parts[0] < parts[1]:
                self.position = mixed.end()
                return Term("number", value=(whole + Fraction(*parts), None))
        repeating = _REPEATING.match(self.text, self.position)
        if repeating is not None:
            self.position = repeating.end()
            whole, head, *tails = repeating.groups()
            tail = tails[0] or tails[1]
            scale = 10 ** len(head)
            period = Fraction(int(tail), (10 ** len(tail) - 1) * scale)
            return Term("number", value=(Fraction(int(whole + head or "0"), scale) + period, None))
        grouped = (
            self.thousands and self.brackets == 0 and _TOP_GROUPED.match(self.text, self.position)
        )
        match = (
            _SCIENTIFIC.match(self.text, self.position)
            or grouped
            or _NUMBER.match(self.text, self.position)
        )
        if not match:
            raise Unreadable("number")
        self.position = match.end()
        return number_term(
            re.sub(
                r"[{}\\!;:~ ]|(?<=\d)\\?,(?!\d{3})", "", match.group().replace("{,}", ",")
            ).replace(",", "")
        )
