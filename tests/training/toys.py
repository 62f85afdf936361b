"""Toy domains that random weights can learn, and verifiers that misbehave. Importable by name: workers import it."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlvr_jax.cli.flags import load_config
from rlvr_jax.tasks.registry import Draft, VerifierUse, ask, domain
from rlvr_jax.types import Task

REPOSITORY = Path(__file__).resolve().parents[2]


def even(task: Task, response: str) -> float:
    """Share of characters with an even code: about half for random weights, and easy to raise."""
    return sum(ord(c) % 2 == 0 for c in response) / max(len(response), 1)


def constant(task: Task, response: str) -> float:
    return 0.25


def moody(task: Task, response: str, *, hang: bool) -> float:
    """Raises on a quarter of the responses and, if asked to, hangs on one in sixteen."""
    mood = sum(map(ord, response)) % 16
    if mood < 4:
        raise ZeroDivisionError("moody")
    if hang and mood == 4:
        time.sleep(3600)
    return even(task, response)


def _numbers(level: int, rng: np.random.Generator) -> Draft:
    return Draft(prompt=ask(f"Say {rng.integers(10**4)}.", system="Be even."), answer=None)


for _name, _verifier, _params in (
    ("toy/even", even, {}),
    ("toy/constant", constant, {}),
    ("toy/raises", moody, {"hang": False}),
    ("toy/hangs", moody, {"hang": True}),
    ("toy/json", "json_schema", {"schema": {"type": "object"}}),
):
    domain(
        _name,
        description="a toy",
        num_levels=3,
        verifiers=(VerifierUse(name=_verifier, params=_params),),
        max_response_tokens=8,
    )(_numbers)


@domain(
    "toy/few",
    description="a toy with a handful of tasks",
    num_levels=1,
    verifiers=(VerifierUse(name=even),),
    max_response_tokens=8,
)
def few(level: int, rng: np.random.Generator) -> Draft:
    return Draft(prompt=ask(f"Say {rng.integers(20)}.", system="Be even."), answer=None)


@domain(
    "toy/long",
    description="a toy whose prompts are past the context of the tiny model",
    num_levels=1,
    verifiers=(VerifierUse(name=even),),
    max_response_tokens=8,
)
def long(level: int, rng: np.random.Generator) -> Draft:
    return Draft(prompt=ask(f"{rng.integers(10**4)} " * 600, system="Be even."), answer=None)


def get_config(arg: str = "") -> ConfigDict:
    """The quickstart's tiny variant on ``toy/even``, small enough for a test; the config of the runs in here."""
    return override(
        load_config(f"{REPOSITORY / 'configs' / 'rl_quickstart.py'}:tiny"),
        tasks__domains=("toy/even",),
        tasks__tasks_per_step=8,
        tasks__max_refills=0,
        rollout__temperature=1.0,
        rollout__max_tokens=6,
        optimizer__learning_rate=1e-3,
        optimizer__warmup_steps=0,
        eval__tasks_per_domain=3,
        eval__num_samples=2,
        num_steps=3,
        checkpoint__every=100,
    )


def override(config: ConfigDict, **values: Any) -> ConfigDict:
    """A locked copy with ``group__key=value`` set; an unknown key raises."""
    config = ConfigDict(config)
    for key, value in values.items():
        *groups, name = key.split("__")
        group = functools.reduce(lambda c, part: c[part], groups, config)
        if name not in group:
            raise KeyError(key)
        group[name] = value
    return config.lock()
