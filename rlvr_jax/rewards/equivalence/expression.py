"""What an expression is made of: sums, products, powers, brackets. Commands and what stands between them: ``commands``,
``grammar``."""

from __future__ import annotations

import abc
import re

from rlvr_jax.rewards.equivalence.scanner import TEXT_COMMANDS, Scanner
from rlvr_jax.rewards.equivalence.terms import (
    SCALARS,
    Term,
    Unreadable,
    letter_term,
    negative,
    number_term,
    scalar,
)
from rlvr_jax.rewards.equivalence.words import LETTERS, PLAIN_FUNCTIONS, PLAIN_NAMES

MAX_DEPTH = 80
MAX_OPERATIONS = 250  # terms are nested as deep as a sum is long
FUNCTIONS = frozenset({
    "Im", "Re", "arccos", "arccot", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "coth", "csc", "deg",
    "det", "exp", "gcd", "lcm", "lg", "ln", "log", "max", "min", "sec", "sin", "sinh", "tan", "tanh",
})  # fmt: skip
STYLE_COMMANDS = frozenset({
    "bm", "bold", "boldsymbol", "mathbf", "mathcal", "mathit", "mathsf",
})  # fmt: skip
ACCENTS = frozenset({
    "bar", "hat", "overline", "overrightarrow", "tilde", "vec", "widehat",
})  # fmt: skip
FUNCTION_LETTERS = frozenset("fghFGHPE")


class Expression(Scanner, abc.ABC):
    """Recursive descent; each method reads what its docstring says."""

    @abc.abstractmethod
    def answer(self) -> Term:
        """What may stand in brackets: a whole answer."""

    @abc.abstractmethod
    def command_term(self, name: str) -> Term:
        """What begins with the command ``name``."""

    @abc.abstractmethod
    def function(self, name: str) -> Term:
        """What follows the name of a function."""

    def scalar_sum(self) -> Term:
        return scalar(self.sum())

    def sum(self) -> Term:
        """[sign] product ((+ | - | pm) product)*"""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        total = self.signed_product()
        while True:
            if self.take("+"):
                total = Term("add", (scalar(total), scalar(self.product())))
            elif self.take("-"):
                total = Term("add", (scalar(total), negative(scalar(self.product()))))
            elif self.command() in ("pm", "mp"):
                sign = self.command()
                self.position += 3
                total = Term("plus_minus", (scalar(total), scalar(self.product())), sign)
            else:
                self.depth -= 1
                return total

    def signed_product(self) -> Term:
        """[+ | - | pm] product"""
        sign = self.peek() if self.peek() in ("+", "-") else self.command()
        if sign in ("pm", "mp"):
            self.position += 3
            return Term("plus_minus", (number_term("0"), scalar(self.product())), sign)
        if sign in ("+", "-"):
            self.position += 1
        product = self.product()  # a second sign is an error there
        return negative(scalar(product)) if sign == "-" else product

    def product(self) -> Term:
        """factor ((cdot | times | / | div | nothing) factor)*"""
        result = self.factor()
        while True:
            self.operations += 1
            if self.operations > MAX_OPERATIONS:
                raise Unreadable("too many operations")
            name = self.command()
            if name in ("cdot", "times"):
                self.position += len(name) + 1
                result = Term("mul", (scalar(result), scalar(self.signed_factor())))
            elif name == "div" or self.peek() == "/":
                self.position += 4 if name else 1
                result = Term("div", (scalar(result), scalar(self.signed_factor())))
            elif self.starts_factor():
                result = Term("mul", (scalar(result), scalar(self.factor())))
            else:
                return result

    def signed_factor(self) -> Term:
        return negative(scalar(self.factor())) if self.take("-") else self.factor()

    def starts_factor(self) -> bool:
        """Whether what comes next continues a product; a digit ("x 2", "2 3") does not, and is an error later."""
        character = self.peek()
        if not character or self.upcoming_text():
            return False
        if character == "\\":
            name = self.command()
            return (
                name in LETTERS or name in FUNCTIONS or name in STYLE_COMMANDS or name in ACCENTS
                or name in TEXT_COMMANDS or name in ("frac", "dfrac", "tfrac", "cfrac", "sqrt", "pi", "infty")
                or name in ("binom", "dbinom", "tbinom", "lfloor", "lceil")
            )  # fmt: skip
        if character == "|":
            return self.bars == 0
        return character.isalpha() or character in "({"

    def factor(self) -> Term:
        """primary with powers, subscripts, factorials, percent and degree signs"""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        base = self.primary()
        self.depth -= 1
        scripted = False
        while True:
            character = self.peek()
            if character == "^":
                self.position += 1
                if self.command() == "circ":
                    self.position += len("\\circ")
                    base = Term("degree", (scalar(base),))
                elif (
                    degree := re.compile(r"\s*\{\s*\\circ\s*\}").match(self.text, self.position)
                ) is not None:
                    self.position = degree.end()
                    base = Term("degree", (scalar(base),))
                else:
                    if scripted:
                        raise Unreadable("double superscript")
                    scripted = True
                    base = Term("pow", (scalar(base), self.script()))
            elif character == "_":
                base = self.subscripted(base)
            elif character == "!" and self.text[self.position + 1 : self.position + 2] not in (
                "!",
                "=",
            ):
                self.position += 1
                base = Term("factorial", (scalar(base),))
                if self.peek().isdigit():  # 3!7!: nothing else can be meant
                    base = Term("mul", (base, scalar(self.factor())))
            elif character == "%" or self.command() == "%":
                self.position += 1 if character == "%" else 2
                base = Term("percent", (scalar(base),))
            elif self.command() == "degree":
                self.position += len("\\degree")
                base = Term("degree", (scalar(base),))
            elif character == "'" and base.head == "symbol":
                self.position += 1
                base = Term("symbol", value=base.value + "'")
            elif (
                character == "(" and base.head == "symbol" and base.value[0] in FUNCTION_LETTERS
            ):  # f(x), P(A): an application, of an unknown function
                argument = self.bracketed()
                base = Term(
                    "call", argument.args if argument.head == "group" else (argument,), base.value
                )
            elif character == "(" and is_inverse_function(base):
                argument = self.bracketed()
                base = Term("call", (argument,), base.args[0].value + "^-1")
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
            return negative(scalar(self.primary()))
        if self.peek() == "(" or self.command() in FUNCTIONS:
            return scalar(self.primary())
        return self.argument(whole_numbers=True)

    def argument(self, *, whole_numbers: bool = False) -> Term:
        """A TeX argument: a group in braces, or one digit, letter or command."""
        character = self.peek()
        if character == "{":
            return self.braced()
        if character.isdigit() and not whole_numbers:
            self.position += 1
            return number_term(character)
        if character.isalpha() and not self.upcoming_text():
            self.position += 1
            return letter_term(character)
        if character.isdigit() or character == "\\":
            return scalar(self.primary())
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
            if word in PLAIN_FUNCTIONS:
                self.position += len(word)
                return self.function(PLAIN_FUNCTIONS[word])
            if word in ("sqrt", "abs"):
                self.position += len(word)
                inner = scalar(self.bracketed()) if self.peek() == "(" else self.number()
                args = (inner,) if word == "abs" else (inner, number_term("2"))
                return Term("abs" if word == "abs" else "root", args)
            if word in PLAIN_NAMES:
                self.position += len(word)
                return Term("symbol" if word in LETTERS else "constant", value=word)
            if not self.upcoming_text():
                self.position += 1
                return letter_term(character)
        raise Unreadable(f"unexpected {character!r}")

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


def is_inverse_function(term: Term) -> bool:
    """``f^{-1}``"""
    return (
        term.head == "pow"
        and term.args[0].head == "symbol"
        and term.args[0].value in FUNCTION_LETTERS
        and term.args[1] == negative(number_term("1"))
    )
