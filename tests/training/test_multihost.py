"""Two processes of four devices train as one process of eight does; one that is lost or told to stop costs no work."""

import json
import os
import random
import signal
import time

import jax
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ConfigError, Preempted
from rlvr_jax.training import rl, workdir
from rlvr_jax.training.policy import load_pretrained
from rlvr_jax.training.shared_judge import SharedJudge, decode_rewards, encode_rewards
from rlvr_jax.trajectories.store import ParquetStore
from rlvr_jax.types import Message, Reward, Task
from tests.process_group import REPOSITORY, process_group
from tests.training.toys import get_config, override

NUM_STEPS = 4
SETTINGS = {
    "num_steps": NUM_STEPS,
    # No fsdp: devices of one process may come to the gathers of two parameters in different orders, and XLA:CPU, with
    # fewer cores than devices, then waits for ever.
    "mesh__data": 8,
    "mesh__fsdp": 1,
    "checkpoint__every": 2,
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_coef": 0.05,
}


def config(**more):
    return override(get_config(), **{**SETTINGS, **more})


def train_together(folder, *, count=2, devices=8, **more):
    """``rlvr train`` by ``count`` processes, with eight devices in all."""
    flags = [
        f"--config.{key.replace('__', '.')}={value}" for key, value in {**SETTINGS, **more}.items()
    ]
    file = REPOSITORY / "tests" / "training" / "toy_config.py"
    command = ["-m", "rlvr_jax", "train", f"--config={file}", f"--workdir={folder}", *flags]
    logs = folder.with_suffix(f".logs{count}")
    return process_group(*command, folder=logs, count=count, devices=devices // count)


def train_alone(folder, **more):
    """The same by one process of eight devices: not this one, which XLA would end if it had to wait for long."""
    with train_together(folder, count=1, **more) as group:
        assert group.wait(600) == [0], group.log(0)[-3000:]


def assert_same(found, expected):
    """The same tokens, verdicts and answers; log-probabilities and weights to 1e-5."""
    for name in ("trajectories", "held_out"):
        ours, theirs = (ParquetStore(folder / name).read() for folder in (found, expected))
        assert [(g.step, g.key) for g in ours] == [(g.step, g.key) for g in theirs]
        for group, other in zip(ours, theirs, strict=True):
            for a, b in zip(group.trajectories, other.trajectories, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                assert (a.rewards, a.text, a.stop_reason) == (b.rewards, b.text, b.stop_reason)
                np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    ours, theirs = (load_pretrained(folder).params for folder in (found, expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The run of one process, undisturbed."""
    folder = tmp_path_factory.mktemp("one") / "run"
    train_alone(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("schedule", ["staged", "fused"])
def test_two_processes_sample_and_train_like_one(one, tmp_path, schedule):
    expected = one
    if schedule == "fused":
        expected = tmp_path / "one"
        train_alone(expected, schedule="fused")
    with train_together(tmp_path / "two", schedule=schedule) as group:
        assert group.wait(600) == [0, 0], group.log(0)[-3000:] + group.log(1)[-3000:]
    assert "held-out pass rate" in group.log(0)
    assert "step 1/" not in group.log(1)  # one writer
    assert_same(tmp_path / "two", expected)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_notice_to_one_process_saves_the_run_which_goes_on_with_another_number(one, tmp_path):
    folder = tmp_path / "run"
    with train_together(folder, checkpoint__every=100) as group:
        group.wait_for(folder / "trajectories" / "step_0.0.parquet", 400)
        group.processes[1].send_signal(signal.SIGTERM)
        assert group.wait(300) == [0, 0], group.log(0)[-3000:] + group.log(1)[-3000:]
    assert f"of {NUM_STEPS}: all of it is in {folder}" in group.log(0)
    assert not (folder / "summary.json").exists()
    [saved] = (folder / "checkpoints").glob("step_*/manifest.json")
    assert 1 <= int(saved.parent.name.removeprefix("step_")) < NUM_STEPS
    train_alone(folder, devices=2, mesh__data=1, mesh__fsdp=2)
    assert json.loads((folder / "summary.json").read_text())["steps"] == NUM_STEPS
    assert_same(folder, one)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_a_process_killed_at_a_random_moment_ends_the_other_in_time_and_the_run_resumes(
    one, tmp_path, seed
):
    generator = random.Random(seed)
    folder, killed = tmp_path / "run", generator.randrange(2)
    with train_together(folder) as group:
        group.wait_for(folder / "trajectories" / "step_0.0.parquet", 400)
        time.sleep(generator.uniform(0, 3))
        group.processes[killed].send_signal(signal.SIGKILL)
        began = time.monotonic()
        statuses = group.wait(200)
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] not in (0, -signal.SIGKILL)
    said = group.log(1 - killed)
    assert "Another process has most likely ended" in said or "another task died" in said
    assert time.monotonic() - began < 150
    with train_together(folder) as group:
        assert group.wait(600) == [0, 0], group.log(0)[-3000:] + group.log(1)[-3000:]
    assert_same(folder, one)


@pytest.mark.slow
def test_sigterm_to_a_single_process_saves_after_the_step_and_the_same_call_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rl, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
    settings = override(get_config(), num_steps=3)
    rl.train(settings, tmp_path / "whole")
    metrics = rl.rollout_metrics
    notices = [lambda: os.kill(os.getpid(), signal.SIGTERM)]

    def told_in_the_first_step(groups):
        if notices:
            notices.pop()()
        return metrics(groups)

    monkeypatch.setattr(rl, "rollout_metrics", told_in_the_first_step)
    with pytest.raises(Preempted, match=r"after step 1 of 3: all of it is in .*told, and the same"):
        rl.train(settings, tmp_path / "told")
    assert (tmp_path / "told/checkpoints/step_1/manifest.json").exists()
    assert rl.train(settings, tmp_path / "told")["steps"] == 3
    ours, theirs = (load_pretrained(tmp_path / name).params for name in ("told", "whole"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_folder_that_another_process_does_not_see_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(workdir, "gather", lambda name, value: [value, False])
    with pytest.raises(ConfigError, match="process 1 of 2 does not see what process 0 wrote"):
        workdir.open_workdir(tmp_path, config(), fresh=False)


VERDICTS = [
    (Reward(name="a", value=0.1), Reward(name="b", value=-1.0, weight=0.5, status="failed")),
    (),
    (Reward(name="a", value=0.0, status="timeout", detail="no \ud800 verdict"),),
]


def test_verdicts_come_back_from_json_as_they_were():
    assert decode_rewards(encode_rewards(VERDICTS)) == VERDICTS


def test_each_process_judges_its_share_and_all_get_all_verdicts_in_order(monkeypatch):
    task = Task(id="t", domain="d", prompt=(Message(role="user", content=""),), answer=None)
    pairs = [(task, str(index)) for index in range(7)]
    judged, shares = [], {}

    def judge(own):
        judged.append([text for _, text in own])
        return [(Reward(name="r", value=float(text)),) for _, text in own]

    def at(process):
        monkeypatch.setattr("jax.process_index", lambda: process)
        return SharedJudge(judge, timeout_s=1)(pairs)

    assert SharedJudge(judge, timeout_s=1)(pairs) == judge(pairs)
    judged.clear()
    monkeypatch.setattr("jax.process_count", lambda: 3)
    names = "rlvr_jax.training.shared_judge.gather"
    monkeypatch.setattr(
        names, lambda name, value, deadline_s: shares.update({jax.process_index(): value}) or []
    )
    for process in range(3):
        at(process)
    assert [text for share in judged for text in share] == [text for _, text in pairs]
    assert max(map(len, judged)) - min(map(len, judged)) <= 1
    monkeypatch.setattr(names, lambda name, value, deadline_s: [shares[i] for i in range(3)])
    assert [rewards[0].value for rewards in at(1)] == list(range(7))
