"""Whether two answers, read as terms, are the same answer.

Shapes are compared first (a tuple is no set, a ratio no number, an equation no value), values inside them with
``values.scalars_equal``. What people leave out is forgiven: ``x = 5`` is 5, ``5 cm`` is 5 when only one side has a
unit, ``50%`` is 50 or 1/2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

from rlvr_jax.rewards.equivalence.intervals import (
    as_intervals,
    forward,
    intervals_equal,
    is_explicit_set,
)
from rlvr_jax.rewards.equivalence.terms import SCALARS, Term
from rlvr_jax.rewards.equivalence.values import (
    approximate,
    has_head,
    probe,
    scalars_equal,
    symbols,
)

_MAX_UNORDERED = 40


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
    sets = [as_intervals(gold), as_intervals(answer)]
    explicit = any(is_explicit_set(term) for term in (gold, answer))
    if heads == {"relation"} and symbols(gold) != symbols(answer):
        return False
    if sets[0] is not None and sets[1] is not None and explicit:
        return _ordered(sets[0], sets[1], intervals_equal)
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
    if gold_unit == answer_unit:
        return scalars_equal(gold, answer)
    bare = answer if gold_unit else gold  # 50 may stand for 50%; 0.5 is a fraction, not 0.5%
    size = approximate(bare)
    if size is not None and not 0 < abs(size) < 1 and scalars_equal(gold, answer):
        return True
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
        once = other.head == "set" or other.value in ("pm", "or")  # "1/2 or 0.5", but not "5,5"
        few = len(other.args) == 1 or (once and other.args)
        return bool(few) and all(equivalent(single, item) for item in other.args)
    if {gold.value, answer.value} == {"and", "or"} and any(
        item.head == "relation" and set(item.value) - {"=", "in"} for item in gold.args
    ):
        return False  # x < 1 and x > 3 is no x at all; of solutions either is said
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
    gold, answer = forward(gold), forward(answer)
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


def _difference(term: Term) -> Term:
    return Term("add", (term.args[0], Term("neg", (term.args[1],))))
