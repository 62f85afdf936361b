import json

import pytest
import reasoning_gym

from rlvr_jax.rewards.reasoning_gym import UNSCORABLE, ReasoningGym
from rlvr_jax.types import Task

# One of each kind of scorer: default, grids, parsed algebra, targets, lists, tuples lost in JSON.
DATASETS = [
    "chain_sum", "basic_arithmetic", "leg_counting", "spell_backward", "word_sorting", "number_sorting",
    "spiral_matrix", "binary_matrix", "string_insertion", "n_queens", "countdown", "puzzle24",
    "polynomial_multiplication", "simple_integration", "gsm_symbolic", "prime_factorization", "letter_counting",
    "base_conversion", "mini_sudoku", "maze", "simple_equations", "complex_arithmetic", "syllogism",
    "calendar_arithmetic", "fraction_simplification", "arc_agi", "rearc", "count_primes", "caesar_cipher",
]  # fmt: skip


def make(name, index=0, **config):
    entry = reasoning_gym.create_dataset(name, size=index + 1, seed=3, **config)[index]
    metadata = json.loads(json.dumps({"dataset": name, "entry": entry, "config": config}))
    return Task(id="1", domain=f"rg/{name}", prompt=(), answer=entry["answer"], metadata=metadata)


def score(task, answer):
    return ReasoningGym()(task, f"<think>hm</think><answer>{answer}</answer>")


# arc_agi reads its data files without closing them.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DATASETS)
def test_the_gold_answer_scores_one_and_junk_zero_after_a_trip_through_json(name):
    task = make(name)
    assert score(task, task.answer) == 1.0
    assert score(task, f"\n{task.answer}\n") == 1.0
    for junk in (
        "junk",
        "0",
        f"{task.answer} {task.answer} junk",
        "None",
        "[]",
        "42; 43",
        "{}",
        "()" * 50,
    ):
        assert score(task, junk) == 0.0, junk
    assert ReasoningGym()(task, task.answer) == 0.0  # no tags


def test_the_whole_response_can_be_the_answer():
    task = make("chain_sum")
    assert ReasoningGym(mode="whole")(task, f" {task.answer} ") == 1.0
    assert ReasoningGym(mode="whole")(task, f"It is {task.answer}") == 0.0


def test_an_answer_that_merely_contains_the_right_one_scores_zero():
    task = make("spell_backward")
    assert score(task, f"{task.answer}, I think") == 0.0


@pytest.mark.parametrize("name", ["countdown", "puzzle24"])
def test_targets_are_reached_exactly_with_the_given_numbers(name):
    task = make(name)
    assert score(task, task.answer.replace("*", " * ")) == 1.0
    numbers = task.metadata["entry"]["metadata"]["numbers"]
    target = task.metadata["entry"]["metadata"].get("target", 24)
    for cheat in (
        str(target),
        f"{target} + 0*{numbers[0]}",
        f"{task.answer} + 0",
        f"{target}.0",
        "24*1*1*1",
        f"{task.answer}**1",
    ):
        assert score(task, cheat) == 0.0, cheat


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gsm_symbolic", lambda a: [f"-{a}", f"{a}%", f"{a} or 7", f"{int(a) + 1}"]),
        ("coin_flip", lambda a: ["0", "0.", a[:3], "0.5" if a != "0.5" else "0.25"]),
        ("number_format", lambda a: [f"{a}1", f"{float(a) + 0.001}"]),
        ("decimal_arithmetic", lambda a: [f"{float(a) + 0.001}", f"-{a}"]),
        ("number_sorting", lambda a: [a.replace("'", "").replace("[", "[1"), "[]", a + a, a[:-1]]),
        (
            "time_intervals",
            lambda a: [a.replace("0", "1", 1), a.replace("2", "3", 1), a.replace("5", "4", 1)],
        ),
        ("calendar_arithmetic", lambda a: [f"{a}0", "Never"]),
    ],
)
def test_scorers_that_are_too_generous_are_not_relied_on(name, changes):
    for index in range(6):
        task = make(name, index)
        assert score(task, task.answer) == 1.0
        for wrong in changes(task.answer):
            assert wrong == task.answer or score(task, wrong) == 0.0, (task.answer, wrong)


@pytest.mark.parametrize(
    "name", ["spiral_matrix", "n_queens", "countdown", "puzzle24", "polynomial_multiplication", "simple_integration",
             "intermediate_integration", "number_sorting", "binary_matrix", "string_insertion"],
)  # fmt: skip
def test_no_scorer_executes_the_answer(name, tmp_path):
    marker = tmp_path / "marker"
    task = make(name)
    for attack in (
        f"__import__('pathlib').Path('{marker}').touch()",
        f"[open('{marker}', 'w')]",
        f"(lambda: open('{marker}', 'w'))()",
        "().__class__.__base__.__subclasses__()",
    ):
        assert score(task, attack) == 0.0
    assert not marker.exists()


def test_algebra_with_huge_powers_is_not_parsed():
    assert score(make("polynomial_multiplication"), "9**9**9**9") == 0.0
    assert score(make("simple_integration"), "x**99999999") == 0.0


def test_configurations_reach_the_scorer():
    task = make("puzzle24", min_value=1, max_value=6)
    assert score(task, task.answer) == 1.0


@pytest.mark.parametrize("name", list(UNSCORABLE))
def test_datasets_that_accept_anything_are_refused(name):
    task = make(name)
    with pytest.raises(ValueError, match="cannot be scored"):
        score(task, "anything")


def test_an_item_that_is_broken_cannot_be_judged():
    task = Task(id="1", domain="rg/x", prompt=(), answer="1", metadata={})
    with pytest.raises(ValueError, match="metadata"):
        score(task, "1")
    task = Task(
        id="1", domain="rg/x", prompt=(), answer="1", metadata={"dataset": "chain_sum", "entry": {}}
    )
    with pytest.raises(KeyError):
        score(task, "1")
