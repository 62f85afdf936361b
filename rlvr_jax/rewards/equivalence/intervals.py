"""Sets of real numbers as unions of disjoint intervals, so that an inequality, an interval and a union can be compared.

``x > 1 and x < 3`` is their intersection, ``or`` their union; ``[1, 2] U [2, 3]`` is ``[1, 3]``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rlvr_jax.rewards.equivalence.terms import SCALARS, Term, negative
from rlvr_jax.rewards.equivalence.values import approximate, has_head, scalars_equal, symbols

Interval = tuple[Term, Term, bool, bool]  # low, high, low belongs to it, high belongs to it

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_INFINITY = Term("constant", value="infinity")
_MINUS_INFINITY = negative(_INFINITY)
_REALS: Interval = (_MINUS_INFINITY, _INFINITY, False, False)


def forward(term: Term) -> Term:
    """The relation written with < and <= only, where it has an order."""
    if term.value and set(term.value) <= {">", ">="}:
        return Term("relation", term.args[::-1], tuple(_FLIPPED[o] for o in reversed(term.value)))
    return term


def is_explicit_set(term: Term) -> bool:
    """Whether the term can only be meant as a set of numbers (a pair in round brackets can be a point)."""
    if term.head in ("relation", "union", "difference", "numbers"):
        return True
    if term.head == "group":
        return term.value in ("(]", "[)") or any(
            has_head(arg, "constant") and _infinite(arg) for arg in term.args
        )
    return term.head == "list" and any(map(is_explicit_set, term.args))


def as_intervals(term: Term) -> list[Interval] | None:
    """A set of reals as disjoint intervals from left to right; None if the term is none, or not of constants."""
    intervals = _parts(term)
    if intervals is None:
        return None
    ends = [(_place(interval[0]), _place(interval[1])) for interval in intervals]
    if any(low is None or high is None or low > high for low, high in ends):
        return None
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda i: (_place(i[0]) or 0.0, not i[2])):
        if merged and _touch(merged[-1], interval):
            merged[-1] = _joined(merged[-1], interval)
        else:
            merged.append(interval)
    return merged


def intervals_equal(a: Interval, b: Interval) -> bool:
    return a[2:] == b[2:] and all(_compare(x, y) == 0 for x, y in zip(a[:2], b[:2], strict=True))


def _parts(term: Term) -> list[Interval] | None:
    if term.head == "numbers":
        return [_REALS] if term.value == "R" else None
    if term.head == "group" and len(term.args) == 2:
        low, high = term.args
        if low.head in SCALARS and high.head in SCALARS:
            return [(low, high, term.value[0] == "[", term.value[1] == "]")]
        return None
    if term.head == "set" and term.args and all(item.head in SCALARS for item in term.args):
        return [(item, item, True, True) for item in term.args]
    if term.head == "union" or (term.head == "list" and term.value in ("or", "and")):
        parts = [part for item in term.args if (part := _parts(item)) is not None]
        if len(parts) < len(term.args):
            return None
        if term.value == "and":
            return _intersection(parts) if all(i.head == "relation" for i in term.args) else None
        return list(itertools.chain(*parts))
    if term.head == "difference":
        whole, removed = _parts(term.args[0]), term.args[1]
        if whole is None or removed.head != "set" or not removed.args:
            return None
        return _intersection([whole, *map(_without_point, removed.args)])
    return _from_inequality(term) if term.head == "relation" else None


def _from_inequality(term: Term) -> list[Interval] | None:
    """``x > 1``, ``1 < x <= 2``, ``|x| < 1``, ``x != 1``, ``x in [1, 2]``."""
    if term.value == ("in",) and term.args[0].head == "symbol":
        return _parts(term.args[1])
    if term.value == ("!=",) and term.args[0].head == "symbol" and not symbols(term.args[1]):
        return _without_point(term.args[1])
    term = forward(term)
    if not set(term.value) <= {"<", "<="}:
        return None
    args, operators = term.args, term.value
    if len(args) == 3 and args[1].head == "symbol":
        return [(args[0], args[2], operators[0] == "<=", operators[1] == "<=")]
    if len(args) != 2:
        return None
    (low, high), closed = args, operators[0] == "<="
    if low.head == "symbol":
        return [(_MINUS_INFINITY, high, False, closed)]
    if high.head == "symbol":
        return [(low, _INFINITY, closed, False)]
    if _is_distance(low) and (_place(high) or 0) > 0:
        return [(negative(high), high, closed, closed)]
    if _is_distance(high) and (_place(low) or 0) > 0:
        return [(_MINUS_INFINITY, negative(low), False, closed), (low, _INFINITY, closed, False)]
    return None


def _is_distance(term: Term) -> bool:
    """``|x|``"""
    return term.head == "abs" and term.args[0].head == "symbol"


def _without_point(point: Term) -> list[Interval]:
    return [(_MINUS_INFINITY, point, False, False), (point, _INFINITY, False, False)]


def _intersection(sets: Sequence[list[Interval]]) -> list[Interval] | None:
    """What lies in all of them; None if an end has no place on the line."""
    if any(_place(end) is None for interval in itertools.chain(*sets) for end in interval[:2]):
        return None
    common = sets[0]
    for other in sets[1:]:
        common = [
            both for a in common for b in other if (both := _overlap(a, b)) is not None
        ]  # fmt: skip
    return common


def _overlap(a: Interval, b: Interval) -> Interval | None:
    below, above = _compare(a[0], b[0]), _compare(a[1], b[1])
    low, low_closed = (a[0], a[2]) if below > 0 else (b[0], b[2])
    high, high_closed = (a[1], a[3]) if above < 0 else (b[1], b[3])
    low_closed = low_closed and (below != 0 or a[2])
    high_closed = high_closed and (above != 0 or a[3])
    order = _compare(low, high)
    if order > 0 or (order == 0 and not (low_closed and high_closed)):
        return None
    return (low, high, low_closed, high_closed)


def _touch(a: Interval, b: Interval) -> bool:
    """Whether no point is missing between two intervals, the second of which does not begin before the first."""
    order = _compare(b[0], a[1])
    return order < 0 or (order == 0 and (a[3] or b[2]) and not _infinite(b[0]))


def _joined(a: Interval, b: Interval) -> Interval:
    order = _compare(a[1], b[1])
    high, closed = (a[1], a[3]) if order > 0 else (b[1], b[3] or (order == 0 and a[3]))
    low_closed = a[2] or (b[2] and _compare(a[0], b[0]) == 0)
    return (a[0], high, low_closed, closed)


def _compare(a: Term, b: Term) -> int:
    """-1, 0 or 1: the order of two ends, exact where they are equal."""
    if _infinite(a) or _infinite(b):
        return (_infinite(a) > _infinite(b)) - (_infinite(a) < _infinite(b))
    if scalars_equal(a, b):
        return 0
    place_a, place_b = _place(a), _place(b)
    return -1 if place_a is None or place_b is None or place_a < place_b else 1


def _infinite(term: Term) -> int:
    """1 or -1 for infinity of that sign, 0 for anything else."""
    if term == _INFINITY:
        return 1
    return -_infinite(term.args[0]) if term.head == "neg" else 0


def _place(term: Term) -> float | None:
    """Where an end lies on the real line, roughly: for the order only."""
    if _infinite(term):
        return _infinite(term) * float("inf")
    if term.head not in SCALARS or symbols(term):
        return None
    return approximate(term)
