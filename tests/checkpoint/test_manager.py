from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.errors import CheckpointError
from rlvr_jax.types import TrainState

REPOSITORY = Path(__file__).resolve().parents[2]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(seed: int = 0, width: int = 16) -> TrainState:
    """A state with float32, bfloat16, int32 and uint32 leaves, NaN and -0 among the values."""
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((8, width)).astype(np.float32)
    kernel[0, :3] = np.nan, -0.0, np.inf
    params = {
        "kernel": jnp.asarray(kernel),
        "half": jnp.asarray(rng.standard_normal((8, 8)), jnp.bfloat16),
    }
    key = jnp.array([seed, 0xFFFFFFFF], jnp.uint32)
    return TrainState(
        step=jnp.int32(seed), params=params, opt_state=OPTIMIZER.init(params), key=key
    )


def abstract(state: TrainState, sharding: jax.sharding.Sharding | None = None) -> TrainState:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state)


def bits(state: TrainState) -> list[tuple[str, bytes]]:
    return [
        (str(leaf.dtype), np.array(leaf, copy=True).tobytes()) for leaf in jax.tree.leaves(state)
    ]


def save_steps(directory: Path, *steps: int, keep: int = 2) -> None:
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), {"at": step}, {"flight.bin": bytes([step])})


def file_of(directory: Path, step: int, part: str) -> Path:
    """The largest file of ``part`` of a checkpoint."""
    root = directory / f"step_{step}" / part
    files = [root] if root.is_file() else [path for path in root.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_state_host_and_blobs_come_back_bit_for_bit(tmp_path):
    state = make_state(7)
    host = {
        "level": {"a": np.int64(3)},
        "nan": float("nan"),
        "big": 2**100,
        "text": "\u2028\ud800",
        "f": np.float32(0.1),
    }
    blobs = {"groups.parquet": bytes(range(256)), "empty": b""}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, host, blobs)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract(state))
    assert restored is not None and restored.step == 7
    assert bits(restored.state) == bits(state)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert restored.blobs == blobs
    assert np.isnan(restored.host.pop("nan"))
    assert restored.host == {
        "level": {"a": 3},
        "big": 2**100,
        "text": "\u2028\ud800",
        "f": float(np.float32(0.1)),
    }


def test_state_comes_back_on_another_mesh(tmp_path):
    devices = jax.devices()
    if len(devices) < 8:
        pytest.fail(f"{len(devices)} devices; conftest.py must give 8")
    auto = (AxisType.Auto,)
    wide = jax.make_mesh((8,), ("data",), axis_types=auto)
    narrow = jax.make_mesh((2,), ("data",), axis_types=auto, devices=devices[:2])

    def sharding(mesh: jax.sharding.Mesh, x: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("data") if x.ndim == 2 else PartitionSpec())

    state = make_state(3)
    sharded = jax.tree.map(lambda x: jax.device_put(x, sharding(wide, x)), state)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(narrow, x)), state
    )
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, sharded, {})
        restored = checkpointer.restore(wanted)
    assert restored is not None
    assert bits(restored.state) == bits(state)
    assert restored.state.params["kernel"].sharding == sharding(narrow, state.params["kernel"])


def test_a_state_donated_right_after_save_is_saved_as_it_was(tmp_path):
    update = jax.jit(
        lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0
    )
    state = update(
        make_state(1, width=1 << 16)
    )  # 2 MB an array: large enough to be still being written
    before = bits(state)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, {})
        for _ in range(5):
            state = update(state)
        jax.block_until_ready(state)
        restored = checkpointer.restore(abstract(state))
    assert restored is not None
    assert bits(restored.state) == before
    assert bits(state) != before


def test_params_can_be_loaded_alone(tmp_path):
    save_steps(tmp_path, 4)
    with Checkpointer(tmp_path) as checkpointer:
        loaded = checkpointer.restore_params(abstract(make_state()).params)
    assert loaded is not None and loaded[0] == 4
    assert bits(loaded[1]) == bits(make_state(4).params)


def test_newest_is_by_number_and_only_keep_are_left(tmp_path):
    save_steps(tmp_path, 8, 9, 10, 11)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [10, 11]
        restored = checkpointer.restore(abstract(make_state()))
        assert restored is not None and restored.step == 11
    (tmp_path / "step_10").rename(tmp_path / "step_9")
    (tmp_path / "step_11").rename(tmp_path / "step_10")
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.steps() == [9, 10]


def test_an_empty_directory_restores_nothing(tmp_path):
    with Checkpointer(tmp_path / "new") as checkpointer:
        assert checkpointer.restore(abstract(make_state())) is None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def garbage(path: Path) -> None:
    path.write_text('{"at": ')


@pytest.mark.parametrize(
    ("part", "damage", "reason"),
    [
        ("manifest.json", Path.unlink, "half-written: no manifest.json"),
        ("manifest.json", truncate, "manifest.json is not valid"),
        ("manifest.json", garbage, "manifest.json is not valid"),
        ("manifest.json", flip, "manifest.json"),
        ("host.json", Path.unlink, "host.json cannot be read"),
        ("host.json", garbage, "host.json has 7 bytes, expected"),
        ("host.json", flip, "host.json has another checksum"),
        ("blobs/flight.bin", flip, "flight.bin has another checksum"),
        ("state/ocdbt.process_0/d", truncate, "bytes, expected"),
        ("state/ocdbt.process_0/d", flip, "another checksum"),
        ("state/ocdbt.process_0/d", Path.unlink, "cannot be read"),
        ("state/_METADATA", flip, "_METADATA has another checksum"),
        ("state/manifest.ocdbt", truncate, "manifest.ocdbt has"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path, caplog, part, damage, reason):
    save_steps(tmp_path, 1, 2)
    damage(file_of(tmp_path, 2, part))
    with caplog.at_level(logging.WARNING, "rlvr_jax"), Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract(make_state()))
        assert restored is not None and restored.step == 1
        assert bits(restored.state) == bits(make_state(1))
        [record] = [r for r in caplog.records if r.name.startswith("rlvr_jax")]
        message = record.getMessage()
        assert "step_2" in message and reason in message and "using step_1" in message
        checkpointer.save(2, make_state(2), {})  # the run gets there again
        healed = checkpointer.restore(abstract(make_state()))
        assert healed is not None and healed.step == 2 and bits(healed.state) == bits(make_state(2))


def test_a_damaged_checkpoint_does_not_count_as_one_of_those_kept(tmp_path):
    save_steps(tmp_path, 10, 20)
    flip(file_of(tmp_path, 20, "state"))
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract(make_state()))
        assert restored is not None and restored.step == 10
        checkpointer.save(15, make_state(15), {})
        checkpointer.wait()
        assert checkpointer.steps() == [10, 15]


def test_damage_to_all_is_an_error_but_a_first_save_cut_short_is_a_fresh_start(tmp_path):
    save_steps(tmp_path, 1)
    flip(file_of(tmp_path, 1, "state"))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"every committed checkpoint .* is damaged"):
            checkpointer.restore(abstract(make_state()))
        (tmp_path / "step_1" / "manifest.json").unlink()
        assert checkpointer.restore(abstract(make_state())) is None


def test_another_model_is_an_error_and_not_damage(tmp_path):
    save_steps(tmp_path, 1, 2)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            CheckpointError,
            match=r"another model.*params/kernel is float32\[8, 16\], expected float32\[8, 4\]",
        ):
            checkpointer.restore(abstract(make_state(width=4)))
        sgd = abstract(TrainState(**{**vars(make_state()), "opt_state": optax.sgd(1.0).init({})}))
        with pytest.raises(
            CheckpointError,
            match=r"optimizer: opt_state/1/0/count is int32\[\], expected none",
        ):
            checkpointer.restore(sgd)
        with pytest.raises(
            CheckpointError, match=r"params/kernel is float32\[8, 16\], expected bfloat16"
        ):
            half = {**make_state().params, "kernel": jnp.zeros((8, 16), jnp.bfloat16)}
            checkpointer.restore_params(half)


def test_saving_a_committed_step_again_keeps_it(tmp_path):
    save_steps(tmp_path, 5)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, make_state(6), {"at": 6})
        restored = checkpointer.restore(abstract(make_state()))
    assert restored is not None and restored.host == {"at": 5}


@contextlib.contextmanager
def files_no_longer_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to write past ``num_bytes`` of any file, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("next_call", ["wait", "save", "close"])
def test_a_failed_write_surfaces_at_the_next_call_and_leaves_the_earlier_checkpoint(
    tmp_path, capfd, next_call
):
    save_steps(tmp_path, 1)
    checkpointer = Checkpointer(tmp_path)
    with files_no_longer_than(1 << 16):
        # One array: TensorStore reports the others' failures to an event loop that Orbax has closed by then.
        checkpointer.save(2, {"x": jax.random.normal(jax.random.key(0), (1 << 18,))}, {})
        with pytest.raises(
            CheckpointError, match=r"step_2 could not be .*large.*GB are free.*step 1 is intact"
        ):
            if next_call == "save":
                checkpointer.save(3, make_state(3), {})
            else:
                getattr(checkpointer, next_call)()
    assert "Traceback" not in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(abstract(make_state()))
        assert restored is not None and bits(restored.state) == bits(make_state(1))
        checkpointer.save(3, make_state(3), {})
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]


def test_a_host_file_that_fails_to_be_written_fails_the_save(tmp_path):
    save_steps(tmp_path, 1)
    with files_no_longer_than(1 << 16), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, make_state(2), {}, {"flight": bytes(1 << 17)})
        with pytest.raises(CheckpointError, match="step_2 could not be written: got OSError"):
            checkpointer.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be created.*choose another workdir"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_host_values_that_json_would_change_are_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match=r"host\['levels'\] has the key 1"):
            checkpointer.save(1, make_state(), {"levels": {1: 2}})
        with pytest.raises(TypeError, match=r"host\['a'\]\[0\] is a ndarray"):
            checkpointer.save(1, make_state(), {"a": [np.zeros(2)]})
        with pytest.raises(ValueError, match=r"blob '\.\./x'"):
            checkpointer.save(1, make_state(), {}, {"../x": b""})
        assert checkpointer.steps() == []


KILLED = """
import itertools, sys
import jax, jax.numpy as jnp
from rlvr_jax.checkpoint.manager import Checkpointer
state = {"x": jnp.zeros((64, 1024))}
checkpointer = Checkpointer(sys.argv[1])
restored = checkpointer.restore(state)
first = restored.step if restored else 0
print("from", first, bool(restored is None or (restored.state["x"] == first).all()), flush=True)
for step in itertools.count(first + 1):
    checkpointer.save(step, {"x": jnp.full((64, 1024), step, jnp.float32)}, {"at": step}, {"b": bytes(step)})
    checkpointer.wait() if step == first + 1 else None
    print("saved", step, flush=True)
"""


def test_killed_at_any_moment_the_last_committed_checkpoint_is_whole(tmp_path):
    rng = random.Random(0)
    committed = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, os.fspath(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        assert process.stdout is not None
        word, first, same = process.stdout.readline().split()
        assert (word, same) == ("from", "True") and int(first) >= committed
        process.stdout.readline()  # one save is committed
        time.sleep(rng.uniform(0.02, 0.2))
        process.send_signal(signal.SIGKILL)
        saved = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        committed = int(saved[-1]) - 1 if saved else int(first) + 1
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore({"x": jax.ShapeDtypeStruct((64, 1024), jnp.float32)})
    assert restored is not None and restored.step >= committed
    assert (np.asarray(restored.state["x"]) == restored.step).all()
    assert restored.host == {"at": restored.step} and restored.blobs == {"b": bytes(restored.step)}


TWO_PROCESSES = """
import sys
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
index, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, index)
from rlvr_jax.checkpoint.manager import Checkpointer
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("data"))
state = lambda value: {"x": jax.jit(lambda: jnp.arange(64.0) + value, out_shardings=sharding)()}
wanted = {"x": jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding)}
with Checkpointer(directory) as checkpointer:
    for step in (1, 2):
        checkpointer.save(step, state(step), {"at": step})
multihost_utils.sync_global_devices("saved")
if index == 0:
    open(f"{directory}/step_2/host.json", "a").write("x")
multihost_utils.sync_global_devices("damaged")
with Checkpointer(directory) as checkpointer:
    restored = checkpointer.restore(wanted)
    local = [float(shard.data[0]) for shard in restored.state["x"].addressable_shards]
    print(restored.step, restored.host["at"], local, flush=True)
    checkpointer.save(2, state(5), {"at": 5})
    checkpointer.save(2, state(6), {"at": 6})  # the same step again: all agree to keep the first
multihost_utils.sync_global_devices("saved again")
with Checkpointer(directory) as checkpointer:
    restored = checkpointer.restore(wanted)
    print(restored.step, restored.host["at"], flush=True)
"""


@pytest.mark.slow
def test_two_processes_save_together_and_agree_on_what_to_restore(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(index), port, os.fspath(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environment,
        )
        for index in range(2)
    ]
    lines = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    lines = [[line for line in of_one if not line.startswith("[Gloo]")] for of_one in lines]
    assert lines == [["1 1 [1.0, 17.0]", "2 5"], ["1 1 [33.0, 49.0]", "2 5"]]
