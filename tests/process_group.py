"""Several processes of one run, for tests: each with its own virtual devices, joined on this machine."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

# XLA:CPU ends a process of which a device waits 40 s for the others, as it may on a machine with other work.
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=300"
REPOSITORY = pathlib.Path(__file__).resolve().parents[1]


class ProcessGroup:
    """``count`` processes that run the same arguments of Python; what they print goes to files."""

    def __init__(
        self,
        arguments: Sequence[object],
        folder: pathlib.Path,
        *,
        count: int = 2,
        devices: int = 4,
        heartbeat_s: int = 20,
        **environment: str,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        folder.mkdir(parents=True, exist_ok=True)
        self._logs = [folder / f"process_{index}.log" for index in range(count)]
        flags = re.sub(r"--xla_force_host_platform\S*", "", os.environ.get("XLA_FLAGS", ""))
        self.processes = []
        for index in range(count):
            several = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
                "RLVR_HEARTBEAT_S": str(heartbeat_s),
            }
            ours = {
                "XLA_FLAGS": f"{flags} {PATIENCE} --xla_force_host_platform_device_count={devices}"
            }
            with self._logs[index].open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    cwd=REPOSITORY,
                    env=os.environ | ours | (several if count > 1 else {}) | environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def log(self, index: int) -> str:
        """What a process printed so far."""
        return self._logs[index].read_text(errors="replace")

    def wait(self, timeout_s: float) -> list[int]:
        """Exit statuses; kills all and raises when one is still there after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired as error:
            self.kill()
            logs = "\n".join(self.log(i)[-2000:] for i in range(len(self.processes)))
            raise AssertionError(f"still running after {timeout_s:g} s:\n{logs}") from error

    def wait_for(self, path: pathlib.Path, timeout_s: float = 200) -> None:
        """Returns when ``path`` exists."""
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            ended = [p.poll() for p in self.processes]
            assert ended == [None] * len(ended), f"ended early with {ended}: {self.log(0)[-3000:]}"
            assert time.monotonic() < deadline, f"{path} did not appear: {self.log(0)[-3000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def process_group(*arguments: object, folder: pathlib.Path, **settings) -> Iterator[ProcessGroup]:
    """A ``ProcessGroup`` of which nothing is left behind."""
    group = ProcessGroup(arguments, folder, **settings)
    try:
        yield group
    finally:
        group.kill()
