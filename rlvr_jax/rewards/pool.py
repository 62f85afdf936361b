"""Verifiers in killable worker processes: one verdict per job, in the order of the jobs, always in finite time.

One thread per worker takes chunks of jobs from a shared queue, streams them through its process and watches the clock:
a chunk keeps the overhead of a cheap job at microseconds, while the deadline stays each job's own. A job that passes it
(``timeout``) or takes its worker down (``failed``) costs itself and a restart; the others go back to the queue.

Workers are plain ``python -m rlvr_jax.rewards.worker`` processes, never forks (JAX has threads) and never
``multiprocessing`` (which would run the user's script again). The pool does not sandbox: verifiers are trusted code
that meets untrusted text. Running untrusted programs is the work of a sandbox.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import math
import os
import pickle
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType

from rlvr_jax.rewards.process import WorkerGone, WorkerProcess
from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.types import Reward, RewardStatus, Task

Job = tuple[Task, str, VerifierSpec]
_Verdict = tuple[RewardStatus, float, str]

_MAX_CHUNK = 64
_MAX_LOADED = 256  # verifiers a worker keeps: specs may be as many as tasks (a JSON schema each)
_MAX_DEFAULT_WORKERS = 16
_START_TIMEOUT_S = 120.0
_RESTART_PAUSE_S = 5.0
_LOAD_TIMEOUT_S = (
    60.0  # importing what a verifier needs (reasoning-gym: 1 s) is not charged to a job
)
_TICK_S = 1.0  # every wait for another thread wakes up this often
_CLOSED: _Verdict = ("failed", 0.0, "the verifier pool was closed")


def _failed(detail: str) -> _Verdict:
    return ("failed", 0.0, detail)


@dataclasses.dataclass(eq=False)
class _Call:
    """One ``score`` in flight."""

    verdicts: list[_Verdict]
    remaining: int
    abandoned: bool = False


@dataclasses.dataclass(eq=False)
class _Chunk:
    """Jobs of one call and one verifier, and where their verdicts go."""

    call: _Call
    key: str  # of the verifier: hash of its pickle
    verifier: bytes
    jobs: list[tuple[int, bytes]]  # index in the call, pickle of (task, response)


class _Shared:
    """What the threads share. They never hold the pool itself, so that it can be collected."""

    def __init__(self, timeout_s: float, memory_bytes: int) -> None:
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.owner_pid = os.getpid()
        # Re-entrant: the garbage collector may run shut_down in a thread that holds it.
        self.changed = threading.Condition(threading.RLock())
        self.queue: collections.deque[_Chunk] = collections.deque()
        self.unloadable: dict[str, str] = {}
        self.workers: set[WorkerProcess] = set()
        self.threads: list[threading.Thread] = []
        self.bug: BaseException | None = None
        self.closed = False

    def take(self) -> _Chunk | None:
        """Returns the next chunk, or None once the pool is closed."""
        with self.changed:
            while not self.queue and not self.closed:
                self.changed.wait(_TICK_S)
            return None if self.closed else self.queue.popleft()

    def settle(self, chunk: _Chunk, verdicts: Sequence[_Verdict]) -> None:
        """Enters the verdicts of the first jobs of a chunk; the other jobs go back to the head of the queue."""
        with self.changed:
            rest = chunk.jobs[len(verdicts) :]
            if rest and self.closed:
                verdicts, rest = [*verdicts, *[_CLOSED] * len(rest)], []
            for (index, _), verdict in zip(chunk.jobs, verdicts, strict=False):
                chunk.call.verdicts[index] = verdict
            chunk.call.remaining -= len(verdicts)
            if rest and not chunk.call.abandoned:
                self.queue.appendleft(dataclasses.replace(chunk, jobs=rest))
            self.changed.notify_all()

    def shut_down(self, join_s: float) -> None:
        """Settles every job, kills every worker, and waits up to ``join_s`` for the threads. Idempotent."""
        if (
            os.getpid() != self.owner_pid
        ):  # a fork of the trainer has a copy of this object, not the workers
            return
        with self.changed:
            self.closed = True
            while self.queue:
                self.settle(self.queue.popleft(), [])
            workers = list(self.workers)
            self.changed.notify_all()
        for worker in workers:
            worker.kill()
        deadline = time.monotonic() + join_s
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))


def _start(shared: _Shared) -> WorkerProcess:
    """Starts a worker and waits until it is ready; raises WorkerGone with what it printed if it never is."""
    worker = WorkerProcess(shared.memory_bytes)
    with shared.changed:
        shared.workers.add(worker)
    if shared.closed:  # shut_down may have listed the workers before this one was added
        worker.kill()
    try:
        worker.receive(timeout_s=_START_TIMEOUT_S)
    except (WorkerGone, TimeoutError) as error:
        reason = str(error) or f"not ready after {_START_TIMEOUT_S:g} s"
        detail = f"a verifier worker did not start: {reason}: {worker.start_errors()}"
        _dispose(shared, worker)
        raise WorkerGone(detail) from error
    return worker


def _dispose(shared: _Shared, worker: WorkerProcess) -> None:
    with shared.changed:
        shared.workers.discard(worker)
    worker.dispose()


def _load(shared: _Shared, worker: WorkerProcess, chunk: _Chunk) -> None:
    """Makes the worker load a verifier; one that cannot be loaded is remembered and never tried again.

    Raises WorkerGone when the attempt cost the worker.
    """
    full = len(worker.loaded) >= _MAX_LOADED
    if full:
        worker.loaded.clear()
    try:
        worker.send(("verifier", chunk.key, chunk.verifier, full), timeout_s=_LOAD_TIMEOUT_S)
        [[_, error]] = worker.receive(timeout_s=_LOAD_TIMEOUT_S)
    except (WorkerGone, TimeoutError) as lost:
        error = str(lost) or f"not done after {_LOAD_TIMEOUT_S:g} s"
        if not shared.closed:
            shared.unloadable[chunk.key] = f"the verifier could not be loaded: {error}"
        raise WorkerGone(error) from lost
    if error is not None:
        shared.unloadable[chunk.key] = f"the verifier could not be loaded: {error}"
    worker.loaded.add(chunk.key)


def _run(shared: _Shared, worker: WorkerProcess, chunk: _Chunk) -> tuple[list[_Verdict], bool]:
    """Runs a chunk. Returns the verdicts of its first jobs (of all, unless the worker was lost on the way) and whether
    the worker still lives. A job's clock starts when the verdict before it arrives."""
    lost = False
    if chunk.key not in worker.loaded and chunk.key not in shared.unloadable:
        try:
            _load(shared, worker, chunk)
        except WorkerGone:
            lost = True
    if lost or chunk.key in shared.unloadable:
        detail = shared.unloadable.get(chunk.key, _CLOSED[2])
        return [_failed(detail)] * len(chunk.jobs), not lost
    verdicts: list[_Verdict] = []
    try:
        worker.send(("jobs", shared.timeout_s, chunk.key, chunk.jobs), timeout_s=_LOAD_TIMEOUT_S)
        while len(verdicts) < len(chunk.jobs):
            for index, status, value, detail in worker.receive(timeout_s=shared.timeout_s):
                if index != chunk.jobs[len(verdicts)][0]:
                    raise WorkerGone("the worker answered another job than the one it was given")
                verdicts.append((status, value, detail))
        return verdicts, True
    except TimeoutError:
        verdicts.append(("timeout", 0.0, f"no verdict within {shared.timeout_s:g} s"))
    except WorkerGone as gone:
        verdicts.append(("timeout" if gone.cpu_limit else "failed", 0.0, str(gone)))
    return verdicts, False


def _serve(shared: _Shared) -> None:
    """Body of one thread: keeps one worker alive and feeds it."""
    worker: WorkerProcess | None = None
    start_error, next_start = "", 0.0
    try:
        while not shared.closed:
            # Before there is work, so that it is warm when work comes; but not for every chunk if it cannot start.
            if worker is None and time.monotonic() >= next_start:
                try:
                    worker = _start(shared)
                except WorkerGone as gone:
                    start_error, next_start = str(gone), time.monotonic() + _RESTART_PAUSE_S
            chunk = shared.take()
            if chunk is None:
                return
            if worker is None:
                shared.settle(chunk, [_failed(start_error)] * len(chunk.jobs))
                continue
            if (
                not worker.alive()
            ):  # killed from outside while idle: no fault of the job that comes next
                _dispose(shared, worker)
                worker = None
                shared.settle(chunk, [])
                continue
            verdicts, alive = _run(shared, worker, chunk)
            if not alive:
                _dispose(shared, worker)
                worker = None
            shared.settle(chunk, verdicts)
    except BaseException as error:  # a bug of ours: raised in the callers, who would wait for ever
        with shared.changed:
            shared.bug = error
            shared.changed.notify_all()
    finally:
        if worker is not None:
            _dispose(shared, worker)


class VerifierPool:
    """Judges responses in worker processes.

    Usable from any thread, from several at once, and from a JAX host callback. Close it, or use it as a context
    manager; collected or at interpreter exit it closes itself.

    Args:
      num_workers: processes; by default one a core this process may use, at most 16.
      timeout_s: deadline of one verdict, in seconds of wall-clock time.
      memory_bytes: address space of one worker; a verifier that asks for more gets MemoryError.
    """

    def __init__(
        self, num_workers: int | None = None, timeout_s: float = 5.0, *, memory_bytes: int = 4 << 30
    ) -> None:
        if num_workers is None:
            num_workers = min(_usable_cores(), _MAX_DEFAULT_WORKERS)
        if num_workers < 1:
            raise ValueError(f"num_workers is {num_workers}; expected an integer >= 1")
        if not (timeout_s > 0 and math.isfinite(timeout_s)):
            raise ValueError(f"timeout_s is {timeout_s}; expected a finite number of seconds > 0")
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._shared = _Shared(timeout_s, memory_bytes)
        # Daemons: they must not keep the interpreter from exiting; the finalizer below ends them.
        self._shared.threads += [
            threading.Thread(target=_serve, args=(self._shared,), name=f"verifier-{i}", daemon=True)
            for i in range(num_workers)
        ]
        self._finalizer = weakref.finalize(self, self._shared.shut_down, 0.8)
        for thread in self._shared.threads:
            thread.start()

    def score(self, jobs: Sequence[Job]) -> list[Reward]:
        """Judges every job.

        Args:
          jobs: (task, response, spec) each.

        Returns:
          One Reward a job, in the same order, always: ``ok`` with the verifier's value; ``timeout`` when it passed its
          deadline; ``failed`` when it raised, returned no finite number, or took its worker down. The value of the last
          two is 0.0 and means nothing.

        Raises:
          ValueError, TypeError: a spec that names no verifier, has wrong parameters or cannot be pickled.
          RuntimeError: the pool is closed, or was made before a fork.
        """
        shared = self._shared
        if shared.closed or os.getpid() != shared.owner_pid:
            raise RuntimeError(
                "this VerifierPool is closed, or belongs to the process before a fork; make a new one"
            )
        call = _Call(verdicts=[_CLOSED] * len(jobs), remaining=len(jobs))
        chunks = self._chunks(call, jobs)
        with shared.changed:
            if shared.closed:
                raise RuntimeError("this VerifierPool was closed; make a new one")
            shared.queue.extend(chunks)
            shared.changed.notify_all()
            try:
                while call.remaining and shared.bug is None:
                    shared.changed.wait(_TICK_S)
            finally:
                call.abandoned = True  # after KeyboardInterrupt: what is left is not worth running
        if shared.bug is not None:
            raise RuntimeError("a thread of the verifier pool failed") from shared.bug
        return [
            Reward(name=spec.label, value=value, weight=spec.weight, status=status, detail=detail)
            for (_, _, spec), (status, value, detail) in zip(jobs, call.verdicts, strict=True)
        ]

    def _chunks(self, call: _Call, jobs: Sequence[Job]) -> list[_Chunk]:
        """Pickles the jobs and divides them by verifier, small enough to keep every worker busy to the end."""
        keys: dict[int, str] = {}  # by identity: the jobs of a step share a few specs
        verifiers: dict[str, bytes] = {}
        by_key: dict[str, list[tuple[int, bytes]]] = {}
        for index, (task, response, spec) in enumerate(jobs):
            if id(spec) not in keys:
                payload = spec.serialised()
                keys[id(spec)] = key = hashlib.sha256(payload).hexdigest()
                verifiers[key] = payload
            try:
                payload = pickle.dumps((task, response), protocol=pickle.HIGHEST_PROTOCOL)
            except Exception as error:  # pickling runs arbitrary __reduce__ code
                raise TypeError(
                    f"job {index} cannot be sent to a worker process ({type(error).__name__}: {error});"
                    " a task holds plain JSON values and a response is a string"
                ) from error
            by_key.setdefault(keys[id(spec)], []).append((index, payload))
        size = max(1, min(_MAX_CHUNK, math.ceil(len(jobs) / (4 * self.num_workers))))
        return [
            _Chunk(call, key, verifiers[key], entries[start : start + size])
            for key, entries in by_key.items()
            for start in range(0, len(entries), size)
        ]

    def close(self) -> None:
        """Kills the workers, within a second. Jobs still running end as ``failed``. Idempotent."""
        self._finalizer()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
