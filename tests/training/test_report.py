import json
import math

import numpy as np
import pytest

from rlvr_jax.training import report
from rlvr_jax.training.report import read_summary, write_report
from rlvr_jax.types import Group, Reward, Task, Trajectory


def group(domain, *scores):
    """A group with these scores; None is a failed verdict."""
    trajectories = tuple(
        Trajectory(
            tokens=np.array([1, 2], np.int32),
            response_mask=np.array([False, True]),
            logprobs=np.zeros(2, np.float32),
            turn_starts=(1,),
            rewards=(
                Reward(
                    name="x", value=score or 0.0, status="ok" if score is not None else "failed"
                ),
            ),
            stop_reason="stop",
            policy_version=(0, 0),
        )
        for score in scores
    )
    task = Task(id="1", domain=domain, prompt=(), answer=None)
    return Group(task=task, trajectories=trajectories, step=0)


METRICS = [{"step": step, "reward/mean": step / 3} for step in range(3)] + [{"step": 3}]


@pytest.fixture
def write(tmp_path):
    def call(before, after, metrics=METRICS):
        said = []
        summary = write_report(
            tmp_path,
            before=before,
            after=after,
            metrics=metrics,
            seconds=90.0,
            steps=3,
            seed=7,
            device="abacus",
            model="m",
            say=said.append,
        )
        return summary, "\n".join(said)

    return call


def test_the_summary_compares_passed_by_judged_answers_per_domain(write, tmp_path):
    before = [group("a/x", 0.0, 0.0, 1.0, 0.5), group("b/y", 0.0, 0.0)]
    after = [group("a/x", 1.0, 1.0, 1.0, 0.0), group("b/y", 1.0, None)]
    summary, said = write(before, after)
    assert summary == {
        "domains": {
            "a/x": {"before": 0.25, "after": 0.75, "n": 4},
            "b/y": {"before": 0.0, "after": 1.0, "n": 1},  # what could not be judged does not count
        },
        "mean_before": 0.125,
        "mean_after": 0.875,
        "seconds": 90.0,
        "steps": 3,
        "seed": 7,
        "device": "abacus",
        "model": "m",
    }
    assert read_summary(tmp_path) == json.loads((tmp_path / "summary.json").read_text()) == summary
    assert not list(tmp_path.glob("*.partial"))
    for words in ("25.0%", "75.0%", "+50.0 points", "12.5%", "87.5%", "+75.0 points"):
        assert words in said
    assert "3 steps in 1.5 minutes on abacus" in said
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_domain_nobody_could_judge_is_null_not_0_and_strict_json(write, tmp_path):
    summary, said = write(
        [group("a/x", 1.0), group("b/y", 0.0)], [group("a/x", 1.0), group("b/y", None)]
    )
    assert summary["domains"]["b/y"] == {"before": 0.0, "after": None, "n": 0}
    assert summary["mean_before"] == 0.5
    assert summary["mean_after"] is None

    def no_constant(name):
        raise AssertionError(name)

    json.loads((tmp_path / "summary.json").read_text(), parse_constant=no_constant)
    assert "0.0%" in said
    assert (tmp_path / "curve.png").exists()


def test_a_curve_is_drawn_though_steps_were_not_scored(write, tmp_path):
    write([group("a", None)], [group("a", None)], [{"step": 0, "reward/mean": math.nan}])
    assert (tmp_path / "curve.png").exists()


def test_without_matplotlib_the_rest_of_the_report_is_there(write, tmp_path, monkeypatch):
    def absent(*_, **__):
        raise report.MissingExtraError("matplotlib is not installed; pip install 'rlvr_jax[plot]'")

    monkeypatch.setattr(report, "plot_curve", absent)
    summary, said = write([group("a", 0.0)], [group("a", 1.0)])
    assert summary["mean_after"] == 1.0
    assert "no curve.png: matplotlib is not installed" in said
    assert (tmp_path / "summary.json").exists()


def test_there_is_no_summary_before_there_is_one(tmp_path):
    assert read_summary(tmp_path) is None
