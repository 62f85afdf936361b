"""reasoning-gym's generators as domains ``rg/<name>``, with its curricula as levels.

The package is imported when a task is made and not before: the names and levels below are facts about version 0.1.25,
and a test holds them against the package. A level is left out where its generator refuses the curriculum's own setting,
takes more than about half a second an item, asks in more than 8000 characters, or knows only a handful of problems.

Answers are judged by the package's own rule (the ``reasoning_gym`` verifier), so a task carries the item it was made
from, as JSON, in ``metadata``: ``dataset``, ``entry``, and ``config`` where the scorer reads its configuration. Items
without an answer of their own (``answer`` None: any right one will do) are tasks like the others.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlvr_jax.errors import require
from rlvr_jax.tasks.registry import DOMAINS, Domain, Draft, Family, VerifierUse, ask
from rlvr_jax.types import JSON

ANSWER_IN_TAGS = "Put the final answer in <answer></answer>."
# Generators that look for a puzzle by chance give up now and then, and a few items have answers their scorers refuse.
MAX_TRIES = 8
FULL_MARKS = 0.999

_UNSTABLE = "what it makes from one seed depends on PYTHONHASHSEED, so a run could not be repeated or resumed"
EXCLUDED: Mapping[str, str] = {
    "codeio": "it runs program text that a model wrote",
    "composite": "it is a mixture of the others; give several domains instead",
    "game_of_life_halting": "its scorer gives full marks to any text",
    "intermediate_integration": _UNSTABLE,
    "isomorphic_strings": _UNSTABLE,
    "knight_swap": _UNSTABLE,
    "polynomial_multiplication": _UNSTABLE,
    "ransom_note": _UNSTABLE,
    "word_ladder": _UNSTABLE,
}

# Generators without a curriculum: one level, their own settings.
_WITHOUT_CURRICULUM = frozenset({"acre", "gsm_symbolic", "list_functions"})
# Name -> levels of its curriculum, easiest first: a number n stands for 0 .. n - 1.
_LEVELS: Mapping[str, int | tuple[int, ...]] = {
    "ab": 4,
    "acre": 1,
    "advanced_geometry": 4,
    "aiw": 9,
    "arc_1d": 4,
    "arc_agi": 1,
    "base_conversion": 5,
    "basic_arithmetic": 5,
    "bf": 2,
    "binary_alternation": 4,
    "binary_matrix": 3,
    "bitwise_arithmetic": 10,
    "boxnet": 6,
    "caesar_cipher": 2,
    "calendar_arithmetic": 4,
    "chain_sum": 11,
    "circuit_logic": 2,
    "coin_flip": (3, 4, 5, 6, 7, 8, 9, 10, 11, 12),
    "color_cube_rotation": 5,
    "complex_arithmetic": 4,
    "count_bits": 5,
    "count_primes": 5,
    "countdown": 3,
    "course_schedule": 5,
    "cryptarithm": 4,
    "decimal_arithmetic": 4,
    "decimal_chain_sum": 5,
    "dice": 4,
    "emoji_mystery": 6,
    "family_relationships": 9,
    "figlet_font": 6,
    "fraction_simplification": 4,
    "futoshiki": 3,
    "game_of_life": 3,
    "gcd": 4,
    "graph_color": 4,
    "group_anagrams": 4,
    "gsm_symbolic": 1,
    "jugs": 2,
    "kakurasu": 4,
    "knights_knaves": 4,
    "largest_island": 3,
    "lcm": 4,
    "leg_counting": 36,
    "letter_counting": 8,
    "letter_jumble": 5,
    "list_functions": 1,
    "mahjong_puzzle": 3,
    "manipulate_matrix": 3,
    "maze": 2,
    "mini_sudoku": 5,
    "modulo_grid": (0, 2, 3, 4, 5),
    "n_queens": (1, 2, 3),
    "needle_haystack": 1,
    "number_filtering": 4,
    "number_format": 2,
    "number_sequence": 2,
    "number_sorting": 3,
    "palindrome_generation": 4,
    "palindrome_partitioning": 4,
    "path_star": 4,
    "polynomial_equations": 4,
    "pool_matrix": 3,
    "power_function": 5,
    "prime_factorization": 4,
    "products": 11,
    "propositional_logic": (1, 2, 3, 4),
    "puzzle24": 7,
    "quantum_lock": 10,
    "rearc": 7,
    "rectangle_count": 5,
    "rotate_matrix": 3,
    "rotten_oranges": 3,
    "rubiks_cube": 4,
    "rush_hour": 4,
    "self_reference": 10,
    "sentence_reordering": 4,
    "shortest_path": 3,
    "simple_equations": 4,
    "simple_geometry": 4,
    "simple_integration": 4,
    "sokoban": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13),
    "spell_backward": 5,
    "spiral_matrix": 3,
    "string_insertion": 4,
    "string_manipulation": 5,
    "string_splitting": 4,
    "string_synthesis": 4,
    "sudoku": 4,
    "survo": 2,
    "syllogism": 4,
    "time_intervals": 7,
    "tower_of_hanoi": (1, 2, 3),
    "tsumego": 4,
    "word_sequence_reversal": 4,
    "word_sorting": 5,
    "zebra_puzzles": 3,
}

# What a scorer reads of its generator's configuration; the other scorers see the item alone.
_SCORER_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "decimal_arithmetic": ("max_num_decimal_places",),
    "time_intervals": ("max_date_difference_days", "max_time_difference_seconds"),
}
# They read or compute tables when built, 0.15 to 0.4 s; item i of theirs depends on seed + i alone.
_COSTLY_TO_BUILD = frozenset({"arc_agi", "figlet_font", "group_anagrams"})
_GLOBALS = threading.Lock()


class Unanswerable(ValueError):
    """An item whose scorer does not accept its own answer."""


def levels_of(name: str) -> tuple[int, ...]:
    """The levels of a generator's curriculum that are in use, easiest first."""
    levels = _LEVELS[name]
    return tuple(range(levels)) if isinstance(levels, int) else levels


@contextlib.contextmanager
def _contained(seed: int) -> Iterator[None]:
    """Keeps to itself what generators do to the process: they draw from the global random generators (and seed them),
    print, and leave files open."""
    with _GLOBALS, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        python_state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _build(name: str, level: int, seed: int) -> Any:
    """The generator (a ProceduralDataset), configured."""
    gym = require("reasoning_gym", "rg")
    generator, configuration = gym.factory.DATASETS[name]
    if name in _WITHOUT_CURRICULUM:
        return generator(config=configuration(seed=seed, size=1))
    curriculum = gym.factory.create_curriculum(name)
    curriculum.set_global_level(levels_of(name)[level])
    return generator(config=curriculum.generate_configuration({"seed": seed, "size": 1}))


@functools.cache
def _built_once(name: str, level: int) -> Any:
    return _build(name, level, seed=0)


def _as_json(value: Any) -> JSON:
    """What remains of a value when it has been stored and read again; fractions and the like become text."""
    return json.loads(json.dumps(value, default=str))


def make_item(name: str, level: int, seed: int) -> tuple[dict[str, JSON], dict[str, JSON]]:
    """Makes one item.

    Args:
      name: of a generator.
      level: index into ``levels_of(name)``.
      seed: below 2**31.

    Returns:
      The item (question, answer, metadata), and what its scorer was configured with, both as JSON.

    Raises:
      Unanswerable: the item's own answer is not right by its scorer.
      Exception: of any type, from a generator that gave up.
    """
    with _contained(seed):
        if name in _COSTLY_TO_BUILD:
            dataset, index = _built_once(name, level), seed
        else:
            dataset, index = _build(name, level, seed), 0
        item = dataset[index]
        answer = item["answer"]
        if answer == "" or (answer is not None and dataset.score_answer(answer, item) < FULL_MARKS):
            raise Unanswerable(f"{name} does not score its own answer {answer!r} as right")
    settings = {field: getattr(dataset.config, field) for field in _SCORER_SETTINGS.get(name, ())}
    return _as_json(item), _as_json(settings)


def make_draft(name: str, level: int, rng: np.random.Generator) -> Draft:
    """Makes one problem.

    Raises:
      MissingExtraError: reasoning-gym is not installed.
      RuntimeError: the generator failed ``MAX_TRIES`` times.
    """
    require("reasoning_gym", "rg")
    problem: Exception | None = None
    for _ in range(MAX_TRIES):
        try:
            item, settings = make_item(name, level, int(rng.integers(2**31)))
        except Exception as error:  # a generator gives up with whatever type it likes
            problem = error
            continue
        metadata = {"dataset": name, "entry": item, **({"config": settings} if settings else {})}
        return Draft(
            prompt=ask(str(item["question"]), system=ANSWER_IN_TAGS),
            answer=item["answer"],
            metadata=metadata,
        )
    raise RuntimeError(
        f"reasoning-gym's {name} made no usable item at level {level} in {MAX_TRIES} tries ({problem!r}); "
        "take another level"
    ) from problem


def _resolve(full_name: str) -> Domain:
    name = full_name.removeprefix("rg/")
    return Domain(
        name=full_name,
        description=f"reasoning-gym: {name.replace('_', ' ')}",
        num_levels=len(levels_of(name)),
        make=lambda level, rng: make_draft(name, level, rng),
        verifiers=(VerifierUse(name="reasoning_gym", params={"mode": "tagged"}),),
        max_response_tokens=512,
        source="reasoning-gym",
    )


DOMAINS.register_family(
    "rg",
    Family(
        names=tuple(f"rg/{name}" for name in _LEVELS),
        resolve=_resolve,
        excluded={f"rg/{name}": reason for name, reason in EXCLUDED.items()},
    ),
)
