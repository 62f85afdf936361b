"""Figures of an evaluation: literal numbers, what is left out, and intervals that cover what they say."""

import io
import json
import math

import numpy as np
import pytest
import rich.console

from rlvr_jax.evaluation.report import table
from rlvr_jax.evaluation.runner import evaluate, measure, pass_rate, select_tasks
from rlvr_jax.tasks.registry import DOMAINS
from rlvr_jax.tasks.splits import split_of
from rlvr_jax.types import Group, Reward, Task, Trajectory


def trajectory(score, *, length=3, stop_reason="stop", status="ok", error=None):
    return Trajectory(
        tokens=np.arange(2 + length, dtype=np.int32),
        response_mask=np.arange(2 + length) >= 2,
        logprobs=np.zeros(2 + length, np.float32),
        turn_starts=(2,),
        rewards=(Reward(name="exact", value=score, status=status),),
        stop_reason=stop_reason,
        policy_version=(0, 0),
        error=error,
    )


def group(scores, *, domain="toy", number=0, **fields):
    task = Task(id=str(number), domain=domain, prompt=(), answer="")
    members = tuple(s if isinstance(s, Trajectory) else trajectory(s, **fields) for s in scores)
    return Group(task=task, trajectories=members, step=0)


def test_pass_at_k_is_the_mean_over_tasks_of_the_unbiased_estimate():
    groups = [group([1, 0, 0, 0]), group([1, 1, 0, 0]), group([0.5, 0.9, 0, 0])]
    assert pass_rate(groups, 1).value == pytest.approx((0.25 + 0.5 + 0) / 3)
    # 1 - C(3,2)/C(4,2), 1 - C(2,2)/C(4,2), 0
    assert pass_rate(groups, 2).value == pytest.approx((1 / 2 + 5 / 6 + 0) / 3)
    assert pass_rate(groups, 4).value == pytest.approx(2 / 3)


def test_what_could_not_be_judged_is_in_no_rate_and_is_counted():
    lost = trajectory(0.0, status="failed")
    late = trajectory(0.0, status="timeout")
    broken = trajectory(1.0, error="TimeoutError: no answer")
    groups = [group([1, 1, lost, late]), group([1, 0, 0, broken], number=1)]
    result = measure(groups, ks=(1, 2, 3)).domains["toy"]
    assert result.pass_at[1].value == pytest.approx((1 + 1 / 3) / 2)
    assert (result.pass_at[2].num_tasks, result.pass_at[3].num_tasks) == (2, 1)
    assert (result.num_failed, result.num_timeout, result.num_errors) == (1, 1, 1)
    assert (result.num_tasks, result.num_samples) == (2, 8)
    nothing = measure([group([lost, lost])], ks=(1,))
    rate = nothing.domains["toy"].pass_at[1]
    assert math.isnan(rate.value) and (rate.low, rate.high, rate.num_tasks) == (0, 1, 0)
    assert nothing.to_json()["domains"]["toy"]["pass@1"]["value"] is None
    assert nothing.to_json()["mean"]["pass@1"] is None


def test_lengths_and_truncation():
    members = [trajectory(1, length=2), trajectory(0, length=6, stop_reason="length")]
    result = measure([group(members)]).domains["toy"]
    assert (result.mean_length, result.truncated) == (4.0, 0.5)


def test_intervals_of_answers_that_agree_within_a_task_are_those_of_tasks():
    """Eight equal answers to a task say no more than one; eight independent ones say eight times as much."""
    agreeing = pass_rate([group([t % 2] * 8) for t in range(40)], 1)
    alone = pass_rate([group([t % 2]) for t in range(40)], 1)
    # Wilson, 20 of 40 (19 to 39 effective, as the variance is of a sample)
    assert (alone.low, alone.high) == pytest.approx((0.3520, 0.6480), abs=1e-4)
    assert (agreeing.low, agreeing.high) == pytest.approx((alone.low, alone.high))
    mixed = pass_rate([group([0, 1] * 4) for _ in range(40)], 1)
    # Every task at exactly 1/2: no variance between tasks, and the interval is still that of 40.
    assert (mixed.low, mixed.high) == pytest.approx((alone.low, alone.high))
    rng = np.random.default_rng(0)
    independent = pass_rate([group(list(rng.integers(0, 2, 8))) for _ in range(40)], 1)
    assert independent.high - independent.low < 0.6 * (alone.high - alone.low)


def test_95_percent_intervals_cover_the_truth_about_95_percent_of_the_time():
    """Task rates from a Beta distribution, as tasks of mixed difficulty have; Wilson on all answers covers it 73 %."""
    rng = np.random.default_rng(1)
    truth, covered, rounds = 0.3, 0, 400
    for _ in range(rounds):
        rates = rng.beta(0.6, 1.4, size=24)
        rate = pass_rate([group(list(rng.binomial(1, p, 8))) for p in rates], 1)
        covered += rate.low <= truth <= rate.high
    assert 0.92 <= covered / rounds <= 0.99


def test_evaluate_asks_for_every_task_once_with_the_step_of_the_policy():
    asked = {}

    def rollout(tasks, *, group_size, step):
        asked.update(tasks=tasks, group_size=group_size, step=step)
        return [
            group([1] * group_size, domain=task.domain, number=index)
            for index, task in enumerate(tasks)
        ]

    tasks = select_tasks(["arithmetic/add", "text/copy"], 6, seed=0)
    found = evaluate(tasks, rollout, num_samples=4, ks=(1, 4), step=7)
    assert (asked["group_size"], asked["step"], asked["tasks"]) == (4, 7, tasks)
    assert list(found.domains) == ["arithmetic/add", "text/copy"]
    assert found.mean(1) == found.mean(4) == 1.0
    assert len(found.groups) == 12
    record = json.loads(json.dumps(found.to_json()))
    assert record["domains"]["text/copy"]["pass@4"]["num_tasks"] == 6
    assert record["mean"] == {"pass@1": 1.0, "pass@4": 1.0}


def test_tasks_are_held_out_and_of_the_levels_asked_for():
    tasks = select_tasks("arithmetic", 6, seed=3, levels=[0, 2])
    assert {task.domain for task in tasks} == {n for n in DOMAINS if n.startswith("arithmetic/")}
    assert {task.level for task in tasks} == {0, 2}
    assert all(split_of(task) == "held_out" for task in tasks)
    capped = select_tasks("arithmetic/add", 6, seed=3, max_levels=2)
    assert [task.level for task in capped] == [0, 1] * 3
    with pytest.raises(ValueError, match="no level 9; expected 0 to 5"):
        select_tasks("arithmetic/add", 6, seed=0, levels=[9])
    with pytest.raises(ValueError, match="unknown domain 'arithmetic/ad'"):
        select_tasks("arithmetic/ad", 6, seed=0)


def test_what_cannot_be_estimated_is_refused_before_anything_is_sampled():
    def rollout(tasks, *, group_size, step):
        raise AssertionError("sampled")

    tasks = select_tasks("text/copy", 1, seed=0)
    with pytest.raises(ValueError, match="k is 1, 8 with num_samples=4; expected 1 <= k"):
        evaluate(tasks, rollout, num_samples=4, ks=(1, 8))
    with pytest.raises(ValueError, match="k is empty"):
        evaluate(tasks, rollout, num_samples=4, ks=())
    with pytest.raises(ValueError, match="no tasks"):
        evaluate([], rollout, num_samples=4)


def test_the_table_shows_every_figure():
    lost = trajectory(0.0, status="failed")
    evaluation = measure(
        [group([1, 1, 0, 0], stop_reason="length"), group([1, 0, lost, lost], domain="other")],
        ks=(1, 2),
    )
    console = rich.console.Console(width=120, file=io.StringIO())
    console.print(table(evaluation, title="a model"))
    rows = {
        line.split()[0]: " ".join(line.split())
        for line in console.file.getvalue().splitlines()
        if line.split()
    }
    assert rows["toy"] == "toy 1 4 50.0 [5, 95] 83.3 [14, 99] 3.0 100% 0"
    assert rows["other"].startswith("other 1 4 50.0 [5, 95] 100.0 [21, 100] 3.0 0% 2 failed")
    assert rows["mean"] == "mean 50.0 91.7"
