"""Whether two answers, read as terms, are the same answer.

Shapes are compared first (a tuple is no set, a ratio no number, an equation no value), values inside them with
``values.scalars_equal``. What people leave out is forgiven: ``x = 5`` is 5, ``5 cm`` is 5 when only one side has a
unit, ``50%`` is 50 or 1/2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from rlvr_jax.rewards.equivalence.terms import SCALARS, Term
from rlvr_jax.rewards.equivalence.values import (
    approximate,
    has_head,
    probe,
    scalars_equal,
    symbols,
)

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_MAX_UNORDERED = 40
_INFINITY = Term("constant", value="infinity")


def equivalent(gold: Term, answer: Term) -> bool:
    """Returns whether ``answer`` states the same as ``gold``."""
    gold, answer = _expand_signs(_named_first(gold)), _expand_signs(_named_first(answer))
    if gold == answer:
        return True
    if "choice" in (gold.head, answer.head):
        return _choices_equal(gold, answer)
    if _named(gold) and _named(answer) and gold.args[0] == answer.args[0]:
        return equivalent(gold.args[1], answer.args[1])
    if _named(gold) and not _relational(answer):
        return equivalent(gold.args[1], answer)
    if _named(answer) and not _relational(gold):
        return equivalent(gold, answer.args[1])
    if _is_chain(answer) and gold.head in SCALARS:
        return _chain_holds(answer) and equivalent(gold, answer.args[-1])
    if _is_chain(gold) and answer.head in SCALARS:
        return _chain_holds(gold) and equivalent(gold.args[-1], answer)
    gold, gold_unit = _without_unit(gold)
    answer, answer_unit = _without_unit(answer)
    if gold_unit and answer_unit and gold_unit != answer_unit:
        return False
    if (
        gold_unit != answer_unit
    ):  # "5 m" as LaTeX reads it: a product with a symbol that is the other side's unit
        gold, answer = _without_symbol(gold, answer_unit), _without_symbol(answer, gold_unit)
    if {gold_unit, answer_unit} == {"°", ""} and {gold.head, answer.head} <= SCALARS:
        degrees, other = (gold, answer) if gold_unit else (answer, gold)
        return scalars_equal(gold, answer) or scalars_equal(Term("degree", (degrees,)), other)
    if "%" in (gold_unit, answer_unit):
        return _percentages_equal(gold, gold_unit, answer, answer_unit)
    return _shapes_equal(gold, answer)


def _shapes_equal(gold: Term, answer: Term) -> bool:
    heads = {gold.head, answer.head}
    if heads <= SCALARS:
        return scalars_equal(gold, answer)
    if heads == {"text"}:
        return gold.value == answer.value
    if heads <= {"based"} | SCALARS:
        a, b = _unbased(gold), _unbased(answer)
        return a is not None and b is not None and scalars_equal(a, b)
    if "text" in heads:
        return False
    if heads == {"matrix"}:
        return _ordered(gold.args, answer.args, lambda a, b: _ordered(a.args, b.args, equivalent))
    if heads == {"ratio"}:
        return _ordered(gold.args, answer.args, scalars_equal)
    sets = [_as_intervals(gold), _as_intervals(answer)]
    explicit = any(_is_explicit_set(term) for term in (gold, answer))
    if heads == {"relation"} and symbols(gold) != symbols(answer):
        return False
    if sets[0] is not None and sets[1] is not None and explicit:
        return _ordered(sets[0], sets[1], _intervals_equal)
    if heads == {"relation"}:
        return _relations_equal(gold, answer)
    collections = {"list", "set", "group"}
    if heads <= collections or (heads & collections and heads <= collections | SCALARS):
        return _collections_equal(gold, answer)
    if heads == {"union"}:
        return _ordered(gold.args, answer.args, equivalent)
    return False


# Signs and names


def _expand_signs(term: Term) -> Term:
    """A value with a plus-minus sign becomes the list of the two values."""
    if term.head == "list":
        items = [_expand_signs(item) for item in term.args]
        flat = [part for item in items for part in (item.args if item.value == "pm" else (item,))]
        return dataclasses.replace(term, args=tuple(flat))
    if _named(term) and has_head(term.args[1], "plus_minus"):
        return _expand_signs(term.args[1])
    if term.head == "set" and len(term.args) == 1 and has_head(term.args[0], "plus_minus"):
        return dataclasses.replace(term, args=_expand_signs(term.args[0]).args)
    if term.head in SCALARS and has_head(term, "plus_minus"):
        return Term("list", (_with_sign(term, 1), _with_sign(term, -1)), "pm")
    return term


def _with_sign(term: Term, sign: int) -> Term:
    args = tuple(_with_sign(argument, sign) for argument in term.args)
    if term.head != "plus_minus":
        return dataclasses.replace(term, args=args)
    positive = (sign > 0) == (term.value == "pm")
    return Term("add", (args[0], args[1] if positive else Term("neg", (args[1],))))


def _named_first(term: Term) -> Term:
    """``5 = x`` as ``x = 5``."""
    if term.head == "relation" and term.value == ("=",) and term.args[1].head == "symbol":
        swapped = dataclasses.replace(term, args=term.args[::-1])
        return swapped if _named(swapped) and not _named(term) else term
    return term


def _named(term: Term) -> bool:
    """``name = value`` (or ``name in set``): a symbol, a function of something or a tuple of symbols on the left."""
    if term.head != "relation" or len(term.args) != 2 or term.value[0] not in ("=", "==", "in"):
        return False
    left, right = term.args
    label = (
        left.head in ("symbol", "text")
        or _is_segment(left)
        or (left.head == "call" and len(left.value.partition("^")[0]) == 1)
        or (left.head == "group" and all(item.head == "symbol" for item in left.args))
        or (left.head == "abs" and left.args[0].head == "symbol")
    )
    return label and (left.head != "symbol" or left.value not in symbols(right))


def _is_segment(term: Term) -> bool:
    """``AB``: points, written as LaTeX reads a product."""
    if term.head == "mul":
        return all(map(_is_segment, term.args))
    return term.head == "symbol" and len(term.value) == 1 and term.value.isupper()


def _relational(term: Term) -> bool:
    return term.head == "relation" and term.value[0] != "in"


def _is_chain(term: Term) -> bool:
    return (
        term.head == "relation"
        and set(term.value) == {"="}
        and all(arg.head in SCALARS for arg in term.args)
    )


def _chain_holds(term: Term) -> bool:
    """Whether ``2 + 3 = 5`` is true, so that it states the value 5."""
    return all(map(scalars_equal, term.args, term.args[1:]))


def _choices_equal(gold: Term, answer: Term) -> bool:
    """ "(B) 12" is B, and it is 12; both must agree where both sides give both."""
    if gold.head == answer.head:
        return gold.value == answer.value and equivalent(gold.args[0], answer.args[0])
    choice, other = (gold, answer) if gold.head == "choice" else (answer, gold)
    return other == Term("symbol", value=choice.value) or equivalent(choice.args[0], other)


# Units and percent


def _without_unit(term: Term) -> tuple[Term, str]:
    if term.head == "quantity":
        return term.args[0], term.value
    if term.head == "degree":
        return term.args[0], "°"
    if term.head == "percent":
        return term.args[0], "%"
    if term.head == "neg" and term.args[0].head in ("quantity", "degree", "percent"):
        inner, unit = _without_unit(term.args[0])
        return Term("neg", (inner,)), unit
    return term, ""


def _without_symbol(term: Term, unit: str) -> Term:
    """``number * unit`` without the unit."""
    if unit and term.head == "mul" and term.args[1] == Term("symbol", value=unit):
        return term.args[0]
    return term


def _percentages_equal(gold: Term, gold_unit: str, answer: Term, answer_unit: str) -> bool:
    if not {gold.head, answer.head} <= SCALARS:
        return False
    if gold_unit == answer_unit or scalars_equal(gold, answer):
        return scalars_equal(gold, answer)
    gold = Term("percent", (gold,)) if gold_unit else gold
    answer = Term("percent", (answer,)) if answer_unit else answer
    return scalars_equal(gold, answer)


def _unbased(term: Term) -> Term | None:
    """The value of digits in a base; None when they are no digits of it (a 9 in base 2)."""
    if term.head != "based":
        return term
    digits, base = term.value
    try:
        return Term("number", value=(Fraction(int(digits, base)), None))
    except ValueError:
        return None


# Collections


def _ordered(a: Sequence, b: Sequence, equal: Callable[..., bool]) -> bool:
    return len(a) == len(b) and all(map(equal, a, b))


def _collections_equal(gold: Term, answer: Term) -> bool:
    if "set" in (gold.head, answer.head) and "group" in (gold.head, answer.head):
        return False
    if gold.head in SCALARS or answer.head in SCALARS:  # one value, and a set or list of one
        single, other = (gold, answer) if gold.head in SCALARS else (answer, gold)
        if other.head == "group":
            return False
        return bool(other.args) and all(equivalent(single, item) for item in other.args)
    if any(item.head == "ellipsis" for item in (*gold.args, *answer.args)):
        return _ordered(gold.args, answer.args, lambda a, b: a == b or equivalent(a, b))
    if gold.head == answer.head == "group":
        return gold.value == answer.value and _ordered(gold.args, answer.args, equivalent)
    if "group" in (gold.head, answer.head):  # "(1, 2)" written as "1, 2", or as "x = 1, y = 2"
        return _ordered(_by_name(gold), _by_name(answer), equivalent)
    once = "set" in (gold.head, answer.head) or "pm" in (gold.value, answer.value)
    return _unordered(list(gold.args), list(answer.args), once)


def _by_name(term: Term) -> list[Term]:
    """The items; those of "y = 2, x = 1" in the order of their names."""
    items = list(term.args)
    if all(_named(item) and item.args[0].head == "symbol" for item in items):
        items.sort(key=lambda item: item.args[0].value)
    return items


def _unordered(a: list[Term], b: list[Term], once: bool) -> bool:
    """Whether the two hold the same items in any order; ``once``: a repeated item counts once."""
    if max(len(a), len(b)) > _MAX_UNORDERED:
        return _ordered(a, b, equivalent)
    if once:
        a, b = _distinct(a), _distinct(b)
    if len(a) != len(b):
        return False
    rest = list(b)
    for item in a:
        match = next((i for i, other in enumerate(rest) if equivalent(item, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _distinct(items: list[Term]) -> list[Term]:
    kept: list[Term] = []
    for item in items:
        if not any(equivalent(item, other) for other in kept):
            kept.append(item)
    return kept


# Relations


def _relations_equal(gold: Term, answer: Term) -> bool:
    gold, answer = _forward(gold), _forward(answer)
    if gold.value != answer.value or len(gold.args) != len(answer.args):
        return False
    if _ordered(gold.args, answer.args, equivalent):
        return True
    if len(gold.args) != 2 or not all(arg.head in SCALARS for arg in (*gold.args, *answer.args)):
        return False
    verdict = probe(_difference(gold), _difference(answer))
    operator = gold.value[0]
    return verdict in ("equal", "proportional+") or (
        operator in ("=", "!=") and verdict == "proportional-"
    )


def _forward(term: Term) -> Term:
    """The relation written with < and <= only, where it has an order."""
    if term.value and set(term.value) <= {">", ">="}:
        return Term("relation", term.args[::-1], tuple(_FLIPPED[o] for o in reversed(term.value)))
    return term


def _difference(term: Term) -> Term:
    return Term("add", (term.args[0], Term("neg", (term.args[1],))))


# Sets of real numbers

_Interval = tuple[Term, Term, bool, bool]  # low, high, low belongs to it, high belongs to it
_MINUS_INFINITY = Term("neg", (_INFINITY,))
_REALS: _Interval = (_MINUS_INFINITY, _INFINITY, False, False)


def _is_explicit_set(term: Term) -> bool:
    """Whether the term can only be meant as a set of numbers (a pair in round brackets can be a point)."""
    if term.head in ("relation", "union", "difference", "numbers"):
        return True
    if term.head == "group":
        return term.value in ("(]", "[)") or any(
            has_head(arg, "constant") and _infinite(arg) for arg in term.args
        )
    return term.head == "list" and any(map(_is_explicit_set, term.args))


def _infinite(term: Term) -> int:
    """1 or -1 for infinity of that sign, 0 for anything else."""
    if term == _INFINITY:
        return 1
    return -_infinite(term.args[0]) if term.head == "neg" else 0


def _as_intervals(term: Term) -> list[_Interval] | None:
    """A set of reals as disjoint intervals from left to right; None if the term is none, or not of constants."""
    intervals = _parts(term)
    if intervals is None:
        return None
    placed = []
    for interval in intervals:
        ends = [_place(interval[0]), _place(interval[1])]
        if ends[0] is None or ends[1] is None or ends[0] > ends[1]:
            return None
        placed.append((ends[0], interval))
    placed.sort(key=lambda pair: pair[0])
    return [interval for _, interval in placed]


def _parts(term: Term) -> list[_Interval] | None:
    if term.head == "numbers":
        return [_REALS] if term.value == "R" else None
    if term.head == "group" and len(term.args) == 2:
        low, high = term.args
        if low.head in SCALARS and high.head in SCALARS:
            return [(low, high, term.value[0] == "[", term.value[1] == "]")]
        return None
    if term.head == "set" and term.args and all(item.head in SCALARS for item in term.args):
        return [(item, item, True, True) for item in term.args]
    if term.head == "union" or (term.head == "list" and term.value == "or"):
        parts = [_parts(item) for item in term.args]
        return (
            None
            if any(p is None for p in parts)
            else [i for p in parts if p is not None for i in p]
        )
    if term.head == "difference":
        whole, removed = _parts(term.args[0]), term.args[1]
        if whole == [_REALS] and removed.head == "set" and len(removed.args) == 1:
            return _without_point(removed.args[0])
        return None
    return _from_inequality(term) if term.head == "relation" else None


def _from_inequality(term: Term) -> list[_Interval] | None:
    """``x > 1``, ``1 < x <= 2``, ``x != 1``, ``x in [1, 2]``."""
    if term.value == ("in",) and term.args[0].head == "symbol":
        return _parts(term.args[1])
    if term.value == ("!=",) and term.args[0].head == "symbol" and not symbols(term.args[1]):
        return _without_point(term.args[1])
    term = _forward(term)
    if not set(term.value) <= {"<", "<="}:
        return None
    args, operators = term.args, term.value
    if len(args) == 3 and args[1].head == "symbol":
        return [(args[0], args[2], operators[0] == "<=", operators[1] == "<=")]
    if len(args) == 2 and args[0].head == "symbol":
        return [(_MINUS_INFINITY, args[1], False, operators[0] == "<=")]
    if len(args) == 2 and args[1].head == "symbol":
        return [(args[0], _INFINITY, operators[0] == "<=", False)]
    return None


def _without_point(point: Term) -> list[_Interval]:
    return [(_MINUS_INFINITY, point, False, False), (point, _INFINITY, False, False)]


def _place(term: Term) -> float | None:
    """Where an end lies on the real line, roughly: for the order only."""
    if _infinite(term):
        return _infinite(term) * float("inf")
    if term.head not in SCALARS or symbols(term):
        return None
    return approximate(term)


def _intervals_equal(a: _Interval, b: _Interval) -> bool:
    return a[2:] == b[2:] and all(
        scalars_equal(x, y) if not (_infinite(x) or _infinite(y)) else _infinite(x) == _infinite(y)
        for x, y in zip(a[:2], b[:2], strict=True)
    )
