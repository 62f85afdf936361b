"""The other end of ``VerifierPool``: a process that judges responses one at a time.

Started as ``python -m rlvr_jax.rewards.worker PARENT_PID MEMORY_BYTES``, so the user's ``__main__`` is never run again.
It reads frames (8-byte little-endian length, then a pickle made by the parent) and answers in JSON lines, so that
nothing a verifier does can run code in the parent:

  ``("verifier", key, pickle, forget the others)``  -> ``[key, error or null]``
  ``("jobs", timeout_s, key, [(index, pickle of (task, response)), ...])``  -> ``[index, status, value, detail]``, each

It confines itself (memory, CPU time, no core dumps, first to go when the kernel runs out of memory), keeps the pipes
away from the verifiers' prints, and dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import pickle
import resource
import signal
import sys
from typing import Any, BinaryIO

import numpy as np

import rlvr_jax.rewards  # noqa: F401  warm: a verifier's module is loaded before its deadline starts

_CPU_SLACK_S = (
    10  # the parent's wall-clock deadline comes first; this is for when the parent is stopped
)
_MAX_DETAIL = 500
_PR_SET_PDEATHSIG = 1


def confine(parent_pid: int, memory_bytes: int) -> None:
    """Limits this process, and ties its life to its parent's."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    # A scheduler's notice to all processes of a job: the parent finishes its step, and needs verdicts for that.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getppid() != parent_pid:  # it died before the line above took effect
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no address-space limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def take_pipes() -> tuple[BinaryIO, int]:
    """Returns private ends of the pipes and points the standard streams of verifiers at /dev/null."""
    reader, out_fd = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.close(null)
    return reader, out_fd


def send(out_fd: int, message: list[Any]) -> None:
    data = json.dumps(message).encode("ascii") + b"\n"  # ascii: lone surrogates travel as escapes
    while data:
        data = data[os.write(out_fd, data) :]


def as_score(value: Any) -> float:
    """Returns a verifier's return value as a float; raises TypeError or ValueError if it is no finite number."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise TypeError(f"the verifier returned {type(value).__name__}; expected a float")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"the verifier returned {score}; expected a finite number")
    return score


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_DETAIL]
    except Exception:  # __str__ of somebody else's exception
        return type(error).__name__


def judge(verifier: Any, payload: bytes) -> tuple[str, float, str]:
    """Returns (status, value, detail) of one job; whatever the verifier raises, even SystemExit, is ``failed``."""
    try:
        task, response = pickle.loads(payload)
        return "ok", as_score(verifier(task, response)), ""
    except BaseException as error:
        return "failed", 0.0, describe(error)


def load(payload: bytes) -> Any:
    """Unpickles a verifier and lets it import what it needs."""
    verifier = pickle.loads(payload)
    warm = getattr(verifier, "warm", None)
    if callable(warm):
        warm()
    return verifier


def limit_cpu(timeout_s: float) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + timeout_s + _CPU_SLACK_S)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard < 0 else min(soft, hard), hard))


def main() -> None:
    confine(int(sys.argv[1]), int(sys.argv[2]))
    reader, out_fd = take_pipes()
    send(out_fd, ["ready"])
    with open(
        os.devnull, "w"
    ) as null:  # until here standard error was kept, to explain a start that failed
        os.dup2(null.fileno(), 2)
    verifiers: dict[str, Any] = {}
    while header := reader.read(8):
        kind, *body = pickle.loads(reader.read(int.from_bytes(header, "little")))
        if kind == "verifier":
            key, payload, forget = body
            if forget:
                verifiers.clear()
            error = None
            try:
                verifiers[key] = load(payload)
            except BaseException as problem:  # importing runs anything
                error = describe(problem)
            send(out_fd, [key, error])
        else:
            timeout_s, key, jobs = body
            for index, payload in jobs:
                limit_cpu(timeout_s)
                send(out_fd, [index, *judge(verifiers[key], payload)])
    os._exit(0)  # the parent closed the pipe; threads a verifier left behind must not keep us


if __name__ == "__main__":
    main()
