"""``reasoning_gym``: the score that reasoning-gym's own rule gives the answer, made safe to train on.

Its scorers hand out small change for junk and for answers that merely contain the right one, so only full marks count;
a few give full marks to wrong answers, and those are judged here. Some hand the model's text to ``eval`` or to sympy's
parser, which executes code: ``eval`` is replaced by ``ast.literal_eval`` in those modules, and text reaches the parser
only if it is plain algebra.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import json
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rlvr_jax.rewards.extraction import check_mode, extract
from rlvr_jax.rewards.numbers import whole_number
from rlvr_jax.rewards.registry import VERIFIERS, require_extra
from rlvr_jax.types import Task

# Scorers that measure a distance give the right answer, rounded, a little less than 1.
_ROUNDED = frozenset({"complex_arithmetic", "polynomial_equations"})
_ROUNDED_FULL_MARKS = 0.999
# Their scorers accept anything.
UNSCORABLE = {"game_of_life_halting": "its scorer gives full marks to any text"}

_TARGETS: Mapping[str, int | None] = {"countdown": None, "puzzle24": 24}  # None: the item says
# One number is right. Their scorers ignore its sign (gsm_symbolic), take a prefix of it (coin_flip: "0" for "0.17") or
# are off by a thousandth. The relative tolerance here is for answers that cannot be written out.
_NUMBERS: Mapping[str, Fraction] = {
    "gsm_symbolic": Fraction(0),
    "number_format": Fraction(0),
    "coin_flip": Fraction(1, 1000),
    "decimal_arithmetic": Fraction(1, 10**6),
}
_EVALUATING_MODULES = (
    "algorithmic.binary_matrix",
    "algorithmic.spiral_matrix",
    "algorithmic.string_insertion",
    "games.n_queens",
)
_ALGEBRA = frozenset(
    {"polynomial_multiplication", "simple_integration", "intermediate_integration"}
)
_GRID_OUTPUT = frozenset({"arc_agi", "rearc"})
_FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log",
    "sqrt", "pi",
})  # fmt: skip
_ALGEBRA_TEXT = re.compile(r"[A-Za-z0-9+\-*/^(). ]{1,2000}")
_ATTRIBUTE = re.compile(r"\.(?!\d)|[A-Za-z]\.")
_LARGE_POWER = re.compile(r"(?:\*\*|\^)[( ]*(?:\d{4}|\d+[ ]*(?:\*\*|\^))")
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

Scorer = Callable[[str, Mapping[str, Any]], float]


@VERIFIERS.register("reasoning_gym")
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """1.0 if reasoning-gym gives the response's answer full marks, else 0.0.

    ``task.metadata`` holds ``dataset`` (the generator's name), ``entry`` (the item it made: question, answer, metadata)
    and, where the item was not made with the default configuration, ``config`` (the arguments of ``create_dataset``).

    Attributes:
      mode: where the answer is: ``whole``, ``tagged`` or ``boxed`` (see ``extraction``).

    Raises:
      ValueError: the metadata names no dataset or one that cannot be scored.
      MissingExtraError: reasoning-gym is not installed.
    """

    name = "reasoning_gym"
    mode: str = "tagged"

    def __post_init__(self) -> None:
        check_mode(self.name, self.mode)
        require_extra("reasoning_gym", "rg")

    def warm(self) -> None:
        _load()

    def __call__(self, task: Task, response: str) -> float:
        dataset, entry = task.metadata.get("dataset"), task.metadata.get("entry")
        if not isinstance(dataset, str) or not isinstance(entry, Mapping):
            raise ValueError(
                f"task {task.key} has no metadata 'dataset' (a name) and 'entry' (its item)"
            )
        if dataset in UNSCORABLE:
            raise ValueError(
                f"reasoning-gym dataset {dataset!r} cannot be scored: {UNSCORABLE[dataset]}"
            )
        answer = extract(response, self.mode)
        if answer is None:
            return 0.0
        if dataset in _TARGETS:
            return float(_reaches_target(answer, entry, _TARGETS[dataset]))
        if dataset in _NUMBERS:
            return float(_same_number(answer, entry["answer"], _NUMBERS[dataset]))
        if dataset == "number_sorting":
            return float(_same_numbers(answer, entry["answer"]))
        if dataset in _ALGEBRA and not _is_algebra(answer):
            return 0.0
        score = _scorer(dataset, json.dumps(task.metadata.get("config") or {}, sort_keys=True))
        entry = _as_made(dataset, entry)
        full_marks = _ROUNDED_FULL_MARKS if dataset in _ROUNDED else 1.0
        try:
            value = score(answer, entry)
        except Exception:  # some scorers raise on junk; if the item itself is broken, say so
            oracle = entry.get("answer")
            if oracle is None or score(oracle, entry) < full_marks:
                raise
            return 0.0
        return float(value >= full_marks)


@functools.cache
def _load() -> Any:
    reasoning_gym = importlib.import_module("reasoning_gym")
    for module in _EVALUATING_MODULES:
        vars(importlib.import_module(f"reasoning_gym.{module}"))["eval"] = ast.literal_eval
    return reasoning_gym


@functools.lru_cache(maxsize=128)
def _scorer(dataset: str, config: str) -> Scorer:
    return _load().create_dataset(dataset, **json.loads(config)).score_answer


def _is_algebra(answer: str) -> bool:
    """Whether the text is a formula of single letters and known functions: safe to hand to sympy's parser."""
    return (
        _ALGEBRA_TEXT.fullmatch(answer) is not None
        and not _ATTRIBUTE.search(answer)
        and not _LARGE_POWER.search(answer)
        and all(len(name) == 1 or name in _FUNCTIONS for name in re.findall(r"[A-Za-z]+", answer))
    )


def _same_number(answer: str, oracle: str, tolerance: Fraction) -> bool:
    given, right = whole_number(answer), whole_number(oracle)
    if right is None:
        raise ValueError(f"the item's answer {oracle!r} is no number")
    if given is None or given.percent:
        return False
    return abs(given.value - right.value) <= tolerance * abs(right.value)


def _same_numbers(answer: str, oracle: str) -> bool:
    """Whether two lists of quoted numbers hold the same numbers in the same order (their scorer: give or take 1)."""
    lists = []
    for text in (answer, oracle):
        if not re.fullmatch(r"\s*\[[^\[\]]*\]\s*", text):
            return False
        items = text.strip()[1:-1].split(",")
        lists.append([whole_number(item.strip().strip("'\"")) for item in items])
    return None not in lists[0] and lists[0] == lists[1]


def _reaches_target(answer: str, entry: Mapping[str, Any], target: int | None) -> bool:
    """Whether an expression of + - * / uses each given number once and gives the target, exactly.

    reasoning-gym hands it to sympy, truncates the value (24.9 is 24), and for puzzle24 takes any four numbers.
    """
    try:
        tree = ast.parse(answer.strip(), mode="eval") if len(answer) <= 500 else None
        if tree is None:
            return False
        value = _arithmetic(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    metadata = entry["metadata"]
    used = sorted(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) is int
    )
    return used == sorted(metadata["numbers"]) and value == (target or metadata["target"])


def _arithmetic(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_arithmetic(node.left), _arithmetic(node.right))
    raise ValueError("only integers, + - * / and parentheses")


def _as_made(dataset: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes what JSON does to an item: grids were tuples."""
    entry = dict(entry)
    if dataset in _GRID_OUTPUT:
        metadata = dict(entry["metadata"])
        metadata["output"] = tuple(map(tuple, metadata["output"]))
        entry["metadata"] = metadata
    return entry
