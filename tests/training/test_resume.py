"""A run that was killed, damaged or extended ends bit for bit like one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ConfigError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.training import rl
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.report import read_summary
from rlvr_jax.training.state import OptimizerConfig, abstract_state, make_optimizer
from rlvr_jax.trajectories.store import ParquetStore
from tests.training.toys import REPOSITORY, get_config, override

NUM_STEPS = 8
# Everything a checkpoint has to hold is in use: curriculum, KL controller, counters, refills, several updates a step.
SETTINGS = {
    "num_steps": NUM_STEPS,
    "checkpoint__every": 2,
    "tasks__tasks_per_step": 4,
    "tasks__max_refills": 1,
    "tasks__domains": ("toy/raises", "toy/constant"),
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_coef": 0.05,
    "algorithm__kl_target": 0.001,
    "train__num_minibatches": 2,
}


def config(**more):
    return override(get_config(), **{**SETTINGS, **more})


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """As the processes have that are started here: fewer programs to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
        yield


def outcome(workdir):
    """What must be the same: the last state, what was trained on, what was logged, the answers before and after."""
    model = load_pretrained(TINY).config
    optimizer = make_optimizer(OptimizerConfig(num_steps=1, **get_config().optimizer))
    mesh = make_mesh(devices=jax.devices()[:1])
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        restored = checkpointer.restore(abstract_state(model, optimizer, mesh))
    assert restored is not None
    host = {name: value for name, value in restored.host.items() if name != "seconds"}
    state = jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), restored.state)
    groups = ParquetStore(workdir / "trajectories").read()
    held_out = ParquetStore(workdir / "held_out").read([0, NUM_STEPS])
    sampled = [
        (group.step, group.key, t.sample_index, t.tokens.tobytes(), t.logprobs.tobytes(), t.rewards)
        for group in [*groups, *held_out]
        for t in group.trajectories
    ]
    metrics = [
        {name: value for name, value in record.items() if not name.startswith(("time", "perf/"))}
        for record in read_metrics(workdir)
    ]
    return {
        "step": restored.step,
        "state": state,
        "host": host,
        "sampled": sampled,
        "metrics": metrics,
    }


def assert_same(workdir, expected):
    found = outcome(workdir)
    for name, value in expected.items():
        # Not assert ==: pytest would print both, which are long.
        same = jax.tree.all(jax.tree.map(lambda a, b: a == b, found[name], value))
        assert same, f"{name} differs"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbed."""
    workdir = tmp_path_factory.mktemp("whole")
    rl.train(config(), workdir)
    found = outcome(workdir)
    assert found["step"] == NUM_STEPS
    assert [record["step"] for record in found["metrics"]] == list(range(NUM_STEPS))
    assert sum(record["updates"] for record in found["metrics"]) >= NUM_STEPS
    kl_coefs = {record["kl_coef"] for record in found["metrics"]}
    assert len(kl_coefs) > 2  # the controller moves
    return found


def start(workdir):
    flags = [
        f"--config={REPOSITORY / 'tests' / 'training' / 'toy_config.py'}",
        f"--workdir={workdir}",
    ]
    for key, value in SETTINGS.items():
        value = ",".join(value) if isinstance(value, tuple) else value
        flags.append(f"--config.{key.replace('__', '.')}={value}")
    return subprocess.Popen(
        [sys.executable, "-m", "rlvr_jax", "train", *flags],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(workdir):
    """Runs to the end in a process of its own, and returns the summary."""
    process = start(workdir)
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output.decode()
    return read_summary(workdir)


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """As ``whole``, in a process like those that are killed.

    XLA:CPU splits some sums by how many threads a process has, which follows from its number of virtual devices: runs
    are bitwise the same where that is.
    """
    workdir = tmp_path_factory.mktemp("apart")
    finish(workdir)
    return outcome(workdir)


def kill_when(process, happened, delay_s=0.0):
    deadline = time.monotonic() + 200
    while not happened() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    return output.decode()


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            "trajectories/step_1.0.parquet",
            id="before the first checkpoint",
            marks=pytest.mark.slow,
        ),
        pytest.param("checkpoints/step_4/manifest.json", id="between checkpoints"),
        pytest.param("checkpoints/step_6", id="in a checkpoint", marks=pytest.mark.slow),
        pytest.param("held_out", id="in the first evaluation", marks=pytest.mark.slow),
        pytest.param("held_out/step_8.0.parquet", id="at the end", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_bitwise_like_one_left_alone(apart, tmp_path, file):
    process = start(tmp_path)
    output = kill_when(process, (tmp_path / file).exists)
    assert process.returncode == -signal.SIGKILL, output
    assert not (tmp_path / "summary.json").exists()
    summary = finish(tmp_path)
    assert_same(tmp_path, apart)
    assert summary["steps"] == NUM_STEPS


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_at_random_moments_ends_bitwise_like_one_left_alone(apart, tmp_path, seed):
    generator = random.Random(seed)
    for _ in range(3):
        process = start(tmp_path)
        assert process.stdout is not None
        process.stdout.readline()  # it answers the first held-out tasks, or says from where it resumes
        output = kill_when(process, lambda: True, generator.uniform(0, 12))
        assert process.returncode in (0, -signal.SIGKILL), output
    finish(tmp_path)
    assert_same(tmp_path, apart)


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, caplog):
    rl.train(config(), tmp_path)
    newest = tmp_path / "checkpoints" / f"step_{NUM_STEPS}"
    largest = max(newest.rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    rl.train(config(), tmp_path)
    assert f"using step_{NUM_STEPS - 2}" in caplog.text
    assert_same(tmp_path, whole)


def test_running_a_finished_run_again_gives_its_summary_and_touches_nothing(tmp_path, whole):
    first = rl.train(config(), tmp_path)
    files = [*(tmp_path / "trajectories").iterdir(), *(tmp_path / "checkpoints").iterdir()]
    times = [path.stat().st_mtime_ns for path in files]
    assert rl.train(config(), tmp_path) == first
    assert [path.stat().st_mtime_ns for path in files] == times
    assert_same(tmp_path, whole)


def test_a_run_made_longer_goes_on_from_where_it_was(tmp_path, whole):
    short = rl.train(config(num_steps=3), tmp_path)
    assert short["steps"] == 3
    summary = rl.train(config(), tmp_path)
    assert summary["steps"] == NUM_STEPS
    assert summary["seconds"] > short["seconds"]
    assert_same(tmp_path, whole)
    with pytest.raises(ConfigError, match=r"a run of 8 steps; num_steps is 3.*--fresh"):
        rl.train(config(num_steps=3), tmp_path)
    assert_same(tmp_path, whole)
