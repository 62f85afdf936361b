"""One worker process as the pool sees it: start, send a frame, receive messages, kill. Every wait has a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

_MAX_LINE_BYTES = 1 << 20  # the worker's longest message is under 10 kB
_REAP_TIMEOUT_S = 5.0
_WORKER_MODULE = "rlvr_jax.rewards.worker"
# A verifier is one job on one core; and a worker must never open the accelerator the trainer holds.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
}


class WorkerGone(Exception):
    """The worker ended, or stopped speaking the protocol. ``cpu_limit``: the kernel ended it for its CPU time."""

    def __init__(self, message: str, *, cpu_limit: bool = False) -> None:
        super().__init__(message)
        self.cpu_limit = cpu_limit


class WorkerProcess:
    """A worker in its own session. The thread that made it sends, receives and disposes; any thread may ``kill``."""

    def __init__(self, memory_bytes: int) -> None:
        path = [
            os.path.abspath(entry) for entry in sys.path
        ]  # the worker imports what the trainer can
        environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in dispose()
        self._kill_lock = threading.Lock()
        self._buffer = b""
        self.loaded: set[str] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", _WORKER_MODULE, str(os.getpid()), str(memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._readable = select.poll()  # not select.select: it cannot watch descriptors past 1023
        self._readable.register(self._stdout, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self._stdin, select.POLLOUT)

    def send(self, frame: tuple[Any, ...], *, timeout_s: float) -> None:
        """Writes one frame; raises WorkerGone if it cannot be written in time (an idle worker always reads)."""
        body = pickle.dumps(frame, protocol=pickle.HIGHEST_PROTOCOL)
        data = memoryview(len(body).to_bytes(8, "little") + body)
        deadline = time.monotonic() + timeout_s
        while data:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            if not self._writable.poll(left_ms):
                raise WorkerGone(f"the worker read nothing for {timeout_s:g} s")
            try:
                data = data[os.write(self._stdin.fileno(), data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._gone() from None

    def receive(self, *, timeout_s: float) -> list[list[Any]]:
        """Returns the messages that have arrived, at least one; raises TimeoutError or WorkerGone."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise WorkerGone("the worker sent a message without an end")
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            if not self._readable.poll(
                left_ms
            ):  # polled once more even when this thread woke up late
                raise TimeoutError
            data = os.read(self._stdout.fileno(), 1 << 16)
            if not data:
                raise self._gone()
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            raise WorkerGone("the worker sent something that is no message") from None

    def start_errors(self) -> str:
        """The end of what the worker wrote to standard error before it was ready."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - 2000))
        return self._errors.read().decode("utf-8", "replace").strip()

    def alive(self) -> bool:
        with self._kill_lock:
            return self._process.poll() is None

    def kill(self) -> None:
        """Sends SIGKILL to the worker and what it started; does not wait. Idempotent."""
        with self._kill_lock:
            if (
                self._process.returncode is None
            ):  # not reaped: the id cannot have been given to another process
                os.killpg(self._process.pid, signal.SIGKILL)

    def dispose(self) -> None:
        """Kills, reaps and closes."""
        self._reap()
        for stream in (self._stdin, self._stdout, self._errors):
            stream.close()

    def _reap(self) -> None:
        self.kill()
        with (
            self._kill_lock,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):  # stuck inside the kernel
            self._process.wait(timeout=_REAP_TIMEOUT_S)

    def _gone(self) -> WorkerGone:
        self._reap()  # it has closed its pipe: an exit status it already has is kept
        code = self._process.returncode
        if code is not None and code < 0:
            name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
            return WorkerGone(f"the worker was killed by {name}", cpu_limit=name == "SIGXCPU")
        return WorkerGone(f"the worker exited with code {code}")
