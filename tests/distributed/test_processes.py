"""Start-up, agreement and notices: alone, where all of it is the identity, and between two real processes."""

import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rlvr_jax.distributed import placement, processes
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ConfigError, ProcessError
from tests.process_group import process_group

NAMES = (processes.ADDRESS, processes.COUNT, processes.INDEX)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Of a machine on its own."""
    for name in (*NAMES, *processes._SLURM, "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(environment, address, count, index):
    for name, value in zip(NAMES, (address, count, index), strict=True):
        environment.setenv(name, value)


def test_without_a_word_in_the_environment_this_process_is_the_only_one():
    assert processes.start_arguments() is None
    with processes.joined():
        assert processes.is_first()


def test_one_of_one_process_needs_no_others(environment):
    set_all(environment, "host:1", "1", "0")
    assert processes.start_arguments() is None


def test_the_environment_names_the_coordinator_the_count_and_the_place(environment):
    set_all(environment, "node-1:8476", "4", "3")
    assert processes.start_arguments() == {
        "coordinator_address": "node-1:8476",
        "num_processes": 4,
        "process_id": 3,
        "cluster_detection_method": "deactivate",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("", "2", "0"), "JAX_COORDINATOR_ADDRESS is not set, but JAX_NUM_PROCESSES"),
        (("host:1", "", "0"), "JAX_NUM_PROCESSES is not set"),
        (("host:1", "2", ""), "JAX_PROCESS_ID is not set"),
        (("host:1", "2", "2"), "JAX_PROCESS_ID is 2; expected 0 to 1"),
        (("host:1", "two", "0"), "JAX_NUM_PROCESSES is 'two'; expected a whole number"),
        (("host", "2", "0"), "JAX_COORDINATOR_ADDRESS is 'host'; expected host:port"),
    ],
)
def test_an_environment_that_cannot_be_right_is_refused_by_name(environment, values, message):
    set_all(environment, *values)
    with pytest.raises(ConfigError, match=message):
        processes.start_arguments()


def test_in_a_slurm_step_of_several_tasks_jax_finds_the_others(environment):
    for name in processes._SLURM:
        environment.setenv(name, "1")
    environment.setenv("SLURM_NTASKS", "1")
    assert processes.start_arguments() is None
    environment.setenv("SLURM_NTASKS", "2")
    assert processes.start_arguments() == {}


def test_on_one_of_several_tpu_hosts_jax_finds_the_others(environment):
    environment.setattr(processes.cloud_tpu_init, "running_in_cloud_tpu_vm", True)
    environment.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert processes.start_arguments() is None
    environment.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1")
    assert processes.start_arguments() == {}


def test_alone_everything_is_the_identity():
    value = object()
    assert processes.gather("x", value)[0] is value  # pyright: ignore[reportArgumentType]
    assert processes.on_first("x", lambda: value) is value
    with pytest.raises(ZeroDivisionError):
        processes.on_first("x", lambda: 1 / 0)


def test_alone_arrays_are_put_and_fetched_as_jax_does_it():
    sharding = NamedSharding(make_mesh(), PartitionSpec("data"))
    placed = placement.put({"x": np.arange(16.0)}, sharding)
    assert placed["x"].sharding == sharding
    np.testing.assert_array_equal(placement.fetch(placed)["x"], np.arange(16.0))


def test_a_notice_is_a_flag_inside_the_block_and_nothing_outside():
    before = signal.getsignal(signal.SIGTERM)
    with processes.PreemptionNotice() as notice:
        assert not notice.reached(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
        assert notice.reached(2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_the_handler_is_left_alone():
    found = []

    def enter():
        with processes.PreemptionNotice() as notice:
            found.append(notice.reached(0))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [False]


TOGETHER = """
import os, signal, time
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rlvr_jax.distributed import placement, processes
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ProcessError

with processes.joined():
    index = jax.process_index()
    assert (jax.process_count(), jax.device_count(), jax.local_device_count()) == (2, 8, 4)
    assert processes.is_first() == (index == 0)

    # Values of any length, in the order of the processes, as often as one likes, from two threads at once.
    for length in (1, 100_000, 3):
        found = processes.gather("a", [index] * length * (index + 1))
        assert found == [[0] * length, [1] * 2 * length], [len(x) for x in found]
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as other:
        later = other.submit(lambda: [processes.gather("b", index) for _ in range(20)])
        mine = [processes.gather("a", -index) for _ in range(20)]
    assert later.result() == [[0, 1]] * 20 and mine == [[0, -1]] * 20
    assert processes.gather("a", float("nan"))[1] != 0

    # Decided once.
    calls = []
    assert processes.on_first("c", lambda: calls.append(1) or {"x": index}) == {"x": 0}
    assert len(calls) == (1 if index == 0 else 0)
    try:
        processes.on_first("c", lambda: open("/no/such/file"))
    except FileNotFoundError:
        assert index == 0
    except ProcessError as error:
        assert index == 1 and "process 0 stopped at 'c': FileNotFoundError" in str(error)

    # Arrays: every layout, from equal host values and back.
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    value = np.arange(64.0).reshape(8, 8)
    tree = {"a": value, "b": (value + 1, np.float32(3))}
    shardings = {"a": NamedSharding(mesh, P(("data", "fsdp"), "tensor")), "b": NamedSharding(mesh, P())}
    placed = placement.put(tree, shardings)
    assert placed["a"].sharding == shardings["a"] and not placed["a"].is_fully_addressable
    back = placement.fetch(placed)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    moved = placement.put(placed["a"], NamedSharding(mesh, P("tensor")))
    np.testing.assert_array_equal(placement.fetch(moved), value)

    # A notice to one is a notice to all, once all have come to the step.
    with processes.PreemptionNotice() as notice:
        assert not notice.reached(0)
        if index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert notice.reached(1)
        try:
            notice.reached(5 + index)
        except ProcessError as error:
            assert "different steps: [5, 6]" in str(error), error

    # Who waits for one that does not come gives up, in time, and says so.
    if index == 0:
        began = time.monotonic()
        try:
            processes.gather("late", None, deadline_s=1)
        except ProcessError as error:
            assert "waited up to 1 s for all processes at 'late'" in str(error), error
            assert time.monotonic() - began < 10
    else:
        time.sleep(1.5)
    processes.gather("end", None)
    print("done")
"""


def test_two_processes_agree_share_arrays_and_keep_deadlines(tmp_path):
    with process_group("-c", TOGETHER, folder=tmp_path) as group:
        assert group.wait(120) == [0, 0], group.log(0) + group.log(1)
    assert group.log(0).endswith("done\n") and group.log(1).endswith("done\n")


FAILS = """
import jax
from rlvr_jax.distributed import processes
with processes.joined():
    processes.gather("start", None)
    if jax.process_index() == 1:
        raise OSError("no space left")
    processes.gather("never", None)
"""


def test_a_process_that_raises_ends_at_once_and_takes_the_others_with_it(tmp_path):
    with process_group("-c", FAILS, folder=tmp_path, heartbeat_s=5) as group:
        began = time.monotonic()
        statuses = group.wait(120)
    assert statuses[1] == 1
    assert "OSError: no space left" in group.log(1)
    assert statuses[0] != 0
    assert time.monotonic() - began < 90
    assert "1" in group.log(0) and "heartbeat" in group.log(0)


STUCK = """
import pathlib, sys, time
import jax
from rlvr_jax.distributed import processes
folder, stuck = pathlib.Path(sys.argv[1]), int(sys.argv[2])
with processes.joined():
    processes.gather("start", None)
    if jax.process_index() == stuck:
        (folder / "stuck").touch()
        time.sleep(600)
    processes.gather("never", None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_process_is_killed_the_other_says_so_and_ends(tmp_path, killed):
    with process_group("-c", STUCK, tmp_path, killed, folder=tmp_path, heartbeat_s=5) as group:
        group.wait_for(tmp_path / "stuck")
        group.processes[killed].send_signal(signal.SIGKILL)
        statuses = group.wait(120)
    assert statuses[killed] == -signal.SIGKILL
    assert statuses[1 - killed] not in (0, -signal.SIGKILL)
    assert "another task died" in group.log(1 - killed)


def test_processes_that_were_not_joined_are_told_how(environment):
    environment.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessError, match=r"jax.distributed was not started.*joined"):
        processes.gather("x", None)
