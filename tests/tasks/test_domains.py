"""The contract of every domain of our own: answers that are right, judged as such, asked for briefly."""

import re

import numpy as np
import pytest

from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.tasks.domains.text import WORDS
from rlvr_jax.tasks.registry import DOMAINS, expand_domains
from rlvr_jax.tasks.splits import draw, make_task
from rlvr_jax.types import Task

OWN = expand_domains(["arithmetic", "text"])
NUM_TASKS = 25


def tasks_of(name: str) -> list[Task]:
    """Some tasks of every level, of either side."""
    domain = DOMAINS.get(name)
    return [
        make_task(domain, level, np.random.default_rng([level, seed]))
        for level in range(domain.num_levels)
        for seed in range(NUM_TASKS)
    ]


def score(task: Task, response: str) -> float:
    uses = DOMAINS.get(task.domain).verifiers
    return sum(
        use.weight * VerifierSpec(use.name, use.weight, use.params).build()(task, response)
        for use in uses
    )


@pytest.mark.parametrize("name", OWN)
def test_the_gold_answer_scores_1_and_others_0(name):
    partial = sum(u.weight for u in DOMAINS.get(name).verifiers if u.name == "similarity")
    assert partial < 0.5
    for task in tasks_of(name):
        assert score(task, task.answer) == 1.0
        assert score(task, f" {task.answer}\n") == 1.0
        is_number = task.answer.lstrip("-").isdigit()
        after = f", or {int(task.answer) + 1}" if is_number else " zzz"
        for wrong in ("", "zzz", task.answer + after, task.answer + "1", "The answer is unknown."):
            assert score(task, wrong) <= partial, (task, wrong)
        if is_number:  # a sentence around the number is welcome, a later number is the answer
            assert score(task, f"That makes {task.answer}.") == 1.0


@pytest.mark.parametrize("name", OWN)
def test_prompts_are_a_short_system_message_an_example_or_none_and_a_short_question(name):
    for task in tasks_of(name):
        roles = [message.role for message in task.prompt]
        assert roles in (["system", "user"], ["system", "user", "assistant", "user"])
        assert len(task.prompt[0].content) <= 50
        assert len(task.prompt[-1].content) <= 140


@pytest.mark.parametrize("name", OWN)
def test_the_example_in_a_prompt_is_right(name):
    for task in tasks_of(name):
        if len(task.prompt) == 4:
            _, asked, answered, _ = task.prompt
            assert gold_of(name, asked.content) == answered.content


def gold_of(name: str, question: str) -> str:
    """The answer to an example's question, worked out apart from the domain's own code."""
    words = question.partition(": ")[2].split()
    first_letters = " ".join(word[0] for word in words)
    return {
        "text/first_word": words[0],
        "text/last_word": words[-1],
        "text/first_letter": first_letters,
        "text/uppercase": " ".join(words).upper(),
        "text/copy": " ".join(words),
        "text/sort_words": " ".join(sorted(words)),
        "text/reverse_words": " ".join(words[::-1]),
        "text/odd_one": min(words, key=words.count),
    }[name]


@pytest.mark.parametrize("name", OWN)
def test_answers_fit_the_response_budget(name):
    # A token a digit; two a common word, four when it is in capitals; and the stop token.
    budget = DOMAINS.get(name).max_response_tokens
    for task in tasks_of(name):
        if task.answer.lstrip("-").isdigit():
            tokens = len(task.answer)
        else:
            tokens = len(task.answer.split()) * (4 if task.answer.isupper() else 2)
        assert tokens + 1 <= budget, task


@pytest.mark.parametrize("name", OWN)
def test_every_level_has_many_tasks_on_both_sides(name):
    for level in range(DOMAINS.get(name).num_levels):
        for split, enough in (("train", 20), ("held_out", 8)):
            ids = {draw(name, level, split, 0, index).id for index in range(60)}
            assert len(ids) >= enough, (name, level, split, len(ids))


@pytest.mark.parametrize("name", [n for n in OWN if n.startswith("arithmetic/")])
def test_arithmetic_answers_are_what_python_computes(name):
    for task in tasks_of(name):
        question, answer = task.prompt[-1].content, int(task.answer)
        numbers = [int(n) for n in re.findall(r"\d+", question)]
        if name == "arithmetic/compare":
            assert answer == (max if "largest" in question else min)(numbers)
            assert len(set(numbers)) == len(numbers)
        elif name == "arithmetic/sequence":
            (step,) = set(np.diff([*numbers, answer]))
            assert step != 0
        else:
            expression = question.removeprefix("What is ").removesuffix("?")
            assert re.fullmatch(r"[0-9+\-*/() ]+", expression)
            assert answer == eval(expression)


def test_subtraction_never_goes_below_zero():
    assert min(int(task.answer) for task in tasks_of("arithmetic/sub")) >= 0


@pytest.mark.parametrize(
    "name", ["arithmetic/add", "arithmetic/sub", "arithmetic/mul", "arithmetic/compare"]
)
def test_numbers_grow_with_the_level(name):
    largest: dict[int, list[int]] = {}
    for task in tasks_of(name):
        numbers = [int(n) for n in re.findall(r"\d+", task.prompt[-1].content)]
        largest.setdefault(task.level, []).append(max(numbers))
    means = [np.mean(largest[level]) for level in sorted(largest)]
    assert means == sorted(means)


# Each computed from the question alone, another way than the domain does.
TEXT_ANSWERS = {
    "text/first_word": lambda words, question: words[0],
    "text/last_word": lambda words, question: words[-1],
    "text/first_letter": lambda words, question: " ".join(w[:1] for w in words),
    "text/uppercase": lambda words, question: "".join(c.upper() for c in " ".join(words)),
    "text/copy": lambda words, question: question.split(": ")[1],
    "text/sort_words": lambda words, question: " ".join(sorted(words)),
    "text/reverse_words": lambda words, question: " ".join(words[::-1]),
    "text/odd_one": lambda words, question: min(set(words), key=words.count),
    "text/count_words": lambda words, question: str(len(words)),
    "text/count_letters": lambda words, question: str(
        "".join(words).count(question.split(" letter ")[1][0])
        if " letter " in question
        else len(words[0])
    ),
}


@pytest.mark.parametrize("name", TEXT_ANSWERS)
def test_text_answers_are_right(name):
    for task in tasks_of(name):
        question = task.prompt[-1].content
        words = question.split(": ")[1].split()
        assert set(words) <= set(WORDS)
        assert task.answer == TEXT_ANSWERS[name](words, question)


def test_yes_no_answers_are_right_and_balanced():
    answers = []
    for task in tasks_of("text/yes_no"):
        question = task.prompt[-1].content
        if "in this list" in question:
            word, words = re.fullmatch(r"Is the word (\w+) in this list: (.*)", question).groups()
            expected = word in words.split()
        elif "begin" in question:
            word, letter = re.fullmatch(
                r"Does the word (\w+) begin with the letter (\w)\?", question
            ).groups()
            expected = word.startswith(letter)
        else:
            first, second = re.fullmatch(
                r"Does (\w+) come before (\w+) in the dictionary\?", question
            ).groups()
            expected = first < second
        assert task.answer == ("yes" if expected else "no")
        assert score(task, "no" if expected else "yes") == 0.0
        answers.append(task.answer)
    assert 0.35 < answers.count("yes") / len(answers) < 0.65


def test_the_form_is_part_of_the_answer():
    add = draw("arithmetic/add", 0, "train", 0, 0)
    assert score(add, f"1 + 1 = {add.answer}") == 1.0
    assert score(add, f"{add.answer} is the sum of 1 and 1") == 0.0
    upper = draw("text/uppercase", 1, "train", 0, 0)
    assert score(upper, upper.answer.lower()) == 0.0
    last = draw("text/last_word", 0, "train", 0, 0)
    assert score(last, last.answer.capitalize() + ".") == 1.0
    assert score(last, f"The last word is {last.answer}.") == 0.0


def test_words_are_distinct_and_lower_case():
    assert len(set(WORDS)) == len(WORDS) > 250
    assert all(word.isalpha() and word.islower() for word in WORDS)
