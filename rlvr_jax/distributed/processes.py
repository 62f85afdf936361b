"""The processes of a run: usually one a host, all running the same program on one mesh.

``joined`` starts them, ``gather`` and ``on_first`` let their hosts agree on small things (verdicts, errors, what is on
disk), ``PreemptionNotice`` turns a SIGTERM to any of them into a decision of all. Arrays are no matter of this module:
XLA moves those between devices, and ``placement`` between hosts and devices.

Messages go through the coordination service of ``jax.distributed``, not through the devices: they may have any length,
need no compilation, and every wait has a deadline. With one process everything here is the identity and costs nothing.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import json
import os
import re
import signal
import sys
import threading
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
from jax._src import cloud_tpu_init, distributed  # no public names for what is needed of them

from rlvr_jax.errors import ConfigError, Preempted, ProcessError
from rlvr_jax.types import JSON

T = TypeVar("T")

# How long a process waits for another that is alive: longer than any phase in which only one of them works.
DEADLINE_S = 600.0
# After this long without a sign of life a process is taken for dead, and the others end.
HEARTBEAT_S = 60
ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
_LOST = re.compile(
    r"Gloo|NCCL|heartbeat|UNAVAILABLE|coordination service|Connection (closed|reset)"
)
_rounds: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Makes this process one of the run's, if the environment says that there are several. Before any computation.

    The environment is ``JAX_COORDINATOR_ADDRESS`` (host:port of process 0), ``JAX_NUM_PROCESSES`` and
    ``JAX_PROCESS_ID``; on a TPU slice of several hosts (TPU VM, GKE) and in a SLURM step of several tasks, JAX finds
    them by itself. ``RLVR_HEARTBEAT_S`` overrides after how many seconds of silence a process is taken for dead.

    When the block raises, the process ends without waiting for the others (status 1): they learn of it from their next
    collective or from its heartbeat, and end too. ``Preempted`` is no failure: all processes raise it together.

    Raises:
      ConfigError: a part of the environment is missing or wrong.
      ProcessError: the others could not be reached; or, while the block runs, one of them was lost.
    """
    arguments = start_arguments()
    if arguments is None:
        yield
        return
    heartbeat_s = _integer("RLVR_HEARTBEAT_S", HEARTBEAT_S)
    # Its handler would take SIGTERM away from PreemptionNotice, and swallow it where there is none.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=int(DEADLINE_S),
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=2 * heartbeat_s,
        )
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(
            f"the other processes could not be reached: {_first_line(error)}; expected all of them to start within "
            f"{DEADLINE_S:g} s with the same {ADDRESS} ({os.environ.get(ADDRESS, 'found by JAX')})"
        ) from error
    try:
        yield
    except Preempted:
        jax.distributed.shutdown()
        raise
    except BaseException as error:
        # Otherwise the interpreter's exit would wait for the others, which may be waiting for this process.
        atexit.register(_end_at_once)
        if isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
            raise _lost(error) from error
        raise
    jax.distributed.shutdown()


def start_arguments() -> dict[str, Any] | None:
    """Arguments of ``jax.distributed.initialize``; None when this process is the only one."""
    if os.environ.get(COUNT) or os.environ.get(INDEX):
        missing = [name for name in (ADDRESS, COUNT, INDEX) if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} is not set, but {COUNT} or {INDEX} is; expected all of {ADDRESS} (host:port of "
                f"process 0), {COUNT} and {INDEX} (from 0), or none of them"
            )
        count, index, address = _integer(COUNT), _integer(INDEX), os.environ[ADDRESS]
        if not 0 <= index < count:
            raise ConfigError(
                f"{INDEX} is {index}; expected 0 to {count - 1}, as {COUNT} is {count}"
            )
        if not re.fullmatch(r".+:\d+", address):
            raise ConfigError(f"{ADDRESS} is {address!r}; expected host:port of process 0")
        if count == 1:
            return None
        return {
            "coordinator_address": address,
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",  # which would give this process one GPU only
        }
    return {} if _in_slurm_step() or _on_one_of_several_tpu_hosts() else None


def is_first() -> bool:
    """Whether this is the process that writes: logs, trajectories, reports."""
    return jax.process_index() == 0


def gather(name: str, value: JSON, *, deadline_s: float = DEADLINE_S) -> list[JSON]:
    """The values of all processes, in their order; all of them call this, with the same names in the same order.

    Args:
      name: of what is gathered; threads may gather at once under different names.
      value: JSON. With several processes it comes back as JSON gives it: tuples are lists then.
      deadline_s: for the slowest of them to come here.

    Raises:
      ProcessError: one of them did not.
    """
    if jax.process_count() == 1:
        return [value]
    client = _client()
    this_round = _rounds[name]
    _rounds[name] += 1
    key = f"rlvr/{name}/{this_round}"
    index = jax.process_index()
    try:
        client.key_value_set_bytes(f"{key}/{index}", zlib.compress(json.dumps(value).encode()))
        client.wait_at_barrier(key, int(deadline_s * 1000))
        found = dict(client.key_value_dir_get_bytes(key))
        if this_round:  # who is here has read the round before
            client.key_value_delete(f"rlvr/{name}/{this_round - 1}/{index}")
    except jax.errors.JaxRuntimeError as error:
        raise _lost(
            error, f"waited up to {deadline_s:g} s for all processes at {name!r}"
        ) from error
    return [
        json.loads(zlib.decompress(found[f"{key}/{process}"]))
        for process in range(jax.process_count())
    ]


def on_first(name: str, function: Callable[[], T], *, deadline_s: float = DEADLINE_S) -> T:
    """What ``function`` returns on the first process, where alone it is called: JSON (or anything, if there is one).

    Raises:
      ProcessError: (on the others) it raised on the first, where the exception is what it was.
    """
    if jax.process_count() == 1:
        return function()
    result, error = None, None
    if is_first():
        try:
            result = function()
        except Exception as raised:
            error = raised
    said = f"{type(error).__name__}: {error}" if error is not None else None
    result, said = gather(name, [result, said], deadline_s=deadline_s)[0]
    if error is not None:
        raise error
    if said is not None:
        raise ProcessError(f"process 0 stopped at {name!r}: {said}")
    return result


class PreemptionNotice:
    """Whether any process was told to make room (SIGTERM), as agreed between steps. A context manager.

    Inside of it SIGTERM does not end this process; before and after, it does what it did. Outside the main thread,
    where Python allows no handlers, only the notices of other processes are heard.
    """

    def __init__(self) -> None:
        self._given = False
        self._before: Any = None

    def __enter__(self) -> PreemptionNotice:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def reached(self, step: int, *, deadline_s: float = DEADLINE_S) -> bool:
        """Whether to save and stop now, the same on all processes; each calls it between two steps.

        Raises:
          ProcessError: another process is lost, or at another step.
        """
        found = gather("step", [step, self._given], deadline_s=deadline_s)
        steps = [at for at, _ in found]
        if steps.count(step) != len(steps):
            raise ProcessError(
                f"the processes are at different steps: {steps}, in their order; expected all at {step}. Were they "
                "started with the same arguments, on a workdir that they share?"
            )
        return any(given for _, given in found)

    def _note(self, _signal: int, _frame: FrameType | None) -> None:
        self._given = True


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ProcessError(
            f"there are {jax.process_count()} processes, but jax.distributed was not started; run what needs them in "
            "`with rlvr_jax.distributed.processes.joined():`, before any computation"
        )
    return client


def _lost(error: BaseException, doing: str = "a collective operation failed") -> ProcessError:
    return ProcessError(
        f"process {jax.process_index()} of {jax.process_count()}: {doing}: {_first_line(error)}. Another process has "
        "most likely ended, and its log says why; checkpoints are intact: run the same command again to resume"
    )


def _first_line(error: BaseException) -> str:
    """What the error says, as one line."""
    return " ".join(str(error).split(" [type.googleapis")[0].split("RPC:")[0].split())[:400]


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name) or (str(default) if default is not None else "")
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(f"{name} is {text!r}; expected a whole number")
    return int(text)


def _in_slurm_step() -> bool:
    tasks = os.environ.get("SLURM_NTASKS", "1")
    return tasks.isdigit() and int(tasks) > 1 and all(name in os.environ for name in _SLURM)


def _on_one_of_several_tpu_hosts() -> bool:
    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        return False
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if int(os.environ.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return True
    if hosts is None and "TPU_SKIP_MDS_QUERY" not in os.environ:
        request = urllib.request.Request(
            f"{_METADATA}worker-network-endpoints", headers={"Metadata-Flavor": "Google"}
        )
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            hosts = answer.read().decode()
    return "," in (hosts or "")


def _end_at_once() -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)
