"""Identity and splits: ids that never change, sides that never meet."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rlvr_jax.tasks.registry import DOMAINS, Draft, VerifierUse, ask, domain, expand_domains
from rlvr_jax.tasks.splits import content_hash, draw, held_out_tasks, make_task, split_of, task_id
from rlvr_jax.types import Message, Task

OWN = expand_domains(["arithmetic", "text"])

# (domain, level, split, index) with seed 0 -> id and question. These must never change: stored runs refer to them.
PINNED = {
    ("arithmetic/add", 0, "train", 0): ("8b9e7702ccfac882", "What is 1 + 1?"),
    ("arithmetic/add", 3, "held_out", 1): ("2017703fef843303", "What is 73 + 72?"),
    ("arithmetic/mixed", 4, "train", 2): ("5dd7f69018767720", "What is 11 * 1 - 2 * 18?"),
    ("text/sort_words", 2, "train", 0): (
        "6ea3b2660dc4979a",
        "Sort alphabetically: ear moon eye black",
    ),
}


@pytest.fixture
def tiny_domain(monkeypatch):
    """Returns a function that registers a domain of ``size`` problems under ``tiny/<size>``."""
    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))

    def register(size: int) -> str:
        @domain(
            f"tiny/{size}",
            description="few",
            num_levels=1,
            verifiers=(VerifierUse(name="exact"),),
            max_response_tokens=1,
        )
        def make(level, rng):
            number = str(rng.integers(size))
            return Draft(prompt=ask(number, system=""), answer=number)

        return make.name

    return register


def make_number(name, number):
    """The task of a tiny domain that asks for ``number``."""
    return Task(id="", domain=name, prompt=ask(str(number), system=""), answer=str(number))


def test_content_hash_is_blake2_of_compact_json():
    digest = hashlib.blake2b('["é",1,null]'.encode(), digest_size=8).hexdigest()
    assert f"{content_hash('é', 1, None):016x}" == digest
    assert content_hash("a", "b") != content_hash("ab")
    assert content_hash({"x": 1, "y": 2}) == content_hash({"y": 2, "x": 1})
    with pytest.raises(TypeError):
        content_hash(object())


def test_ids_are_pinned():
    for (name, level, split, index), expected in PINNED.items():
        task = draw(name, level, split, 0, index)
        assert (task.id, task.prompt[-1].content) == expected


def test_ids_are_the_same_in_a_process_with_another_hash_seed():
    script = (
        "import json\n"
        "from rlvr_jax.tasks import draw, expand_domains\n"
        "names = expand_domains(['arithmetic', 'text'])\n"
        "print(json.dumps([draw(n, 2, s, 5, 7).id for n in names for s in ('train', 'held_out')]))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=True,
    )
    here = [draw(name, 2, split, 5, 7).id for name in OWN for split in ("train", "held_out")]
    assert json.loads(run.stdout) == here


def test_the_id_follows_from_domain_prompt_and_answer():
    task = draw("text/last_word", 1, "train", 3, 4)
    assert task.id == task_id(task.domain, task.prompt, task.answer)
    assert task.id != task_id("text/first_word", task.prompt, task.answer)
    assert task.id != task_id(task.domain, task.prompt, "other")
    other = (*task.prompt[:-1], Message(role="user", content="other"))
    assert task.id != task_id(task.domain, other, task.answer)


def test_draws_repeat_and_depend_on_seed_index_and_level():
    def word(**changes) -> str:
        where = {"domain": "text/sort_words", "level": 2, "split": "train", "seed": 1, "index": 2}
        return draw(**{**where, **changes}).id

    assert word() == word()
    assert len({word(), word(seed=2), word(index=3), word(level=3), word(split="held_out")}) == 5


@pytest.mark.parametrize("name", OWN)
def test_train_and_held_out_tasks_never_meet(name):
    held_out, train = set(), set()
    for level in range(DOMAINS.get(name).num_levels):
        for index in range(30):
            train.add(draw(name, level, "train", index, index).prompt)
            held_out.add(draw(name, level, "held_out", index + 1000, index).prompt)
    assert train and held_out
    assert not train & held_out


def test_one_task_in_five_is_held_out():
    sides = [
        split_of(make_task(DOMAINS.get("text/sort_words"), 3, np.random.default_rng(index)))
        for index in range(1000)
    ]
    assert 0.16 < sides.count("held_out") / len(sides) < 0.24


def test_the_same_words_are_on_the_same_side_in_every_domain():
    task = draw("arithmetic/add", 1, "held_out", 0, 0)
    assert split_of(dataclasses.replace(task, domain="arithmetic/mixed", id="x")) == "held_out"


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split is 'test'; expected one of train, held_out"):
        draw("arithmetic/add", 0, "test", 0, 0)


@pytest.mark.parametrize("name", OWN)
def test_held_out_tasks_are_distinct_held_out_and_spread_over_levels(name):
    num_levels = DOMAINS.get(name).num_levels
    tasks = held_out_tasks(name, 3 * num_levels + 1, 0)
    assert len({task.key for task in tasks}) == len(tasks) == 3 * num_levels + 1
    assert {split_of(task) for task in tasks} == {"held_out"}
    assert [task.level for task in tasks] == [i % num_levels for i in range(len(tasks))]
    assert tasks == held_out_tasks(name, len(tasks), 0)


def test_held_out_tasks_of_some_levels_only():
    assert {task.level for task in held_out_tasks("arithmetic/add", 8, 0, levels=[1, 3])} == {1, 3}
    with pytest.raises(ValueError, match="has no level 9"):
        held_out_tasks("arithmetic/add", 8, 0, levels=[9])
    with pytest.raises(ValueError, match="levels of 'arithmetic/add' is empty"):
        held_out_tasks("arithmetic/add", 8, 0, levels=[])
    with pytest.raises(ValueError, match="num_tasks is 0; expected at least 1"):
        held_out_tasks("arithmetic/add", 0, 0)


def test_a_level_with_too_few_tasks_says_how_many_it_has(tiny_domain):
    name = tiny_domain(40)
    have = sum(split_of(make_number(name, n)) == "held_out" for n in range(40))
    assert len(held_out_tasks(name, have, 0)) == have
    message = f"'tiny/40', level 0 has too few distinct held-out tasks: {have} found"
    with pytest.raises(ValueError, match=message):
        held_out_tasks(name, have + 1, 0)


def test_a_level_that_is_all_on_one_side_is_an_error_and_not_an_endless_search(tiny_domain):
    name = tiny_domain(1)
    other = "train" if split_of(make_number(name, 0)) == "held_out" else "held_out"
    with pytest.raises(
        ValueError, match=f"gave 1 distinct tasks and none of them is on the {other} side"
    ):
        draw(name, 0, other, 0, 0)
