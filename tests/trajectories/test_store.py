from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.trajectories.schema import deserialize_groups, serialize_groups
from rlvr_jax.trajectories.store import ParquetStore
from rlvr_jax.types import Group, Message, Reward, Task, Trajectory, TrajectoryStore


def make_trajectory(rng: np.random.Generator, index: int = 0, **changes) -> Trajectory:
    length = int(rng.integers(1, 40))
    fields = dict(
        tokens=rng.integers(0, 50_000, length).astype(np.int32),
        response_mask=rng.integers(0, 2, length).astype(np.bool_),
        logprobs=rng.standard_normal(length).astype(np.float32),
        turn_starts=(0, length // 2),
        rewards=(
            Reward(name="exact", value=0.1),
            Reward(name="format", value=1.0, weight=0.3, status="timeout"),
        ),
        stop_reason="length",
        policy_version=(3, 4),
        sample_index=index,
        text="x = 7",
    )
    return Trajectory(**{**fields, **changes})


def make_group(
    step: int = 0, task_id: str = "t0", size: int = 3, seed: int = 0, **changes
) -> Group:
    rng = np.random.default_rng(seed)
    task = Task(
        id=task_id,
        domain="arithmetic",
        prompt=(Message(role="system", content="be short"), Message(role="user", content="3 + 4?")),
        answer={"value": 7, "ways": [1.5, None, True]},
        metadata={"level": 2, "source": "made"},
    )
    return Group(
        task=task,
        trajectories=tuple(make_trajectory(rng, i, **changes) for i in range(size)),
        step=step,
    )


def assert_same(got: list[Group], want: list[Group]) -> None:
    """Every field of every type, arrays by dtype and bits (NaN and -0 included)."""
    assert len(got) == len(want)
    for group, other in zip(got, want, strict=True):
        assert (group.task, group.step) == (other.task, other.step)
        assert len(group.trajectories) == len(other.trajectories)
        for a, b in zip(group.trajectories, other.trajectories, strict=True):
            for field in dataclasses.fields(Trajectory):
                x, y = getattr(a, field.name), getattr(b, field.name)
                if isinstance(y, np.ndarray):
                    assert (
                        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
                    ), field.name
                    assert x.flags.writeable
                else:
                    assert x == y and type(x) is type(y), field.name


def test_groups_come_back_field_for_field():
    special = np.array([np.nan, -0.0, np.inf, -np.inf, 1e-45], np.float32)
    odd = make_trajectory(
        np.random.default_rng(1),
        tokens=np.array([0, 2**31 - 1, -1, 5, 5], np.int32),
        response_mask=np.array([True, False, True, True, False]),
        logprobs=special,
        turn_starts=(),
        rewards=(),
        error="sandbox: gone",
        stop_reason="error",
    )
    empty = make_trajectory(
        np.random.default_rng(1),
        tokens=np.empty(0, np.int32),
        response_mask=np.empty(0, np.bool_),
        logprobs=np.empty(0, np.float32),
        text="",
    )
    groups = [
        make_group(4),
        make_group(5, "t1", 1),
        dataclasses.replace(make_group(), trajectories=(odd, empty)),
    ]
    assert_same(deserialize_groups(serialize_groups(groups)), groups)
    assert deserialize_groups(serialize_groups([])) == []


def test_two_groups_of_one_task_stay_two():
    groups = [make_group(0, seed=1), make_group(0, seed=2)]
    assert_same(deserialize_groups(serialize_groups(groups)), groups)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec=None), max_size=30))
def test_text_is_stored_verbatim(text):
    rewards = (Reward(name="r", value=0.0, status="failed", detail=text),)
    group = make_group(size=1, text=text, error=text, rewards=rewards)
    task = dataclasses.replace(
        group.task, id=text, prompt=(Message(role="user", content=text),), answer=text
    )
    group = dataclasses.replace(group, task=dataclasses.replace(task, metadata={text: text}))
    assert_same(deserialize_groups(serialize_groups([group])), [group])


@pytest.mark.parametrize(
    "text", ["a\u2028b\x85c\x00", "\ud83d", "\ud83d\ude00", "\ue000d83d", "\ue000", "\uffff"]
)
def test_text_that_utf8_or_line_readers_trip_over_is_stored_verbatim(text):
    group = make_group(size=1, text=text)
    group = dataclasses.replace(group, task=dataclasses.replace(group.task, answer=[text]))
    assert_same(deserialize_groups(serialize_groups([group])), [group])


def test_numpy_values_in_a_task_become_plain_json():
    group = make_group()
    task = dataclasses.replace(
        group.task, answer=np.int64(7), metadata={"p": np.float32(0.5), "v": np.arange(2)}
    )
    [stored] = deserialize_groups(serialize_groups([dataclasses.replace(group, task=task)]))
    assert stored.task.answer == 7 and stored.task.metadata == {"p": 0.5, "v": [0, 1]}


def test_what_would_not_come_back_is_refused():
    with pytest.raises(ValueError, match=r"logprobs is float64\[\d+\]; expected float32"):
        serialize_groups([make_group(logprobs=np.zeros(3))])
    with pytest.raises(ValueError, match="no trajectories"):
        serialize_groups([make_group(size=0)])
    group = make_group()
    with pytest.raises(TypeError, match="expected JSON values"):
        serialize_groups(
            [dataclasses.replace(group, task=dataclasses.replace(group.task, answer={1, 2}))]
        )


def test_store_reads_by_step_in_numeric_order_and_by_attempt(tmp_path):
    store = ParquetStore(tmp_path / "a=1")  # not a partition
    assert isinstance(store, TrajectoryStore)
    for step in (10, 9, 2):
        store.append([make_group(step, f"first{step}"), make_group(step, f"second{step}")])
    store.append([make_group(9, "refill")])
    store.append([])
    assert [g.task.id for g in store.read()] == [
        "first2", "second2", "first9", "second9", "refill", "first10", "second10",
    ]  # fmt: skip
    assert [g.task.id for g in store.read(10)] == ["first10", "second10"]
    assert [g.step for g in store.read(range(3, 10))] == [9, 9, 9]
    assert store.steps() == [2, 9, 10]
    assert_same(store.read(2), [make_group(2, "first2"), make_group(2, "second2")])


def test_a_resumed_run_stores_each_step_once(tmp_path):
    store = ParquetStore(tmp_path)
    for step in range(12):
        store.append([make_group(step, "lost" if step >= 10 else "kept")])
    resumed = ParquetStore(tmp_path)
    resumed.truncate(10)
    for step in (10, 11):
        resumed.append([make_group(step, "again")])
    assert [(g.step, g.task.id) for g in resumed.read(range(9, 12))] == [
        (9, "kept"),
        (10, "again"),
        (11, "again"),
    ]
    assert len(resumed.read()) == 12


KILLED = """
import sys
from tests.trajectories.test_store import make_group
from rlvr_jax.trajectories.store import ParquetStore
store = ParquetStore(sys.argv[1])
for step in range(10**6):
    store.append([make_group(step, size=200)])
    print(step, flush=True)
"""


def test_a_killed_writer_leaves_whole_files_only(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, os.fspath(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        text=True,
    )
    assert process.stdout is not None
    written = process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    stored = int((written + process.stdout.read()).split()[-1])
    process.wait()
    process.stdout.close()
    (tmp_path / f"step_{stored + 1}.0.partial").write_bytes(
        b"PAR1 half"
    )  # in case it was killed between two
    groups = ParquetStore(tmp_path).read()
    assert [g.step for g in groups] == list(range(len(groups))) and len(groups) > stored
    ParquetStore(tmp_path).truncate(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0.0.parquet"]


def test_a_full_disk_is_an_error_and_leaves_what_was_stored(tmp_path):
    store = ParquetStore(tmp_path)
    store.append([make_group(0)])
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (1 << 14, old[1])
        )  # the kernel refuses longer files
        with pytest.raises(OSError, match=r"step 1 could not be written.*MB free"):
            store.append([make_group(1, size=2000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step_0.0.parquet"]
    assert_same(store.read(), [make_group(0)])


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        contextlib.chdir(tmp_path),
        pytest.raises(OSError, match=r"cannot be created.*choose another workdir"),
    ):
        ParquetStore("file/trajectories")


def test_five_thousand_trajectories_take_a_few_megabytes(tmp_path):
    """Prompts of 100 tokens, responses of 100 with their logprobs and text: incompressible, 1.5 kB a trajectory."""
    rng = np.random.default_rng(0)
    sampled = np.arange(200) >= 100
    store = ParquetStore(tmp_path)

    def group(step: int, task: int) -> Group:
        prompt = rng.integers(0, 49152, 100)
        trajectories = tuple(
            make_trajectory(
                rng,
                i,
                tokens=np.concatenate([prompt, rng.integers(0, 49152, 100)]).astype(np.int32),
                response_mask=sampled,
                logprobs=np.where(sampled, -rng.exponential(0.5, 200), 0).astype(np.float32),
                text=rng.bytes(200).hex(),
            )
            for i in range(8)
        )
        return dataclasses.replace(make_group(step, f"t{task}"), trajectories=trajectories)

    for step in range(25):
        store.append([group(step, task) for task in range(25)])
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 2_000_000 < size < 8_000_000, size
