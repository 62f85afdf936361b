"""From tasks to scored groups, with a sampler that answers from a script."""

import threading
import time

import numpy as np
import pytest

from rlvr_jax.envs.single_turn import (
    DomainJudge,
    check_verifiers,
    make_trajectory,
    request_id,
    response_text,
    run_groups,
)
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.tasks.splits import draw
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.types import Completion, Message, Reward, SamplingParams, Task
from tests.training import toys

TOKENIZER = byte_level_tokenizer()
CHAT = ChatTemplate(TOKENIZER)
[STOP] = TOKENIZER.stop_token_ids
PARAMS = SamplingParams(max_tokens=8, temperature=0.5, seed=3)


def make_task(name, domain="toy/even"):
    return Task(id=name, domain=domain, prompt=(Message(role="user", content=name),), answer=None)


def completion(text, *, stop=True):
    tokens = np.array([*TOKENIZER.encode(text), *([STOP] if stop else [])], np.int32)
    return Completion(
        tokens=tokens,
        logprobs=-0.1 * np.arange(1, len(tokens) + 1, dtype=np.float32),
        stop_reason="stop" if stop else "length",
        policy_version=5,
    )


class Scripted:
    """Answers ``<number of the prompt>.<number of the sample>``, and remembers what it was asked."""

    def __init__(self):
        self.calls = []

    def sample(self, prompts, *, params, num_samples, request_ids):
        before = sum(len(call["prompts"]) for call in self.calls)
        self.calls.append(
            {"prompts": list(prompts), "params": params, "request_ids": list(request_ids)}
        )
        return [
            [completion(f"{before + row}.{g}", stop=g > 0) for g in range(num_samples)]
            for row in range(len(prompts))
        ]


def by_text(pairs):
    """A reward that says which task and which text it is about."""
    return [(Reward(name=f"{task.id}:{text}", value=float(text)),) for task, text in pairs]


def run(tasks, *, judge=by_text, group_size=2, step=4, **more):
    sampler = Scripted()
    groups = run_groups(
        tasks,
        sampler=sampler,
        tokenizer=TOKENIZER,
        chat=CHAT,
        judge=judge,
        params=PARAMS,
        group_size=group_size,
        step=step,
        **more,
    )
    return groups, sampler.calls


@pytest.mark.parametrize("tasks_per_call", [None, 1, 2, 5])
def test_answers_and_verdicts_stay_with_their_task_however_they_are_batched(tasks_per_call):
    tasks = [make_task(name) for name in "abcde"]
    groups, calls = run(tasks, tasks_per_call=tasks_per_call)
    assert [group.task for group in groups] == tasks
    assert {group.step for group in groups} == {4}
    assert max(len(call["prompts"]) for call in calls) == (tasks_per_call or 5)
    for number, (task, group) in enumerate(zip(tasks, groups, strict=True)):
        assert len(group.trajectories) == 2
        for g, trajectory in enumerate(group.trajectories):
            assert trajectory.text == f"{number}.{g}"
            assert trajectory.rewards[0].name == f"{task.id}:{number}.{g}"
            assert trajectory.sample_index == g
            assert trajectory.stop_reason == ("stop" if g else "length")
            assert trajectory.policy_version == (5, 5)


def test_a_trajectory_is_the_prompt_and_the_sampled_tokens_as_they_are():
    [task] = tasks = [make_task("hello")]
    [[first, second]] = [group.trajectories for group in run(tasks)[0]]
    prompt = CHAT.render_ids(task.prompt)
    for trajectory, text, ending in ((first, "0.0", []), (second, "0.1", [STOP])):
        response = [*TOKENIZER.encode(text), *ending]
        assert trajectory.tokens.dtype == np.int32
        assert trajectory.tokens.tolist() == [*prompt, *response]
        assert trajectory.response_mask.tolist() == [False] * len(prompt) + [True] * len(response)
        assert trajectory.turn_starts == (len(prompt),)
        np.testing.assert_allclose(
            trajectory.logprobs,
            [0] * len(prompt) + [-0.1 * (i + 1) for i in range(len(response))],
            rtol=1e-6,
        )


def test_the_stop_token_is_trained_on_and_is_no_part_of_the_text():
    assert response_text([*TOKENIZER.encode("12"), STOP], TOKENIZER) == "12"
    assert response_text(np.array([*TOKENIZER.encode("12")]), TOKENIZER) == "12"
    assert response_text([], TOKENIZER) == ""
    trajectory = make_trajectory([1], completion("12"), rewards=(), index=0, text="12")
    assert trajectory.tokens[-1] == STOP
    assert trajectory.response_mask[-1]


def test_text_is_judged_as_it_is_with_its_spaces():
    assert response_text(TOKENIZER.encode("answer \n"), TOKENIZER) == "answer \n"


def test_the_sampler_is_asked_with_keys_of_step_and_task_and_the_stop_ids():
    tasks = [make_task(name) for name in "ab"]
    _, [call] = run(tasks)
    assert call["request_ids"] == [request_id(4, task) for task in tasks]
    assert call["params"].stop_token_ids == (STOP,)
    assert (call["params"].seed, call["params"].temperature) == (3, 0.5)
    assert [list(p) for p in call["prompts"]] == [list(CHAT.render_ids(t.prompt)) for t in tasks]


def test_request_ids_are_32_bits_and_differ_by_step_domain_and_task():
    ids = {
        request_id(step, make_task(name, domain))
        for step in range(20)
        for name in "abcdefghij"
        for domain in ("x", "y")
    }
    assert len(ids) == 400
    assert all(0 <= value < 2**32 for value in ids)
    assert request_id(1, make_task("a")) == 2502497146  # the same on every machine, for ever


def test_one_part_is_judged_while_the_next_is_sampled():
    sampling, judging = threading.Event(), threading.Event()

    class Second(Scripted):
        def sample(self, prompts, **more):
            if self.calls:
                assert judging.wait(10)  # the first part is being judged now
                sampling.set()
            return super().sample(prompts, **more)

    def judge(pairs):
        judging.set()
        assert sampling.wait(10)
        return by_text(pairs)

    groups = run_groups(
        [make_task(name) for name in "ab"],
        sampler=Second(),
        tokenizer=TOKENIZER,
        chat=CHAT,
        judge=judge,
        params=PARAMS,
        group_size=1,
        step=0,
        tasks_per_call=1,
    )
    assert [group.trajectories[0].text for group in groups] == ["0.0", "1.0"]


def test_a_bug_in_the_judge_is_not_swallowed():
    def judge(pairs):
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        run([make_task("a")], judge=judge)


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(2, timeout_s=0.5) as pool:
        yield pool


def test_each_response_is_judged_by_the_verifiers_of_its_domain(pool):
    even, constant, moody = (
        draw(name, 0, "train", 0, 0) for name in ("toy/even", "toy/constant", "toy/hangs")
    )
    judge = DomainJudge(pool)
    began = time.monotonic()
    # Sums of codes modulo 16: "d" is 4, which hangs; "a" is 1, which raises; "f" is 6.
    rewards = judge([(even, "ab"), (moody, "d"), (constant, ""), (moody, "a"), (moody, "f")])
    assert time.monotonic() - began < 20
    assert [[(r.name, r.value, r.status) for r in found] for found in rewards] == [
        [("even", 0.5, "ok")],
        [("moody", 0.0, "timeout")],
        [("constant", 0.25, "ok")],
        [("moody", 0.0, "failed")],
        [("moody", 1.0, "ok")],
    ]
    assert "moody" in rewards[3][0].detail


def test_weights_and_parameters_of_a_domains_verifiers_are_kept(pool):
    specs = DomainJudge(pool).specs("toy/hangs")
    assert [(s.name, s.weight, s.params) for s in specs] == [(toys.moody, 1.0, {"hang": True})]


def test_a_domain_whose_verifier_cannot_run_is_found_before_it_is_needed(pool):
    check_verifiers(["toy/even", "toy/hangs"])
    with pytest.raises(ValueError, match="unknown domain 'toy/odd'"):
        check_verifiers(["toy/odd"])
