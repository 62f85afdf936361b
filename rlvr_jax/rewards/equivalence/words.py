"""Words in and around answers: functions, units, and the difference between a word and a product of symbols."""

from __future__ import annotations

import re

from rlvr_jax.rewards.equivalence.terms import Term, Unreadable, text_term

_SAME_NAME = (
    "sin", "cos", "tan", "cot", "sec", "csc", "ln", "log", "exp", "gcd", "lcm", "arcsin", "arccos", "arctan", "sinh",
    "cosh", "tanh",
)  # fmt: skip
# Functions written without a backslash. Not min: in an answer it is minutes.
PLAIN_FUNCTIONS = {
    **{name: name for name in _SAME_NAME},
    **{"asin": "arcsin", "acos": "arccos", "atan": "arctan"},
}
LETTERS = frozenset({
    "Delta", "Gamma", "Lambda", "Omega", "Phi", "Pi", "Psi", "Sigma", "Theta", "Xi", "alpha", "beta", "chi",
    "delta", "ell", "epsilon", "eta", "gamma", "hbar", "iota", "kappa", "lambda", "mu", "nu", "omega",
    "phi", "psi", "rho", "sigma", "tau", "theta", "upsilon", "varepsilon", "varphi", "varrho", "vartheta",
    "xi", "zeta",
})  # fmt: skip
PLAIN_NAMES = frozenset(
    {"sqrt", "abs", "pi", "infinity", *(name for name in LETTERS if len(name) > 3)}
)
NAMES_BEFORE_LETTERS = frozenset({"sin", "cos", "tan", "ln", "log", "pi"})
SCALES = {
    "dozen": "12",
    "hundred": "100",
    "thousand": "1000",
    "million": "1000000",
    "billion": "1000000000",
    "trillion": "1000000000000",
}
SEPARATOR_WORDS = frozenset({
    "and", "or",
})  # fmt: skip
CURRENCY = {"$": "$", "€": "€", "£": "£", "¥": "¥"}
UNITS = frozenset({
    "AM", "EUR", "GBP", "Hz", "MJ", "PM", "USD", "am", "cm", "deg", "dm", "eV", "ft", "hr", "hrs", "kHz",
    "kJ", "kW", "kg", "km", "kmh", "kph", "lb", "lbs", "mL", "mg", "mi", "min", "mins", "ml", "mm", "mol",
    "mph", "ms", "nd", "nm", "oz", "pm", "rad", "rd", "sec", "secs", "sq", "st", "th", "yd",
})  # fmt: skip
SHORT_WORDS = frozenset({
    "All", "DNE", "No", "None", "Odd", "Yes", "all", "any", "for", "no", "none", "not", "odd", "one", "red", "six",
    "ten", "the", "two", "yes",
})  # fmt: skip
UNIT_LETTERS = frozenset("msghlLNJWVAKCFT°.")
# Words after a value that are no unit: they change it, or take it back.
_NO_UNIT = frozenset({
    "or", "and", "not", "but", "maybe", "nor", "wait", "actually", "approximately", "except", "half", "halves",
    "third", "thirds", "quarter", "quarters", "fourths", "fifths", "sixths", "eighths", "tenths", "hundredths",
    "thousandths", "hundreds", "thousands", "millions", "dozens", "squared", "cubed", "factorial", "times", "plus",
    "minus", "over", "divided", "point", "root", "power", "pi", "false", "wrong", "incorrect",
})  # fmt: skip
UNIT_NAMES = {
    "newtons": "N", "newton": "N", "joules": "J", "joule": "J", "watts": "W", "watt": "W", "volts": "V", "volt": "V",
    "p.m": "pm", "a.m": "am", "kmh": "km/h", "kph": "km/h", "liter": "l", "litre": "l",
    "euro": "€", "euros": "€", "eur": "€", "pounds": "£", "gbp": "£",
    "dollar": "$", "dollars": "$", "usd": "$", "degree": "°", "degrees": "°", "deg": "°", "percent": "%",
    "centimeters": "cm", "centimeter": "cm", "centimetres": "cm", "meters": "m", "meter": "m", "metres": "m",
    "kilometers": "km", "kilometer": "km", "inches": "in", "inch": "in", "feet": "ft", "foot": "ft", "miles": "mi",
    "mile": "mi", "hours": "h", "hour": "h", "hrs": "h", "hr": "h", "minutes": "min", "minute": "min", "mins": "min",
    "seconds": "s", "second": "s", "sec": "s", "secs": "s", "kilograms": "kg", "grams": "g", "gram": "g",
    "radians": "rad", "units": "unit", "liters": "l", "litres": "l", "years": "year", "days": "day",
}  # fmt: skip
_TEXT_GROUP = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm)\s*\{([^{}\\$]*)\}"
)


def as_prose(text: str) -> Term | None:
    """The text as words, if it is nothing but words."""
    words = _TEXT_GROUP.sub(r" \1 ", text)
    if not re.fullmatch(r"[^\d\\^_=<>+*/{}\[\]|$%&]+", words) or not re.search(
        r"[^\W\d_]{2}", words
    ):
        return None
    pieces = re.findall(r"[^\W\d_]+", words)
    names = PLAIN_NAMES | NAMES_BEFORE_LETTERS | PLAIN_FUNCTIONS.keys()
    known = [
        p for p in pieces if p in names or (p[:-1] in NAMES_BEFORE_LETTERS and p[-1] in "xyzrn")
    ]
    separators = [p for p in pieces if p in SEPARATOR_WORDS]
    long = [p for p in pieces if len(p) >= 4 or p in SHORT_WORDS or p in UNITS]
    wrapped = words != text and not re.search(r"[^\W\d_]", _TEXT_GROUP.sub("", text))
    if (
        known
        or separators
        or "," in words
        or not (long or wrapped or len(pieces) > 2 or not words.isascii())
    ):
        return None
    return text_term(words)


def check_unit(text: str) -> None:
    """Raises Unreadable if the text after a value is more than a unit, such as another value or a doubt."""
    words = {word.casefold() for word in text.split()}
    if (
        re.search(r"\d(?<![a-z][23])", text)
        or words & _NO_UNIT
        or (len(text) == 1 and text not in UNIT_LETTERS)
    ):
        raise Unreadable("no unit")


def unit_name(unit: str) -> str:
    """One spelling per unit: "square centimeters" and "cm^2" are the same."""
    words = re.sub(r"\s*([/^.])\s*", r"\1", unit.strip(" .").replace(" per ", "/")).split()
    power = ""
    if words and words[0].casefold() in ("square", "sq", "cubic", "cu") and len(words) > 1:
        power = "^2" if words[0].casefold().startswith("sq") else "^3"
        words = words[1:]
    named = [
        re.sub(r"[A-Za-z]+", lambda m: UNIT_NAMES.get(m[0].casefold(), m[0]), word)
        for word in words
    ]
    return " ".join(named) + power
