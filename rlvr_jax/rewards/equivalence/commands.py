"""What begins with a command: fractions, roots, functions, sets, matrices."""

from __future__ import annotations

import re

from rlvr_jax.rewards.equivalence.expression import ACCENTS, FUNCTIONS, STYLE_COMMANDS, Expression
from rlvr_jax.rewards.equivalence.scanner import TEXT_COMMANDS
from rlvr_jax.rewards.equivalence.terms import (
    Term,
    Unreadable,
    letter_term,
    negative,
    number_term,
    scalar,
)
from rlvr_jax.rewards.equivalence.words import LETTERS, PLAIN_FUNCTIONS

MATRICES = frozenset({
    "Bmatrix", "array", "bmatrix", "matrix", "pmatrix", "smallmatrix",
})  # fmt: skip
_SET_BUILDER = re.compile(
    r"\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?(?:\\mid(?![a-zA-Z])|:|\|)"
)


class Commands(Expression):
    """The commands the grammar knows; any other makes the text unreadable."""

    def command_term(self, name: str) -> Term:
        self.position += len(name) + 1
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return Term("div", (self.argument(), self.argument()))
        if name in ("binom", "dbinom", "tbinom"):
            return Term("binomial", (self.argument(), self.argument()))
        if name == "sqrt":
            index = number_term("2")
            if self.take("["):
                index = self.scalar_sum()
                self.expect("]")
            return Term("root", (self.argument(), index))
        if name == "pi":
            return Term("constant", value="pi")
        if name == "infty":
            return Term("constant", value="infinity")
        if name in LETTERS:
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
        if name in STYLE_COMMANDS:
            return self.braced()
        if name in ACCENTS:
            return Term("symbol", value=f"{name} {self.accented()}")
        if name in TEXT_COMMANDS:
            content = self.raw_group().strip()
            if content in PLAIN_FUNCTIONS:
                return self.function(PLAIN_FUNCTIONS[content])
            if len(content) == 1 and content.isalpha():
                return letter_term(content)
        if name == "begin":
            return self.matrix()
        raise Unreadable(f"command \\{name}")

    def accented(self) -> str:
        """What stands under an accent: ``{AB}``, or one letter."""
        letter = self.peek()
        if not (letter.isalpha() and letter.isascii()):
            return self.raw_group().strip()
        self.position += 1
        return letter

    def finite_set(self) -> Term:
        builder = _SET_BUILDER.match(self.text, self.position)
        if builder is not None:  # {x | x > 2} is what its condition says
            self.position = builder.end()
            condition = self.answer()
            self.expect("\\}")
            return condition
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
        return Term("floor" if name == "lfloor" else "ceil", (scalar(inner),))

    def matrix(self) -> Term:
        name = self.raw_group()
        if name not in MATRICES:
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
        """name [_base] [^power] argument: what is in brackets, or the factors up to the next function."""
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
                if self.word() in PLAIN_FUNCTIONS:
                    break
                argument = Term("mul", (scalar(argument), scalar(self.factor())))
            if self.peek() == "/" and self.text[self.position + 1 : self.position + 2].isdigit():
                raise Unreadable("argument of a function")  # sin x/2: of x, or of x/2?
            arguments = (argument,)
        for argument in arguments:
            scalar(argument)
        if subscript is not None:
            if name != "log" or len(arguments) != 1:
                raise Unreadable("subscript of a function")
            arguments = (*arguments, subscript)
        inverse = power is not None and power == negative(number_term("1"))
        if inverse and name in ("sin", "cos", "tan"):
            return Term("call", arguments, f"arc{name}")
        call = Term("call", arguments, name)
        return call if power is None else Term("pow", (call, power))
