r"""A reader of mathematical answers in LaTeX or plain text. It reads all of the text by its grammar, or nothing.

``parse`` gives a term or raises ``Unreadable``: there is no recovery, so a number inside broken LaTeX is never salvaged,
and no text is ever evaluated. The grammar is an allow-list: a command it does not know makes the answer unreadable.

A *term* is ``Term(head, args, value)``. Scalars: ``number`` (value: Fraction, and digits after the point), ``symbol``
(name), ``constant`` (e, pi, i, infinity), and ``add mul div pow neg root factorial abs floor ceil percent degree binomial
call plus_minus`` (value of call: the function). Answers: ``list`` (bare commas, and, or), ``group`` (brackets with commas;
value: the brackets), ``set``, ``union``, ``difference``, ``relation`` (value: operators), ``ratio``, ``matrix`` (of
``row``), ``text``, ``quantity`` (value: unit), ``based`` (digits with a base), ``numbers`` (R, Z, ...), ``ellipsis``.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction
from typing import Any

from rlvr_jax.rewards.numbers import parse_decimal

MAX_LENGTH = 2000
MAX_DEPTH = 40


class Unreadable(ValueError):
    """The text is not, as a whole, an answer in the grammar."""


@dataclasses.dataclass(frozen=True)
class Term:
    head: str
    args: tuple[Term, ...] = ()
    value: Any = None


SCALARS = frozenset({
    "abs", "add", "binomial", "call", "ceil", "constant", "degree", "div", "factorial", "floor", "mul",
    "neg", "number", "percent", "plus_minus", "pow", "root", "symbol",
})  # fmt: skip
FUNCTIONS = frozenset({
    "Im", "Re", "arccos", "arccot", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "coth", "csc", "deg",
    "det", "exp", "gcd", "lcm", "lg", "ln", "log", "max", "min", "sec", "sin", "sinh", "tan", "tanh",
})  # fmt: skip
_PLAIN_FUNCTIONS = {
    **{
        name: name
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "gcd", "lcm")
    },
    **{name: name for name in ("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max", "min")},
    **{"asin": "arcsin", "acos": "arccos", "atan": "arctan"},
}
_LETTERS = frozenset({
    "Delta", "Gamma", "Lambda", "Omega", "Phi", "Pi", "Psi", "Sigma", "Theta", "Xi", "alpha", "beta", "chi",
    "delta", "ell", "epsilon", "eta", "gamma", "hbar", "iota", "kappa", "lambda", "mu", "nu", "omega",
    "phi", "psi", "rho", "sigma", "tau", "theta", "upsilon", "varepsilon", "varphi", "varrho", "vartheta",
    "xi", "zeta",
})  # fmt: skip
_RELATIONS = {
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">",
    "ne": "!=", "neq": "!=", "in": "in", "approx": "=", "equiv": "==",
}  # fmt: skip
_TEXT_COMMANDS = frozenset({
    "hbox", "mathrm", "mbox", "operatorname", "rm", "text", "textbf", "textit", "textnormal", "textrm",
    "textsf",
})  # fmt: skip
_STYLE_COMMANDS = frozenset({
    "bm", "bold", "boldsymbol", "mathbf", "mathcal", "mathit", "mathsf",
})  # fmt: skip
_ACCENTS = frozenset({
    "bar", "hat", "overline", "overrightarrow", "tilde", "vec", "widehat",
})  # fmt: skip
_MATRICES = frozenset({
    "Bmatrix", "array", "bmatrix", "matrix", "pmatrix", "smallmatrix",
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
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_SCIENTIFIC = re.compile(r"(\d+\.\d+[eE]|1[eE]|\d+E|\d+e(?=\d))([-+]?\d{1,6})(?![\w.])")
_MIXED = re.compile(
    r"(\d+)(?: +(\d+)\s*/\s*(\d+)|\s*\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)(\d)))(?![\d.^/])"
)
_WORD = re.compile(r"[A-Za-z]+")
_FUNCTION_LETTERS = frozenset("fghFGHPE")
_SEPARATOR_WORDS = frozenset({
    "and", "or",
})  # fmt: skip
_CURRENCY = {"$": "$", "€": "€", "£": "£", "¥": "¥"}
_UNITS = frozenset({
    "AM", "EUR", "GBP", "Hz", "MJ", "PM", "USD", "am", "cm", "deg", "dm", "eV", "ft", "hr", "hrs", "kHz",
    "kJ", "kW", "kg", "km", "kmh", "kph", "lb", "lbs", "mL", "mg", "mi", "min", "mins", "ml", "mm", "mol",
    "mph", "ms", "nm", "oz", "pm", "rad", "sec", "secs", "sq", "yd",
})  # fmt: skip
_SHORT_WORDS = frozenset({
    "All", "No", "None", "Odd", "Yes", "all", "any", "for", "no", "none", "not", "odd", "one", "red", "six",
    "ten", "the", "two", "yes",
})  # fmt: skip


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
    prose = _as_prose(text)
    if prose is not None:
        return prose
    reader = _Reader(text, thousands)
    term = reader.answer()
    if reader.peek():
        raise Unreadable(f"unexpected {reader.peek()!r}")
    return term


def text_term(words: str) -> Term:
    """A text answer: words compared without case; a choice such as (C) is its letter."""
    words = " ".join(words.replace("~", " ").split()).strip(" .,;:!")
    if len(words) >= 3 and words[0] == "(" and words[-1] == ")":
        words = words[1:-1].strip()
    if len(words) == 1 and words.isalpha():
        return Term("symbol", value=words)
    return Term("text", value=words.casefold())


_TEXT_GROUP = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm)\s*\{([^{}\\$]*)\}"
)


def _as_prose(text: str) -> Term | None:
    """The text as words, if it is nothing but words."""
    words = _TEXT_GROUP.sub(r" \1 ", text)
    if not re.fullmatch(r"[^\d\\^_=<>+*/{}\[\]|$%&]+", words) or not re.search(
        r"[^\W\d_]{2}", words
    ):
        return None
    pieces = re.findall(r"[^\W\d_]+", words)
    known = [p for p in pieces if p in _PLAIN_FUNCTIONS or p in ("sqrt", "pi", "infinity")]
    separators = [p for p in pieces if p in _SEPARATOR_WORDS]
    long = [p for p in pieces if len(p) >= 4 or p in _SHORT_WORDS or p in _UNITS]
    wrapped = words != text and not re.search(r"[^\W\d_]", _TEXT_GROUP.sub("", text))
    if (
        known
        or separators
        or "," in words
        or not (long or wrapped or len(pieces) > 2 or not words.isascii())
    ):
        return None
    return text_term(words)


class _Reader:
    """Recursive descent over the characters; one pass, no backtracking."""

    def __init__(self, text: str, thousands: bool) -> None:
        self.text = text
        self.position = 0
        self.thousands = thousands
        self.brackets = 0
        self.bars = 0
        self.depth = 0

    # Characters

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
        """The letters that come next, without consuming them."""
        self.peek()
        match = _WORD.match(self.text, self.position)
        return match.group() if match else ""

    def raw_group(self) -> str:
        """Consumes ``{...}`` without commands inside and returns the content."""
        self.expect("{")
        end = self.text.find("}", self.position)
        content = self.text[self.position : end]
        if end < 0 or "{" in content or "\\" in content.replace("\\ ", "").replace("\\,", ""):
            raise Unreadable("text group")
        self.position = end + 1
        return content.replace("\\ ", " ").replace("\\,", " ")

    # Answers

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
        return Term(
            "list", tuple(items), "or" if set(joiners) <= {"or", ","} and "or" in joiners else ","
        )

    def separator(self) -> str:
        """Consumes and names what separates two items, or returns ''."""
        found = ""
        while True:
            if self.take(",") or self.take(";"):
                found = found or ","
                continue
            text = self.upcoming_text().casefold()
            if text in _SEPARATOR_WORDS:
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
        if self.upcoming_text() and self.upcoming_text().casefold() not in _SEPARATOR_WORDS:
            words = self.take_texts()
            if not self.take("="):
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
        if name in _RELATIONS:
            self.position += len(name) + 1
            return _RELATIONS[name]
        return ""

    def operand(self) -> Term:
        """sum (: sum)*, or unions of sets; then a unit"""
        if (self.peek() and self.peek() in _CURRENCY) or self.command() == "$":
            if self.command() == "$":
                self.position += 1
            unit = self.text[self.position]
            self.position += 1
            return Term("quantity", (self.scalar_sum(),), unit)
        if self.upcoming_text() and self.upcoming_text().casefold() not in _SEPARATOR_WORDS:
            return text_term(self.take_texts())
        first = self.sum()
        if self.peek() == ":":
            parts = [first]
            while self.take(":"):
                parts.append(self.scalar_sum())
            return Term("ratio", tuple(parts))
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

    # Text

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
        if name in _TEXT_COMMANDS:
            start = self.position
            self.position += len(name) + 1
            content = self.raw_group().strip() if self.peek() == "{" else ""
            upright_letter = (
                name in ("mathrm", "operatorname", "rm") and len(content) == 1 and content in "eid"
            )
            if not content or upright_letter or content in _PLAIN_FUNCTIONS:
                self.position = start
                return ""
            return content
        word = self.word()
        if word in _PLAIN_FUNCTIONS or word in ("sqrt", "pi", "infinity", "abs", "theta"):
            return ""
        if word in _SEPARATOR_WORDS or word in _UNITS or word in _SHORT_WORDS or len(word) >= 4:
            self.position += len(word)
            return word
        return ""

    def take_texts(self) -> str:
        words = []
        while text := self.take_text():
            words.append(text)
        return " ".join(words)

    def unit(self) -> str:
        """Consumes a unit: text, perhaps with powers and quotients ("cm^2", "m/s", "square units")."""
        text = self.upcoming_text()
        if not text or text.casefold() in _SEPARATOR_WORDS:
            return ""
        pieces = []
        while True:
            text = self.upcoming_text()
            if text and text.casefold() not in _SEPARATOR_WORDS:
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

    # Arithmetic

    def scalar_sum(self) -> Term:
        return _scalar(self.sum())

    def sum(self) -> Term:
        """[sign] product ((+ | - | pm) product)*"""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        total = self.signed_product()
        while True:
            if self.take("+"):
                total = Term("add", (_scalar(total), _scalar(self.product())))
            elif self.take("-"):
                total = Term("add", (_scalar(total), _negative(_scalar(self.product()))))
            elif self.command() in ("pm", "mp"):
                sign = self.command()
                self.position += 3
                total = Term("plus_minus", (_scalar(total), _scalar(self.product())), sign)
            else:
                self.depth -= 1
                return total

    def signed_product(self) -> Term:
        sign = 1
        signed = False
        while self.peek() in ("+", "-") and self.peek():
            sign = -sign if self.peek() == "-" else sign
            if signed:
                raise Unreadable("two signs")
            signed = True
            self.position += 1
        if self.command() in ("pm", "mp") and not signed:
            name = self.command()
            self.position += 3
            return Term(
                "plus_minus",
                (Term("number", value=(Fraction(0), None)), _scalar(self.product())),
                name,
            )
        product = self.product()
        return _negative(_scalar(product)) if sign < 0 else product

    def product(self) -> Term:
        """factor ((cdot | times | / | div | nothing) factor)*"""
        result = self.factor()
        while True:
            name = self.command()
            if name in ("cdot", "times"):
                self.position += len(name) + 1
                result = Term("mul", (_scalar(result), _scalar(self.signed_factor())))
            elif name == "div" or self.peek() == "/":
                self.position += 4 if name else 1
                result = Term("div", (_scalar(result), _scalar(self.signed_factor())))
            elif self.starts_factor():
                result = Term("mul", (_scalar(result), _scalar(self.factor())))
            else:
                return result

    def signed_factor(self) -> Term:
        return _negative(_scalar(self.factor())) if self.take("-") else self.factor()

    def starts_factor(self) -> bool:
        """Whether what comes next continues a product. A digit there ("x 2", "2 3") is no product, and an error later."""
        character = self.peek()
        if not character or self.upcoming_text():
            return False
        if character == "\\":
            name = self.command()
            return (
                name in _LETTERS or name in FUNCTIONS or name in _STYLE_COMMANDS or name in _ACCENTS or name in _TEXT_COMMANDS
                or name in ("frac", "dfrac", "tfrac", "cfrac", "sqrt", "pi", "infty", "binom", "dbinom", "tbinom")
                or name in ("lfloor", "lceil")
            )  # fmt: skip
        if character == "|":
            return self.bars == 0
        return character.isalpha() or character in "({"

    def factor(self) -> Term:
        """primary with powers, subscripts, factorials, percent and degree signs"""
        base = self.primary()
        while True:
            character = self.peek()
            if character == "^":
                self.position += 1
                if self.command() == "circ":
                    self.position += len("\\circ")
                    base = Term("degree", (_scalar(base),))
                elif (
                    degree := re.compile(r"\s*\{\s*\\circ\s*\}").match(self.text, self.position)
                ) is not None:
                    self.position = degree.end()
                    base = Term("degree", (_scalar(base),))
                else:
                    if base.head == "pow" and base.value == "^":
                        raise Unreadable("double superscript")
                    base = Term("pow", (_scalar(base), self.script()), "^")
            elif character == "_":
                base = self.subscripted(base)
            elif character == "!" and self.text[self.position + 1 : self.position + 2] not in (
                "!",
                "=",
            ):
                self.position += 1
                base = Term("factorial", (_scalar(base),))
            elif character == "%" or self.command() == "%":
                self.position += 1 if character == "%" else 2
                base = Term("percent", (_scalar(base),))
            elif self.command() == "degree":
                self.position += len("\\degree")
                base = Term("degree", (_scalar(base),))
            elif character == "'" and base.head == "symbol":
                self.position += 1
                base = Term("symbol", value=base.value + "'")
            elif (
                character == "(" and base.head == "symbol" and base.value[0] in _FUNCTION_LETTERS
            ):  # f(x), P(A): an application, of an unknown function
                argument = self.bracketed()
                base = Term(
                    "call", argument.args if argument.head == "group" else (argument,), base.value
                )
            else:
                return base

    def subscripted(self, base: Term) -> Term:
        self.position += 1
        if self.peek() == "{":
            start, self.position = self.position + 1, self.text.find("}", self.position) + 1
            script = self.text[start : self.position - 1]
        else:
            match = re.compile(r"\d+|[A-Za-z]").match(self.text, self.position)
            script = match.group() if match else ""
            self.position += len(script)
        script = re.sub(r"\\(?:text|mathrm)|[{}\s]", "", script)
        if not re.fullmatch(r"[A-Za-z0-9,+\-]{1,20}", script):
            raise Unreadable("subscript")
        if base.head == "symbol":
            return Term("symbol", value=f"{base.value}_{script}")
        if base.head in ("number", "symbol") and script.isdigit() and 2 <= int(script) <= 36:
            value, places = base.value
            if places is None and value >= 0:
                return Term("based", value=(str(value), int(script)))
        raise Unreadable("subscript of an expression")

    def script(self) -> Term:
        """What follows ``^``: a group, one symbol or command, or a whole (signed) number."""
        if self.peek() == "-":
            self.position += 1
            return _negative(_scalar(self.primary()))
        if self.peek() == "(" or self.command() in FUNCTIONS:
            return _scalar(self.primary())
        return self.argument(whole_numbers=True)

    def argument(self, *, whole_numbers: bool = False) -> Term:
        """A TeX argument: a group in braces, or one digit, letter or command."""
        character = self.peek()
        if character == "{":
            return self.braced()
        if character.isdigit() and not whole_numbers:
            self.position += 1
            return _number(character)
        if character.isalpha() and not self.upcoming_text():
            self.position += 1
            return _letter(character)
        if character.isdigit() or character == "\\":
            return _scalar(self.primary())
        raise Unreadable("argument")

    def braced(self) -> Term:
        """``{sum}``"""
        self.expect("{")
        bars, self.bars = self.bars, 0
        term = self.scalar_sum()
        self.bars = bars
        self.expect("}")
        return term

    def primary(self) -> Term:
        character = self.peek()
        if character.isdigit() or (
            character == "." and self.text[self.position + 1 : self.position + 2].isdigit()
        ):
            return self.number()
        if character in ("(", "["):
            return self.bracketed()
        if character == "{":
            bars, self.bars = self.bars, 0
            self.position += 1
            term = self.answer()
            self.bars = bars
            self.expect("}")
            return term
        if character == "|":
            self.position += 1
            self.bars += 1
            inner = self.scalar_sum()
            self.bars -= 1
            self.expect("|")
            return Term("abs", (inner,))
        if character == "\\":
            return self.command_term(self.command())
        if character.isalpha() and character.isascii():
            word = self.word()
            if word in _PLAIN_FUNCTIONS:
                self.position += len(word)
                return self.function(_PLAIN_FUNCTIONS[word])
            if word in ("sqrt", "abs"):
                self.position += len(word)
                inner = _scalar(self.bracketed()) if self.peek() == "(" else self.number()
                return (
                    Term("abs", (inner,)) if word == "abs" else Term("root", (inner, _number("2")))
                )
            if word in ("pi", "theta", "infinity"):
                self.position += len(word)
                return (
                    Term("symbol", value=word) if word == "theta" else Term("constant", value=word)
                )
            if not self.upcoming_text():
                self.position += 1
                return _letter(character)
        raise Unreadable(f"unexpected {character!r}")

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
            whole, head, tail = repeating.groups()
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
        return _number(
            re.sub(
                r"[{}\\!;:~ ]|(?<=\d)\\?,(?!\d{3})", "", match.group().replace("{,}", ",")
            ).replace(",", "")
        )

    def bracketed(self) -> Term:
        """Round or square brackets: grouping, or with commas a tuple or interval."""
        opening = self.peek()
        self.position += 1
        self.brackets += 1
        bars, self.bars = self.bars, 0
        inner = self.answer()
        self.bars = bars
        self.brackets -= 1
        closing = self.peek()
        if closing not in (")", "]") or not closing:
            raise Unreadable("bracket is not closed")
        self.position += 1
        if inner.head == "list":
            return Term("group", inner.args, opening + closing)
        if (opening, closing) == ("(", ")") or (
            (opening, closing) == ("[", "]") and inner.head == "matrix"
        ):
            return inner
        if (opening, closing) == ("[", "]"):
            return Term("group", (inner,), "[]") if inner.head not in SCALARS else inner
        raise Unreadable("brackets do not match")

    def command_term(self, name: str) -> Term:
        self.position += len(name) + 1
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Term("div", (self.argument(), self.argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Term("binomial", (self.argument(), self.argument()))
        if name == "sqrt":
            index = _number("2")
            if self.take("["):
                index = self.scalar_sum()
                self.expect("]")
            return Term("root", (self.argument(), index))
        if name == "pi":
            return Term("constant", value="pi")
        if name == "infty":
            return Term("constant", value="infinity")
        if name in _LETTERS:
            return Term("symbol", value=name)
        if name in FUNCTIONS:
            return self.function(name)
        if name == "{":
            return self.finite_set()
        if name in ("lfloor", "lceil", "langle"):
            return self.enclosed(name)
        if name in ("emptyset", "varnothing"):
            return Term("set")
        if name == "mathbb":
            return Term("numbers", value=self.raw_group().strip())
        if name in ("angle", "triangle"):
            letters = self.word()
            self.position += len(letters)
            return Term("symbol", value=f"{name} {letters}")
        if name in _STYLE_COMMANDS:
            return self.braced()
        if name in _ACCENTS:
            return Term("symbol", value=f"{name} {self.raw_group().strip()}")
        if name in _TEXT_COMMANDS:
            content = self.raw_group().strip()
            if content in _PLAIN_FUNCTIONS:
                return self.function(_PLAIN_FUNCTIONS[content])
            if len(content) == 1 and content.isalpha():
                return _letter(content)
        if name == "begin":
            return self.matrix()
        raise Unreadable(f"command \\{name}")

    def finite_set(self) -> Term:
        self.brackets += 1
        if self.take("\\}"):
            self.brackets -= 1
            return Term("set")
        inner = self.answer()
        self.brackets -= 1
        self.expect("\\}")
        return Term("set", inner.args if inner.head == "list" else (inner,))

    def enclosed(self, name: str) -> Term:
        self.brackets += 1
        inner = self.answer()
        self.brackets -= 1
        self.expect({"lfloor": "\\rfloor", "lceil": "\\rceil", "langle": "\\rangle"}[name])
        if name == "langle":
            return Term("group", inner.args if inner.head == "list" else (inner,), "()")
        return Term("floor" if name == "lfloor" else "ceil", (_scalar(inner),))

    def matrix(self) -> Term:
        name = self.raw_group()
        if name not in _MATRICES:
            raise Unreadable(f"environment {name}")
        if name == "array":
            self.raw_group()
        rows: list[Term] = []
        self.brackets += 1
        while True:
            cells = [self.sum()]
            while self.take("&"):
                cells.append(self.sum())
            rows.append(Term("row", tuple(cells)))
            if self.take("\\\\") and self.command() != "end":
                continue
            break
        self.brackets -= 1
        self.expect("\\end")
        if self.raw_group() != name or len({len(row.args) for row in rows}) != 1:
            raise Unreadable("matrix")
        return Term("matrix", tuple(rows))

    def function(self, name: str) -> Term:
        """name [_base] [^power] argument: the argument is what is in brackets, or the factors up to the next function."""
        subscript = power = None
        for _ in range(2):
            if self.peek() == "_" and subscript is None:
                self.position += 1
                subscript = self.argument(whole_numbers=True)
            elif self.peek() == "^" and power is None:
                self.position += 1
                power = self.script()
        if self.peek() in ("(", "[") and self.peek():
            inner = self.bracketed()
            arguments = inner.args if inner.head == "group" else (inner,)
        else:
            argument = self.signed_factor()
            while (
                self.starts_factor()
                and self.command() not in FUNCTIONS
                and self.peek() not in ("(", "|")
            ):
                if self.word() in _PLAIN_FUNCTIONS:
                    break
                argument = Term("mul", (_scalar(argument), _scalar(self.factor())))
            if self.peek() == "/" and self.text[self.position + 1 : self.position + 2].isdigit():
                raise Unreadable("argument of a function")  # sin x/2: of x, or of x/2?
            arguments = (argument,)
        for argument in arguments:
            _scalar(argument)
        if subscript is not None:
            if name != "log" or len(arguments) != 1:
                raise Unreadable("subscript of a function")
            arguments = (*arguments, subscript)
        inverse = power is not None and power == _negative(_number("1"))
        if inverse and name in ("sin", "cos", "tan"):
            return Term("call", arguments, f"arc{name}")
        call = Term("call", arguments, name)
        return call if power is None else Term("pow", (call, power))


def _scalar(term: Term) -> Term:
    if term.head not in SCALARS:
        raise Unreadable(f"{term.head} in arithmetic")
    return term


def _negative(term: Term) -> Term:
    return Term("neg", (term,))


def _letter(letter: str) -> Term:
    return Term("constant", value=letter) if letter in ("e", "i") else Term("symbol", value=letter)


def _number(text: str) -> Term:
    """A literal: its value and how many digits it gives after the point (None for an integer)."""
    value = parse_decimal(text)
    if value is None:
        raise Unreadable("number out of bounds")
    mantissa, _, exponent = text.lower().partition("e")
    places = len(mantissa.partition(".")[2]) - int(exponent or 0) if "." in mantissa else None
    return Term("number", value=(value, places))


_UNIT_NAMES = {
    "dollar": "$", "dollars": "$", "usd": "$", "degree": "°", "degrees": "°", "deg": "°", "percent": "%",
    "centimeters": "cm", "centimeter": "cm", "centimetres": "cm", "meters": "m", "meter": "m", "metres": "m",
    "kilometers": "km", "kilometer": "km", "inches": "in", "inch": "in", "feet": "ft", "foot": "ft", "miles": "mi",
    "mile": "mi", "hours": "h", "hour": "h", "hrs": "h", "hr": "h", "minutes": "min", "minute": "min", "mins": "min",
    "seconds": "s", "second": "s", "sec": "s", "secs": "s", "kilograms": "kg", "grams": "g", "gram": "g",
    "radians": "rad", "units": "unit", "liters": "l", "litres": "l", "years": "year", "days": "day",
}  # fmt: skip


def unit_name(unit: str) -> str:
    """One spelling per unit: "square centimeters" and "cm^2" are the same."""
    words = re.sub(r"\s*([/^.])\s*", r"\1", unit.strip(" .").replace(" per ", "/")).split()
    power = ""
    if words and words[0].casefold() in ("square", "sq", "cubic", "cu") and len(words) > 1:
        power = "^2" if words[0].casefold().startswith("sq") else "^3"
        words = words[1:]
    named = [
        re.sub(r"[A-Za-z]+", lambda m: _UNIT_NAMES.get(m[0].casefold(), m[0]), word)
        for word in words
    ]
    return " ".join(named) + power
