"""Values of scalar terms: exact rationals where they are rational, else numbers of high precision at chosen points.

Two scalars are equal when they agree exactly, or (with radicals, functions or symbols) numerically at two precisions
and at several points. Comparison is relative: 1/2004! and 1/2006! differ. Symbols are real; a point where a side is not
real (the square root of a negative number) is no evidence either way, so sqrt(1/n) = 1/sqrt(n) and |x| != x. Sizes are
bounded before anything is computed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rlvr_jax.rewards.equivalence.terms import Term

MAX_BITS = 100_000
MAX_FACTORIAL = 5_000
MAX_LOG_POWER = 1e6
MIN_ROUNDED_DIGITS = 6

# Irregular points: an identity that holds at these by accident is out of the question. Positive ones decide first.
_POINTS = (2.718377, 0.731861, 5.193739, 1.347171, 3.638127)
_SIGNS = ("+", "+", "+", "-", "~")


class Undefined(ValueError):
    """The term has no value: division by zero, an unknown function, not real, or out of bounds."""


def exact(term: Term) -> Fraction | None:
    """Returns the value of a rational constant, or None if it is not one (or too large to write out).

    Raises:
      Undefined: it divides by zero.
    """
    head, args = term.head, term.args
    if head == "number":
        return term.value[0]
    if head in ("symbol", "constant", "call", "degree", "plus_minus"):
        return None
    values = [exact(argument) for argument in args]
    if any(value is None for value in values):
        return None
    return _exact_operation(head, [value for value in values if value is not None])


def _exact_operation(head: str, values: list[Fraction]) -> Fraction | None:
    first, last = values[0], values[-1]
    if head == "add":
        return first + last
    if head == "mul":
        return _bounded(first * last)
    if head == "neg":
        return -first
    if head == "percent":
        return first / 100
    if head == "div":
        if last == 0:
            raise Undefined("division by zero")
        return _bounded(first / last)
    if head == "pow":
        return _exact_power(first, last)
    if head == "root":
        return _exact_root(first, last)
    if head == "abs":
        return abs(first)
    if head in ("floor", "ceil"):
        return Fraction(math.floor(first) if head == "floor" else math.ceil(first))
    if head == "factorial" and first.denominator == 1 and 0 <= first <= MAX_FACTORIAL:
        return Fraction(math.factorial(int(first)))
    if (
        head == "binomial"
        and first.denominator == last.denominator == 1
        and 0 <= last <= first <= MAX_FACTORIAL
    ):
        return Fraction(math.comb(int(first), int(last)))
    return None


def _bounded(value: Fraction) -> Fraction | None:
    return (
        value
        if max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS
        else None
    )


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0 and exponent <= 0:
        if exponent < 0:
            raise Undefined("division by zero")
        return Fraction(1)
    if exponent.denominator != 1:
        root = _exact_root(base, Fraction(exponent.denominator)) if base > 0 else None
        return None if root is None else _exact_power(root, Fraction(exponent.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and bits * abs(exponent) > MAX_BITS:
        return None
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    return base ** int(exponent)


def _exact_root(value: Fraction, index: Fraction) -> Fraction | None:
    """The real root when it is rational: of non-negative values, and odd ones of negative values."""
    if index.denominator != 1 or not 2 <= index <= 64:
        return None
    n = int(index)
    if value < 0:
        root = _exact_root(-value, index) if n % 2 else None
        return None if root is None else -root
    top, bottom = _integer_root(value.numerator, n), _integer_root(value.denominator, n)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, n: int) -> int | None:
    if n == 2:
        root = math.isqrt(value)
    else:
        if value.bit_length() > 4096:
            return None
        low, high = 0, 1 << (value.bit_length() // n + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**n <= value else (low, middle - 1)
        root = low
    return root if root**n == value else None


def symbols(term: Term) -> frozenset[str]:
    """Names of the symbols, and of unknown functions, in a term."""
    own = frozenset({term.value}) if term.head == "symbol" else frozenset()
    return own.union(*(symbols(argument) for argument in term.args)) if term.args else own


def has_imaginary_unit(term: Term) -> bool:
    return (term.head == "constant" and term.value == "i") or any(
        map(has_imaginary_unit, term.args)
    )


def has_head(term: Term, *heads: str) -> bool:
    return term.head in heads or any(has_head(argument, *heads) for argument in term.args)


@functools.cache
def _contexts() -> tuple[Any, Any]:
    """Two precisions: what vanishes faster from one to the other than any number does is zero."""
    from mpmath import MPContext

    contexts = MPContext(), MPContext()
    contexts[0].dps, contexts[1].dps = 40, 120
    return contexts


def numeric(
    term: Term, point: Mapping[str, float], *, context: Any, real: bool, log_base: float | None
) -> Any:
    """Evaluates a scalar with mpmath.

    Args:
      term: the scalar.
      point: a value for each symbol; one without has no value.
      context: the mpmath context (its precision).
      real: raise Undefined rather than leave the real numbers.
      log_base: base of a bare ``log``; None is e.

    Raises:
      Undefined: no value at this point.
    """
    head = term.head
    if head == "number":
        value = term.value[0]
        return context.mpf(value.numerator) / value.denominator
    if head == "symbol":
        if term.value not in point:
            raise Undefined(term.value)
        return context.mpf(point[term.value])
    if head == "constant":
        if term.value == "i" and not real:
            return context.mpc(0, 1)
        if term.value not in ("e", "pi"):
            raise Undefined(term.value)
        return +context.e if term.value == "e" else +context.pi
    values = [numeric(a, point, context=context, real=real, log_base=log_base) for a in term.args]
    try:
        value = _numeric_operation(term, values, context, log_base)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, NotImplementedError) as error:
        raise Undefined(str(error)) from error
    if real and isinstance(value, context.mpc):
        raise Undefined("not real")
    if not context.isfinite(value):
        raise Undefined("not finite")
    return value


def _numeric_operation(term: Term, values: list[Any], context: Any, log_base: float | None) -> Any:
    head, first, last = term.head, values[0], values[-1]
    if head == "add":
        return first + last
    if head == "mul":
        return first * last
    if head == "neg":
        return -first
    if head == "div":
        return first / last
    if head == "percent":
        return first / 100
    if head == "degree":
        return first * context.pi / 180
    if head == "pow":
        return _numeric_power(first, last, context)
    if head == "root":
        if last == 3 and _is_real(first, context) and first < 0:
            return -context.root(-first, 3)
        return context.sqrt(first) if last == 2 else _numeric_power(first, 1 / last, context)
    if head == "abs":
        return abs(first)
    if head == "factorial":
        _bound(first, MAX_FACTORIAL * 10)
        return context.factorial(first)
    if head == "binomial":
        _bound(first, MAX_FACTORIAL * 10)
        return context.binomial(first, last)
    if head == "floor":
        return context.floor(first)
    if head == "ceil":
        return context.ceil(first)
    if head == "call":
        return _function(term.value, values, context, log_base)
    raise Undefined(head)


def _bound(value: Any, bound: float) -> None:
    if abs(value) > bound:
        raise Undefined("out of bounds")


def _is_real(value: Any, context: Any) -> bool:
    return not isinstance(value, context.mpc)


def _numeric_power(base: Any, exponent: Any, context: Any) -> Any:
    if base == 0:
        if not _is_real(exponent, context) or exponent <= 0:
            raise Undefined("power of zero")
        return base
    _bound(exponent, 1e12)
    _bound(context.mpf(abs(exponent)) * abs(context.log(abs(base))), MAX_LOG_POWER)
    return context.power(base, exponent)


def _function(name: str, values: list[Any], context: Any, log_base: float | None) -> Any:
    argument = values[0]
    if name == "log" and len(values) == 2:
        return context.log(argument) / context.log(values[1])
    if name in ("gcd", "lcm", "max", "min"):
        return _of_many(name, values, context)
    if len(values) != 1:
        raise Undefined(f"{name} of {len(values)} arguments")
    if name == "log":
        return (
            context.log(argument)
            if log_base is None
            else context.log(argument) / context.log(log_base)
        )
    if name == "lg":
        return context.log(argument) / context.log(10)
    if name == "exp":
        return _numeric_power(+context.e, argument, context)
    functions: Mapping[str, Callable[[Any], Any]] = {
        "ln": context.log, "sin": context.sin, "cos": context.cos, "tan": context.tan, "cot": context.cot,
        "sec": context.sec, "csc": context.csc, "arcsin": context.asin, "arccos": context.acos,
        "arctan": context.atan, "arccot": context.acot, "sinh": context.sinh, "cosh": context.cosh,
        "tanh": context.tanh, "coth": context.coth, "Re": context.re, "Im": context.im, "arg": context.arg,
    }  # fmt: skip
    if name not in functions:
        raise Undefined(f"unknown function {name}")
    _bound(argument, 1e12 if name == "ln" else 1e6)
    return functions[name](argument)


def _of_many(name: str, values: list[Any], context: Any) -> Any:
    if not all(_is_real(value, context) for value in values):
        raise Undefined(name)
    if name in ("max", "min"):
        return max(values) if name == "max" else min(values)
    if not all(context.isint(value) and abs(value) < 1e30 for value in values):
        raise Undefined(name)
    integers = [int(value) for value in values]
    return context.mpf(math.gcd(*integers) if name == "gcd" else math.lcm(*integers))


def approximate(term: Term) -> float | None:
    """The value of a real constant to double precision; None if it has none."""
    try:
        value = exact(term)
        if value is None:
            value = numeric(term, {}, context=_contexts()[0], real=True, log_base=None)
        return float(value)
    except (Undefined, OverflowError):
        return None


def scalars_equal(a: Term, b: Term) -> bool:
    """Whether two scalar terms have the same value (as functions of their symbols)."""
    if a == b:
        return True
    try:
        exact_a, exact_b = exact(a), exact(b)
    except Undefined:
        return False
    if exact_a is not None and exact_b is not None:
        return exact_a == exact_b or _is_rounding(a, exact_b) or _is_rounding(b, exact_a)
    return probe(a, b) == "equal" or _is_rounding(a, b) or _is_rounding(b, a)


def probe(a: Term, b: Term) -> str:
    """Compares by values: "equal", "proportional+" / "proportional-" (by a constant factor of that sign), or "" ."""
    for log_base in (None, 10.0) if has_log(a) or has_log(b) else (None,):
        verdict = _probe(a, b, log_base)
        if verdict:
            return verdict
    return ""


def has_log(term: Term) -> bool:
    return (term.head == "call" and term.value == "log" and len(term.args) == 1) or any(
        map(has_log, term.args)
    )


def _probe(a: Term, b: Term, log_base: float | None) -> str:
    names = sorted(symbols(a) | symbols(b))
    real = bool(names) and not (has_imaginary_unit(a) or has_imaginary_unit(b))
    pairs = _sample(a, b, names, real, log_base)
    if not pairs and real:  # nowhere real, such as (-1)^n between the integers
        pairs = _sample(a, b, names, False, log_base)
    if not pairs:
        return ""
    if all(equal for equal, _ in pairs):
        return "equal"
    ratios = [ratio for _, ratio in pairs]
    first = ratios[0]
    if not names or len(ratios) < 2 or first is None or first == 0:
        return ""
    if any(ratio is None or abs(ratio - first) > abs(first) * 1e-30 for ratio in ratios):
        return ""
    if abs(first.imag) > 1e-30 * abs(first):
        return ""
    return "proportional+" if first.real > 0 else "proportional-"


def _sample(
    a: Term, b: Term, names: list[str], real: bool, log_base: float | None
) -> list[tuple[bool, Any]]:
    """(equal, a/b or None) at the points where both sides have a value; one point if there are no symbols."""
    low, high = _contexts()
    results = []
    for shift, sign in enumerate(_SIGNS if names else "+"):
        if not real and sign != "+":
            continue
        point = {}
        for index, name in enumerate(names):
            value = _POINTS[(index + shift) % len(_POINTS)] + 0.0917 * index
            point[name] = -value if sign == "-" or (sign == "~" and index % 2) else value
        try:
            low_a, low_b, high_a, high_b = (
                numeric(term, point, context=context, real=real, log_base=log_base)
                for context in (low, high)
                for term in (a, b)
            )
        except Undefined:
            continue
        difference, scale = abs(high_a - high_b), max(abs(high_a), abs(high_b))
        coarse = abs(low_a - low_b)
        equal = difference <= scale * 1e-90 or difference <= high.mpf(coarse) * 1e-50
        results.append((bool(equal), high_a / high_b if abs(high_b) > 0 else None))
    return results


def is_decimal(term: Term) -> bool:
    """Whether a term is a literal with a decimal point, perhaps signed."""
    if term.head == "neg":
        return is_decimal(term.args[0])
    return term.head == "number" and term.value[1] is not None


def _is_rounding(decimal: Term, other: Term | Fraction) -> bool:
    """Whether a decimal of at least six digits is the rounded, or cut off, value of something that is no decimal.

    So 0.333333 stands for 1/3, and 3.14159 for pi; 0.33 and 3.14 do not.
    """
    if not is_decimal(decimal):
        return False
    if isinstance(other, Term) and (is_decimal(other) or symbols(other)):
        return False
    sign, literal = (-1, decimal.args[0]) if decimal.head == "neg" else (1, decimal)
    if literal.head != "number":
        return False
    value, places = literal.value
    scaled_decimal = sign * value * Fraction(10) ** places
    if len(str(abs(int(scaled_decimal)))) < MIN_ROUNDED_DIGITS:
        return False
    if isinstance(other, Term):
        try:
            exact_value = numeric(other, {}, context=_contexts()[1], real=True, log_base=None)
        except Undefined:
            return False
        target: Any = exact_value * _contexts()[1].mpf(10) ** places
        # A float of high precision is a dyadic rational: exact from here on.
        target = Fraction(int(_contexts()[1].floor(target * 2**64)), 2**64)
    else:
        target = other * Fraction(10) ** places
    rounded = math.floor(abs(target) + Fraction(1, 2))
    same_sign = (scaled_decimal < 0) == (target < 0)
    return same_sign and abs(scaled_decimal) in (rounded, math.floor(abs(target)))
