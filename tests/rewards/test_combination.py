import math

import numpy as np
import pytest

from rlvr_jax.rewards.combination import reward_metrics
from rlvr_jax.types import Reward, Trajectory


def test_a_scorer_error_is_neither_a_pass_nor_absent():
    metrics = reward_metrics(
        [
            Reward(name="a", value=1.0),
            Reward(name="a", value=0.0, status="failed"),
            Reward(name="a", value=0.0),
        ]
    )
    assert metrics == {
        "reward/a/mean_all": pytest.approx(1 / 3),
        "reward/a/mean_effective": 0.5,
        "reward/a/failed": 1.0,
        "reward/a/timeout": 0.0,
    }


def test_metrics_are_by_name_and_unweighted():
    metrics = reward_metrics(
        [Reward(name="a", value=1.0, weight=0.7), Reward(name="b", value=0.25, weight=0.3),
         Reward(name="b", value=0.75, weight=0.3), Reward(name="b", value=9.0, status="timeout")]
    )  # fmt: skip
    assert metrics["reward/a/mean_effective"] == 1.0
    assert metrics["reward/b/mean_effective"] == 0.5
    assert metrics["reward/b/mean_all"] == pytest.approx(1 / 3)
    assert metrics["reward/b/timeout"] == 1.0


def test_without_a_verdict_there_is_no_effective_mean():
    metrics = reward_metrics([Reward(name="a", value=0.0, status="timeout")])
    assert math.isnan(metrics["reward/a/mean_effective"]) and metrics["reward/a/mean_all"] == 0.0
    assert reward_metrics([]) == {}


def test_a_trajectory_scores_the_weighted_sum_and_a_zero_is_a_score():
    def trajectory(*rewards):
        return Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, bool),
            logprobs=np.zeros(1, np.float32),
            turn_starts=(0,),
            rewards=rewards,
            stop_reason="stop",
            policy_version=(0, 0),
        )

    right, wrong = Reward(name="a", value=1.0, weight=0.7), Reward(name="b", value=0.0, weight=0.3)
    assert trajectory(right, wrong).score == pytest.approx(0.7)
    assert trajectory(wrong).score == 0.0
    assert math.isnan(trajectory(right, Reward(name="b", value=0.0, status="timeout")).score)
