"""Metrics of a run: to ``metrics.jsonl``, TensorBoard and the console, once a step, across kills.

The caller computes and fetches (one ``jax.device_get`` a step); this module only writes. It also has
the two things a host loop counts by itself: seconds of each phase (``PhaseTimer``) and what was
dropped, cut or failed (``Counters``).
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, SupportsFloat

import rich.console
import rich.progress
import rich.text

if TYPE_CHECKING:
    from tensorboardX import SummaryWriter

# Metric -> its label on the console; metrics a step does not have are left out.
COLUMNS: Mapping[str, str] = {"reward/mean": "reward", "kl": "kl", "perf/tokens_per_s": "tok/s"}
_FILE_NAME = "metrics.jsonl"
_QUIET_S = 1.0  # what takes no longer needs no progress
_OURS = ("step", "time", "nonfinite")


class MetricsLogger:
    """Writes each step's metrics to a file, TensorBoard and the console.

    On a terminal the console is a live bar with messages above it; elsewhere (a file, a pipe, a
    notebook) it is one line a step. Use it as a context manager, so that the bar is taken down.

    Args:
      workdir: gets ``metrics.jsonl`` and ``tensorboard/``; None writes no files (processes other than the first).
      total_steps: number of steps of the whole run, for the bar and the time left.
      console: whether to print.
      tensorboard: whether to write TensorBoard events.
      columns: metric name -> label, what the console shows.

    Raises:
      OSError: the workdir cannot be written.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str] | None,
        *,
        total_steps: int,
        console: bool = True,
        tensorboard: bool = True,
        columns: Mapping[str, str] = COLUMNS,
    ) -> None:
        self._total_steps = total_steps
        self._columns = columns
        self._latest: dict[str, str] = {}  # what the bar shows
        self._start = self._last_time = time.monotonic()
        self._last_step: int | None = None
        self._step_seconds: collections.deque[float] = collections.deque(maxlen=20)
        self._path = None if workdir is None else Path(workdir) / _FILE_NAME
        self._writes_events = tensorboard and workdir is not None
        self._file: BinaryIO | None = None
        self._events: SummaryWriter | None = None
        self._open()
        self._console = rich.console.Console(quiet=not console)
        self._bar: rich.progress.Progress | None = None
        if console and self._console.is_interactive and not self._console.is_jupyter:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=6),  # all of it fits into 80 columns
                rich.progress.TextColumn("{task.description}"),
                _ElapsedColumn(),
                rich.progress.TextColumn("left {task.fields[left]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=total_steps, left="-:--")
            self._bar.start()

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Writes one record, flushed, and shows it.

        Args:
          step: from 0; several records may share one.
          metrics: Python, NumPy or fetched jax scalars. A jax array still being computed makes
            this wait for it.

        Raises:
          TypeError: a value is not a single number.
          ValueError: a metric is called like one of the record's own fields.
          OSError: the file cannot be written.
        """
        values = {name: _number(name, value) for name, value in metrics.items()}
        if self._file is not None:
            try:
                self._file.write(_encode_record(step, time.time(), values))
                self._file.flush()
            except OSError as error:
                raise OSError(
                    f"metrics of step {step} could not be written to {self._path}: got {error}; "
                    "expected a writable disk with free space; free some and run again to resume"
                ) from error
        if self._events is not None:
            for name, value in values.items():
                if math.isfinite(value):  # TensorBoard cannot draw the others
                    self._events.add_scalar(name, value, step)
        self._show(step, values)

    def info(self, message: str) -> None:
        """Prints a message, above the bar if there is one."""
        self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def truncate(self, step: int) -> None:
        """Drops the records of ``step`` and later, which a resumed run logs again."""
        if self._path is None:
            return
        self._close_files()
        lines = self._path.read_bytes().splitlines(keepends=True)
        partial = self._path.with_suffix(".partial")
        partial.write_bytes(b"".join(line for line in lines if json.loads(line)["step"] < step))
        partial.replace(self._path)
        self._open(purge_step=step)

    def close(self) -> None:
        """Takes the bar down and closes the files."""
        if self._bar is not None:
            self._bar.stop()
        self._close_files()

    def _open(self, purge_step: int | None = None) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                content = self._path.read_bytes()
                os.truncate(self._path, content.rfind(b"\n") + 1)  # half a line, of a killed run
            self._file = self._path.open("ab")
            if self._writes_events:
                from tensorboardX import SummaryWriter  # takes a second: not for who only reads

                directory = self._path.parent / "tensorboard"
                # purge_step hides the events of the steps that are done again.
                self._events = SummaryWriter(os.fspath(directory), purge_step=purge_step)
        except OSError as error:
            raise OSError(
                f"metrics file {self._path} cannot be opened: got {error}; "
                "expected a writable workdir; choose another one"
            ) from error

    def _close_files(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._events is not None:
            self._events.close()

    def _show(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        is_new = self._last_step is None or step > self._last_step
        if is_new:
            num_steps = 1 if self._last_step is None else step - self._last_step
            self._step_seconds.append((now - self._last_time) / num_steps)
            self._last_step, self._last_time = step, now
        # The median, so that the compilation in the first step does not set the estimate.
        seconds_left = statistics.median(self._step_seconds) * (self._total_steps - step - 1)
        left = _clock(max(0.0, seconds_left))
        shown = {
            self._columns[name]: _format(values[name]) for name in self._columns if name in values
        }
        if self._bar is not None:
            self._latest.update(shown)
            text = "  ".join(f"{label} {value}" for label, value in self._latest.items())
            self._bar.update(self._task, completed=step + 1, description=text, left=left)
        elif shown and is_new:
            text = "  ".join(f"{label} {value}" for label, value in shown.items())
            clocks = f"elapsed {_clock(now - self._start)}  left {left}"
            self.info(f"step {step + 1}/{self._total_steps}  {text}  {clocks}")


class _ElapsedColumn(rich.progress.ProgressColumn):
    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(f"elapsed {_clock(task.elapsed or 0.0)}")


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Records of a ``metrics.jsonl`` (or of the one in a workdir), in order.

    Each is a dict of ``step``, ``time`` (seconds since the epoch) and the metrics. A last line that
    a killed run left unfinished is not a record.
    """
    path = Path(path)
    lines = (path / _FILE_NAME if path.is_dir() else path).read_bytes().split(b"\n")[:-1]
    records = [json.loads(line) for line in lines]
    for record in records:
        record.update({name: float(value) for name, value in record.pop("nonfinite", {}).items()})
    return records


class ByteProgress:
    """How far a transfer is, on stderr, once it has taken a second: a bar on a terminal, elsewhere a line at the end.

    Args:
      what: is being done.
      total: bytes.
      console: whether to show anything.

    Attributes:
      summary: what the line at the end says.
    """

    def __init__(self, what: str, total: int, *, console: bool) -> None:
        self.summary = what
        self._what, self._total = what, total
        self._console = rich.console.Console(stderr=True, quiet=not console)
        self._draws = console and self._console.is_interactive and not self._console.is_jupyter
        self._bar: rich.progress.Progress | None = None
        self._done = 0
        self._start = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None and time.monotonic() - self._start > _QUIET_S:
            self._console.print(self.summary, markup=False, highlight=False, soft_wrap=True)

    def advance(self, num_bytes: int) -> None:
        """So many more are done. Threads may call at once."""
        with self._lock:
            self._done += num_bytes
            if not self._draws or time.monotonic() - self._start < _QUIET_S:
                return
            if self._bar is None:
                self._bar = rich.progress.Progress(
                    rich.progress.TextColumn("{task.description}"),
                    rich.progress.BarColumn(bar_width=20),
                    rich.progress.DownloadColumn(binary_units=True),
                    rich.progress.TransferSpeedColumn(),
                    rich.progress.TimeRemainingColumn(),
                    console=self._console,
                    transient=True,
                )
                self._task_id = self._bar.add_task(self._what, total=self._total)
                self._bar.start()
            self._bar.update(self._task_id, completed=self._done)


class PhaseTimer:
    """Seconds of each phase of a step: ``with timer("rollout"): ...``. Threads may time at once."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the block's duration to ``phase``, whether or not it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns ``time/<phase>_s`` of each phase since the last call, and starts anew."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}


class Counters:
    """Counts of what was dropped, cut or failed. ``totals`` goes into a checkpoint and comes back in."""

    def __init__(self, totals: Mapping[str, int] | None = None) -> None:
        self.totals: dict[str, int] = dict(totals or {})
        self._taken = dict(self.totals)
        self._lock = threading.Lock()

    def add(self, name: str, count: int = 1) -> None:
        """Counts ``count`` more; 0 makes the name appear."""
        with self._lock:
            self.totals[name] = self.totals.get(name, 0) + int(count)

    def take(self) -> dict[str, int]:
        """Returns the counts since the last call, of every name ever counted: none comes and goes."""
        with self._lock:
            counts = {name: total - self._taken.get(name, 0) for name, total in self.totals.items()}
            self._taken = dict(self.totals)
        return counts


def _number(name: str, value: Any) -> int | float:
    if name in _OURS:
        raise ValueError(f"a metric is called {name!r}, as is a field of every record; rename it")
    shape = getattr(value, "shape", ())
    number = value.item() if shape == () and hasattr(value, "item") else value
    if shape != () or not hasattr(number, "__float__"):
        raise TypeError(
            f"metric {name!r} is {value!r} of type {type(value).__name__}; expected a single number"
        )
    return int(number) if isinstance(number, int) else float(number)


def _encode_record(step: int, seconds: float, values: Mapping[str, int | float]) -> bytes:
    """One line of strict JSON: what is not finite is null, and by name under ``nonfinite``."""
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    record: dict[str, Any] = {
        "step": int(step),
        "time": seconds,
        **values,
        **dict.fromkeys(nonfinite),
    }
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _format(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _clock(seconds: float) -> str:
    """m:ss, with hours once there are any."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
