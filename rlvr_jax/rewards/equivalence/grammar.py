r"""A reader of mathematical answers in LaTeX or plain text. It reads all of the text by its grammar, or nothing.

``parse`` gives a term or raises ``Unreadable``: there is no recovery, so a number inside broken LaTeX is never
salvaged, and no text is ever evaluated. The grammar is an allow-list: an unknown command makes the answer unreadable.

The terms are described in ``terms``.
"""

from __future__ import annotations

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
    text_term,
)
from rlvr_jax.rewards.equivalence.words import (
    CURRENCY,
    LETTERS,
    PLAIN_FUNCTIONS,
    PLAIN_NAMES,
    SCALES,
    SEPARATOR_WORDS,
    as_prose,
    check_unit,
    unit_name,
)

MAX_LENGTH = 2000
MAX_DEPTH = 80
MAX_OPERATIONS = 250  # terms are nested as deep as a sum is long
FUNCTIONS = frozenset({
    "Im", "Re", "arccos", "arccot", "arcsin", "arctan", "arg", "cos", "cosh", "cot", "coth", "csc", "deg",
    "det", "exp", "gcd", "lcm", "lg", "ln", "log", "max", "min", "sec", "sin", "sinh", "tan", "tanh",
})  # fmt: skip
RELATIONS = {
    "le": "<=", "leq": "<=", "leqslant": "<=", "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">",
    "ne": "!=", "neq": "!=", "in": "in", "approx": "=", "equiv": "==",
}  # fmt: skip
STYLE_COMMANDS = frozenset({
    "bm", "bold", "boldsymbol", "mathbf", "mathcal", "mathit", "mathsf",
})  # fmt: skip
ACCENTS = frozenset({
    "bar", "hat", "overline", "overrightarrow", "tilde", "vec", "widehat",
})  # fmt: skip
MATRICES = frozenset({
    "Bmatrix", "array", "bmatrix", "matrix", "pmatrix", "smallmatrix",
})  # fmt: skip
_SET_BUILDER = re.compile(
    r"\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\s*\{R\}\s*)?(?:\\mid(?![a-zA-Z])|:|\|)"
)
_CHOICE = re.compile(  # (B) 12
    r"(?:\\text(?:bf|rm)?\s*\{\s*\(?([A-E])[).:]\s*\}|([A-E])[).:]\s|\(([A-E])\)(?=\s*[\d$]))"
    r"[\s~]*(?:\\q?quad|\\[ ,;:])*(?=[\w\\($-])"
)
FUNCTION_LETTERS = frozenset("fghFGHPE")


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


class _Reader(Scanner):
    """Recursive descent; each method reads what its docstring says."""

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
        return Term("list", tuple(items), "or" if set(joiners) == {"or"} else ",")

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
            return Term("symbol", value=f"{name} {self.raw_group().strip()}")
        if name in TEXT_COMMANDS:
            content = self.raw_group().strip()
            if content in PLAIN_FUNCTIONS:
                return self.function(PLAIN_FUNCTIONS[content])
            if len(content) == 1 and content.isalpha():
                return letter_term(content)
        if name == "begin":
            return self.matrix()
        raise Unreadable(f"command \\{name}")

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


def is_inverse_function(term: Term) -> bool:
    """``f^{-1}``"""
    return (
        term.head == "pow"
        and term.args[0].head == "symbol"
        and term.args[0].value in FUNCTION_LETTERS
        and term.args[1] == negative(number_term("1"))
    )
