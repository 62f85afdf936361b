r"""Numbers as people and models write them, read exactly: Fractions, never floats.

Signs (with the Unicode minus), thousands separators, decimals, fractions, mixed numbers, vulgar fractions, percent,
currency, scientific notation (``1.2e5``, ``3 \times 10^{4}``), digits of any script. Sizes are bounded before anything
is computed. A thing that looks like a number and is none (``1.2.3``, ``12:00``, ``3/0``, the 2 of ``\sqrt{2}``) is
reported as such, so that no other number is taken in its place.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 2000
MAX_EXPONENT = 2000

_MINUS = dict.fromkeys(
    "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"
)  # not the em dash: it is punctuation
_SPACES = dict.fromkeys("\u00a0\u2007\u2008\u2009\u200a\u202f", "\u2009")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060-\u2063\u2066-\u2069\ufeff]")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\+([$%])", r"\1"),
        (r"(?<=\d)(?:\{,\}|,\\!)(?=\d)", ","),
        (r"(?<=\d)(?:\u2009|\\[,!;: ])(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)['’_](?=\d{3}(?!\d))", ""),
        (  # 1.234.567 and 1.234,5, which can be read in one way only
            r"(?<![\w.,])\d{1,3}(?:(?:\.\d{3}){2,}(?:,\d+)?|\.\d{3},\d+)(?![\w/]|[.,]\d)",
            lambda m: m[0].replace(".", "").replace(",", "."),
        ),
        (  # "minus 3" is -3, but not in "5 minus 3"
            r"([\d)\]}%] ?)?\b(?:[Mm]inus|[Nn]egative) (?=[\d.])",
            lambda m: f"{m[1]}- " if m[1] else "-",
        ),
        (r"(?<![\w.,/])\d{1,3}(?: \d{3})+(?![\w/]|[.,]\d)", lambda m: m[0].replace(" ", "")),
        (r"10([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda m: "10^" + m[1].translate(_SUPERSCRIPTS)),
        (r"(\d?)[ ]?\\[dtc]?frac[ ]?\{[ ]?(\d+)[ ]?\}[ ]?\{[ ]?(\d+)[ ]?\}", r"\1 \2/\3"),
        (r"(\d?)[ ]?\\[dtc]?frac[ ]?(\d)[ ]?(\d)(?!\d)", r"\1 \2/\3"),
        (
            r"(?<=\d)[ ]?(?:\\times|\\cdot|[×·*xX])[ ]?10[ ]?(?:\^|\*\*)[ ]?[{(]?([-+]?\d+)[)}]?",
            r"E\1",
        ),
        (r"(?<![\w.^{/])10[ ]?(?:\^|\*\*)[ ]?(?:\{([-+]?\d+)\}|([-+]?\d+))", r"1E\1\2"),
        (r"(?:\bUS)?[$€£¥₹]|\b(?:USD|EUR|GBP|JPY|CNY|INR)\b", "¤"),
        (r"(?<=[-+])[ ]?¤[ ]?(?=[\d.])", ""),
        (r"¤", " "),
        (r"(?<=[-+])[ ]+(?=\d+/\d)", ""),  # the space put before a fraction above
    )
)
_UNWRAP = re.compile(r"\\(?:boxed|fbox|text|textbf|mathrm|mathbf)[ ]?\{([^{}]*)\}")
_CANDIDATE = re.compile(r"(?:\d+[ \t]+(?=\d+/\d))?(?:\d|\.\d)[\d.,:/]*(?:[eE][-+]?\d+)?")
_AFTER = re.compile(r"(?:\^\\circ|\^\{\\circ\}|\\degree|°)?(?P<percent>[ ]?%|[ ]per[ ]?cent\b)?")
# A number followed by these is part of a larger expression, not the answer.
_CONTINUES = re.compile(
    r"[ ]?\\(?!q?quad|text|mathrm|mbox)[a-zA-Z]|[\^}√π∞²³¹⁰⁴-⁹]|[xX][0-9a-fA-F]"
    r"|[xyzniKkMB](?![a-zA-Z])|[ ](?:hundred|thousand|million|billion|trillion)\b"
)
_DENIED = re.compile(r"(?:\bnot|n't|≠|\\neq?|!=)\s*$")
# Words that make the one number beside them no answer.
_HEDGE = re.compile(
    r"\b(?:not|never|neither|wrong|incorrect|false|or|maybe|except|between|(?:more|less|greater|fewer) than"
    r"|at (?:least|most))\b"
    r"|n't|[≠<>≤≥]|!=|\\(?:neq?|leq?|geq?|lt|gt)(?![a-zA-Z])",
    re.IGNORECASE,
)
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}")
_SIGNED = re.compile(r"([-+])([ \t]?)$")


@dataclasses.dataclass(frozen=True)
class Number:
    """A number: its exact value as written, and whether a percent sign followed (not yet divided by 100)."""

    value: Fraction
    percent: bool = False

    def values(self) -> tuple[Fraction, ...]:
        """The values it stands for: 50% is 0.5, and 50 where a percentage was asked for (0.5% is never 0.5)."""
        if not self.percent:
            return (self.value,)
        return (self.value / 100,) if 0 < abs(self.value) < 1 else (self.value, self.value / 100)


@dataclasses.dataclass(frozen=True)
class Found:
    """Something that looks like a number, at ``start:end`` of the text; ``number`` is None when it is none."""

    number: Number | None
    start: int
    end: int


def parse_decimal(text: str) -> Fraction | None:
    """Reads ``12``, ``1,234.5``, ``.5``, ``1.5e-3`` or ``3/4``, unsigned; None for anything else or out of bounds."""
    if len(text) > MAX_DIGITS:
        return None
    numerator, slash, denominator = text.partition("/")
    if slash:
        top, bottom = parse_decimal(numerator), parse_decimal(denominator)
        return None if top is None or not bottom or "/" in denominator else top / bottom
    mantissa, _, exponent = text.replace("E", "e").partition("e")
    power = int(exponent or 0) if len(exponent) < 8 else MAX_EXPONENT + 1
    whole, _, fraction = mantissa.partition(".")
    if "," in whole:
        if not _GROUPED.fullmatch(whole):
            return None
        whole = whole.replace(",", "")
    digits = whole + fraction
    if not (digits.isascii() and digits.isdigit()) or abs(power) > MAX_EXPONENT:
        return None
    power -= len(fraction)
    return Fraction(int(digits) * 10**power) if power >= 0 else Fraction(int(digits), 10**-power)


def normalise(text: str) -> str:
    """Rewrites scripts, LaTeX and currency into the plain spelling that ``find_numbers`` reads."""
    if not text.isascii():
        text = "".join(map(_plain_character, _INVISIBLE.sub("", text)))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    if "\\" in text:
        for _ in range(3):
            text = _UNWRAP.sub(r" \1 ", text)
    return text


def _plain_character(character: str) -> str:
    if character in _MINUS:
        return "-"
    if character in _SPACES:
        return "\u2009"
    category = unicodedata.category(character)
    if category == "Nd":
        return str(unicodedata.decimal(character))
    if category == "No" and "\u2044" in (plain := unicodedata.normalize("NFKC", character)):
        return " " + plain.replace(
            "\u2044", "/"
        )  # a vulgar fraction; the space makes 1½ a mixed number
    if "\uff01" <= character <= "\uff5e":  # full-width ASCII
        return chr(ord(character) - 0xFEE0)
    return character


def find_numbers(text: str) -> list[Found]:
    """Returns everything in normalised text that looks like a number, in order. Digits inside identifiers do not."""
    found = []
    for match in _CANDIDATE.finditer(text):
        start, body = match.start(), match.group()
        trimmed = body.rstrip(".,:/")
        end = start + len(trimmed)
        before = text[max(0, start - 3) : start]
        if before[-1:].isalpha() or before[-1:] == "_":
            continue  # x2, step_3
        pieces = trimmed.split(",")
        if len(pieces) > 1 and not _GROUPED.match(trimmed):
            trimmed, before = pieces[-1], ","  # a list without spaces
            start = end - len(trimmed)
        sign, signed_from = _sign(text, start)
        after = _AFTER.match(text, end)
        assert after is not None  # every part is optional
        number = None
        if not (
            before[-1:] in ("^", "√", "{")
            or before[-2:] in ("--", "-+", "+-", "++")
            or _DENIED.search(text, max(0, signed_from - 8), signed_from)
            or (before[-1:] == "(" and before[-2:-1].isalpha())
            or _CONTINUES.match(text, after.end())
            or ":" in trimmed
        ):
            value = _mixed(trimmed)
            if value is not None:
                number = Number(
                    -value if sign == "-" else value, after.group("percent") is not None
                )
        found.append(Found(number, signed_from, after.end()))
    return found


def _mixed(text: str) -> Fraction | None:
    *whole, fraction = text.split()
    value = parse_decimal(fraction)
    if whole and value is not None:
        integer = parse_decimal(whole[0])
        return None if integer is None else integer + value
    return value


def _sign(text: str, start: int) -> tuple[str, int]:
    """Returns the sign before a number and where it starts: 5-3 and 5 - 3 hold no sign, x = -3 does."""
    match = _SIGNED.search(text, max(0, start - 2), start)
    if match is None:
        return "", start
    space_after, earlier = bool(match.group(2)), text[max(0, match.start() - 16) : match.start()]
    previous = earlier.rstrip(" \t")[-1:]
    operand = previous.isalnum() or previous in (")", "]", "}", "%")
    spaced = earlier[-1:].isspace()
    if space_after:  # "- 3" is a sign only right after a symbol such as = or :, never after a line break (a list)
        binary = operand or previous in ("", "\n")
    else:
        binary = operand and not spaced
    return ("", start) if binary else (match.group(1), match.start())


def whole_number(text: str) -> Number | None:
    """Returns the number that the text is, apart from space and one final full stop; None if there is anything else."""
    text = normalise(text)
    found = find_numbers(text)
    if len(found) != 1:
        return None
    before, after = text[: found[0].start].strip(), text[found[0].end :].strip()
    return found[0].number if not before and after in ("", ".") else None


def last_number(text: str) -> Number | None:
    """Returns the last thing that looks like a number; None if there is none or if that one is malformed."""
    found = find_numbers(normalise(text))
    return found[-1].number if found else None


def only_number(text: str) -> Number | None:
    """Returns the one number in the text, after its last ``=`` if it has one; None if there are none or several."""
    if _HEDGE.search(text):
        return None
    found = find_numbers(normalise(text.rpartition("=")[2]))
    return found[0].number if len(found) == 1 else None
