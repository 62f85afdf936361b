"""Verifiers that misbehave, for the tests of the pool. Importable by name, because workers import them."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from rlvr_jax.types import Task


def length(task: Task, response: str) -> float:
    return float(len(response))


def scaled(task: Task, response: str, *, scale: float) -> float:
    return scale * len(response)


def process_id(task: Task, response: str) -> float:
    return float(os.getpid())


def by_response(task: Task, response: str) -> object:
    """Does what the response says."""
    if response in _ACTIONS:
        return _ACTIONS[response]()
    return float(response)


def hang() -> None:
    while True:
        time.sleep(60)


def spin() -> None:
    while True:
        pass


def deaf() -> None:
    """Hangs, and asks not to be stopped politely."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang()


def eat_memory() -> float:
    blocks = []
    while True:
        blocks.append(bytearray(64 << 20))


def hang_with_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(os.environ["HOSTILE_PID_FILE"], "w") as file:
        file.write(str(child.pid))
    hang()


def print_a_lot() -> float:
    for _ in range(2000):
        print("x" * 10_000)
        print("x" * 1000, file=sys.stderr)
    os.write(1, b'[0, "ok", 1.0, ""]\n' * 100)
    return 0.5


def raise_long() -> None:
    raise ValueError("z" * 10_000_000)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unprintable() -> None:
    raise Unprintable


def close_pipes() -> float:
    os.closerange(3, 256)
    return 1.0


def leave_thread() -> float:
    threading.Thread(target=hang).start()
    return 0.25


def recurse() -> float:
    return recurse() + 1


_ACTIONS = {
    "hang": hang,
    "spin": spin,
    "deaf": deaf,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "memory": eat_memory,
    "child": hang_with_child,
    "print": print_a_lot,
    "raise": lambda: 1 / 0,
    "raise long": raise_long,
    "raise unprintable": raise_unprintable,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or 1.0,
    "close": close_pipes,
    "thread": leave_thread,
    "recurse": recurse,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "text": lambda: "1.0",
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "huge": lambda: 10**400,
    "true": lambda: True,
    "numpy": lambda: np.float32(0.5),
    "numpy int": lambda: np.int64(1),
    "numpy bool": lambda: np.bool_(True),
}


@dataclasses.dataclass(frozen=True)
class Threshold:
    minimum: int
    name: str = "threshold"

    def __call__(self, task: Task, response: str) -> float:
        return float(len(response) >= self.minimum)


@dataclasses.dataclass(frozen=True)
class DiesWhenLoaded:
    def __call__(self, task: Task, response: str) -> float:
        return 1.0

    def warm(self) -> None:
        os._exit(9)


@dataclasses.dataclass(frozen=True)
class FailsWhenLoaded:
    def __call__(self, task: Task, response: str) -> float:
        return 1.0

    def warm(self) -> None:
        raise RuntimeError("no such model")


def jax_state(task: Task, response: str) -> float:
    """0 if this process is kept to the CPU and has started no JAX backend."""
    from jax._src import xla_bridge

    return float(os.environ["JAX_PLATFORMS"] != "cpu" or xla_bridge.backends_are_initialized())
