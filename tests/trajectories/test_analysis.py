from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rlvr_jax.trajectories.analysis import (
    PassRate,
    pass_at_k,
    pass_rates,
    response_lengths,
    reward_status_counts,
    wilson_interval,
)
from rlvr_jax.types import Group, Reward, RewardStatus, StopReason, Task, Trajectory


def make_group(
    domain: str,
    step: int,
    *values: float,
    status: RewardStatus = "ok",
    lengths: tuple[int, ...] | None = None,
    stop_reason: StopReason = "stop",
    error: str | None = None,
) -> Group:
    trajectories = tuple(
        Trajectory(
            tokens=np.zeros(length + 2, np.int32),
            response_mask=np.arange(length + 2) >= 2,
            logprobs=np.zeros(length + 2, np.float32),
            turn_starts=(2,),
            rewards=(Reward(name="exact", value=value, status=status),),
            stop_reason=stop_reason,
            policy_version=(0, 0),
            error=error,
        )
        for value, length in zip(values, lengths or (1,) * len(values), strict=True)
    )
    return Group(
        task=Task(id="t", domain=domain, prompt=(), answer=None),
        trajectories=trajectories,
        step=step,
    )


GROUPS = [
    make_group("b", 0, 1.0, 0.0, 0.5),
    make_group("a", 0, 1.0, 1.0),
    make_group("a", 10, 1.0, 0.0, status="timeout"),
    make_group("a", 9, 0.0, error="gone"),
]


def test_pass_rates_tell_apart_wrong_and_not_judged():
    assert pass_rates(GROUPS) == {
        "a": PassRate(num_passed=2, num_scored=2, num_total=5),
        "b": PassRate(num_passed=1, num_scored=3, num_total=3),
    }
    rate = pass_rates(GROUPS)["a"]
    assert (rate.rate, rate.rate_of_all, rate.interval) == (1.0, 0.4, wilson_interval(2, 2))
    assert math.isnan(pass_rates([GROUPS[2]])["a"].rate)


def test_pass_rates_by_step_are_in_numeric_order_and_partial_credit_needs_a_threshold():
    assert list(pass_rates(GROUPS, by=lambda group: group.step)) == [0, 9, 10]
    assert pass_rates(GROUPS, threshold=0.5)["b"].num_passed == 2


def test_response_lengths_count_sampled_tokens_only():
    groups = [
        make_group("a", 0, 1.0, 1.0, 1.0, lengths=(1, 2, 9)),
        make_group("a", 0, 1.0, lengths=(4,), stop_reason="length"),
    ]
    got = response_lengths(groups)
    assert (got.mean, got.median, got.max, got.truncated) == (4.0, 3.0, 9, 0.25)
    with pytest.raises(ValueError, match="no trajectories"):
        response_lengths([])


def test_reward_statuses_and_errors_are_counted():
    assert reward_status_counts(GROUPS) == {
        "exact": {"ok": 6, "timeout": 2},
        "trajectory": {"error": 1},
    }


@pytest.mark.parametrize(
    ("n", "c", "k"), [(5, 2, 1), (5, 2, 3), (6, 0, 2), (4, 4, 4), (5, 3, 3), (1, 1, 1)]
)
def test_pass_at_k_equals_the_share_of_all_subsets_with_a_correct_sample(n, c, k):
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_needs_k_samples():
    for n, c, k in [(4, 1, 5), (4, 5, 1), (4, 1, 0), (0, 0, 1)]:
        with pytest.raises(ValueError, match="draw at least k samples"):
            pass_at_k(n, c, k)


def test_wilson_intervals_are_the_published_ones():
    # Newcombe 1998, table I: 81/263, 15/148, 0/20, 1/29
    for successes, n, low, high in [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ]:
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(20, 20)[1] == 1.0
    with pytest.raises(ValueError, match="expected 0 <= successes <= n"):
        wilson_interval(3, 2)
