from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.metrics import Counters, MetricsLogger, PhaseTimer, read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]


def steps_of(workdir: Path) -> list[int]:
    return [record["step"] for record in read_metrics(workdir)]


def events_of(workdir: Path) -> dict[tuple[str, int], float]:
    """TensorBoard's scalars as a viewer shows them: later files override, purged steps are gone."""
    from tensorboardX.proto.event_pb2 import Event

    scalars: dict[tuple[str, int], float] = {}
    for path in sorted((workdir / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:  # records: uint64 length, uint32 CRC, the event, uint32 CRC
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.HasField("session_log"):
                scalars = {key: value for key, value in scalars.items() if key[1] < event.step}
            for value in event.summary.value:
                scalars[value.tag, event.step] = value.simple_value
    return scalars


def test_a_record_is_one_line_of_strict_json_and_reads_back(tmp_path):
    values = {
        "int": 3,
        "big": 2**60,
        "flag": True,
        "float": 0.25,
        "numpy": np.float32(0.5),
        "numpy_int": np.int64(7),
        "array": np.array(1.5),
        "jax": jnp.float32(2.5),
        "half": jnp.bfloat16(1.5),
        "nan": float("nan"),
        "inf": np.float32("-inf"),
        "line\u2028separator": 1,
    }
    with MetricsLogger(tmp_path, total_steps=2, console=False, tensorboard=False) as logger:
        logger.log(0, values)
        logger.log(1, {})

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert len(lines) == 3 and lines[2] == b""
    assert json.loads(lines[0], parse_constant=refuse)["nan"] is None
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(first.pop("nan")) and first.pop("inf") == -math.inf
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {
        "step": 0, "int": 3, "big": 2**60, "flag": 1, "float": 0.25, "numpy": 0.5, "numpy_int": 7, "array": 1.5,
        "jax": 2.5, "half": 1.5, "line\u2028separator": 1,
    }  # fmt: skip
    assert isinstance(first["numpy_int"], int)
    assert second["step"] == 1


@pytest.mark.parametrize("value", ["0.5", None, [1.0], np.zeros(1), jnp.zeros(2), {}, 1j])
def test_a_value_that_is_not_a_number_is_refused_before_anything_is_written(tmp_path, value):
    with MetricsLogger(tmp_path, total_steps=1, console=False) as logger:
        with pytest.raises(TypeError, match=r"metric 'x' is (.|\n)*; expected a single number"):
            logger.log(0, {"ok": 1.0, "x": value})
        with pytest.raises(ValueError, match="'step', as is a field"):
            logger.log(0, {"step": 1})
    assert read_metrics(tmp_path) == []


def test_a_resumed_run_logs_each_step_once_in_file_and_tensorboard(tmp_path):
    with MetricsLogger(tmp_path, total_steps=12, console=False) as logger:
        for step in range(11):
            logger.log(step, {"loss": step, "nan": math.nan})
    time.sleep(1.1)  # event files are named and ordered by the second
    with MetricsLogger(tmp_path, total_steps=12, console=False) as logger:
        logger.truncate(9)
        for step in range(9, 12):
            logger.log(step, {"loss": -step})
    records = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in records] == [(s, s) for s in range(9)] + [
        (s, -s) for s in range(9, 12)
    ]
    assert events_of(tmp_path) == {("loss", s): s if s < 9 else -s for s in range(12)}


def test_half_a_line_of_a_killed_run_is_not_a_record_and_does_not_spoil_the_next(tmp_path):
    with MetricsLogger(tmp_path, total_steps=3, console=False, tensorboard=False) as logger:
        logger.log(0, {"loss": 1})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "lo')
    assert steps_of(tmp_path) == [0]
    with MetricsLogger(tmp_path, total_steps=3, console=False, tensorboard=False) as logger:
        logger.log(1, {"loss": 1})
        logger.truncate(2)
        logger.log(2, {"loss": 1})
    assert steps_of(tmp_path) == [0, 1, 2]


def test_a_record_is_on_disk_when_log_returns(tmp_path):
    logger = MetricsLogger(tmp_path, total_steps=3, console=False, tensorboard=False)
    logger.log(0, {"loss": 1})
    assert steps_of(tmp_path) == [0]
    logger.close()


def test_logging_a_step_takes_little_time(tmp_path):
    metrics = {f"metric/{i}": float(i) for i in range(50)}
    with MetricsLogger(tmp_path, total_steps=100, console=False) as logger:
        start = time.perf_counter()
        for step in range(100):
            logger.log(step, metrics)
        assert (time.perf_counter() - start) / 100 < 0.05  # 2 ms on an idle machine


def test_no_workdir_writes_no_file(tmp_path, capsys):
    with contextlib.chdir(tmp_path), MetricsLogger(None, total_steps=1, console=False) as logger:
        logger.log(0, {"kl": 1})
        logger.info("hello")
        logger.truncate(0)
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_an_unwritable_workdir_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OSError, match=r"cannot be opened.*expected a writable workdir; choose another"
    ):
        MetricsLogger(tmp_path / "file" / "run", total_steps=1)


def test_off_a_terminal_each_step_is_one_line(tmp_path, capsys):
    with MetricsLogger(
        tmp_path, total_steps=4000, tensorboard=False, columns={"reward/mean": "reward", "kl": "KL"}
    ) as logger:
        logger.log(0, {"reward/mean": 0.12345, "kl": math.nan, "other": 5})
        logger.log(0, {"reward/mean": 0.5})  # the same step again
        logger.info("[bold]" + "x" * 200)
        logger.log(1, {"eval/only": 1})
        logger.log(2, {"reward/mean": 12345.6})
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"step 1/4000  reward 0.123  KL nan  elapsed 0:0\d  left \d+:\d\d(:\d\d)?", lines[0]
    )
    assert lines[1] == "[bold]" + "x" * 200
    assert lines[2].startswith("step 3/4000  reward 12,346  elapsed")
    assert len(lines) == 3


TERMINAL = """
import logging, sys
from rlvr_jax.metrics import MetricsLogger
with MetricsLogger(sys.argv[1], total_steps=60, tensorboard=False) as logger:
    for step in range(40):
        logger.log(step, {"reward/mean": 0.5 + step, "kl": 0.0012345, "perf/tokens_per_s": 1234.5})
    logger.info("a message")
    logging.getLogger("rlvr_jax").warning("a warning")
"""


def test_on_a_terminal_a_live_bar_fits_80_columns_with_messages_above_it(tmp_path):
    parent, child = pty.openpty()
    environment = {
        **os.environ,
        "COLUMNS": "80",
        "LINES": "24",
        "TERM": "xterm",
        "PYTHONPATH": os.fspath(REPOSITORY),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, os.fspath(tmp_path)],
        stdout=child,
        stderr=child,
        env=environment,
    )
    os.close(child)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
        while chunk := os.read(parent, 4096):
            output += chunk
    os.close(parent)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    lines = re.split(r"[\r\n]+", text.strip())
    assert re.fullmatch(
        r"step 40/60 \S+ reward 39.5  kl 0.00123  tok/s 1,234 elapsed 0:0\d left 0:00",
        lines[-1].strip(),
    )
    assert "a message" in lines and "a warning" in lines
    assert "\x1b[?25h" in output.decode()  # the cursor is back


def test_phases_add_up_whatever_happens_inside():
    timer = PhaseTimer()
    with timer("rollout"):
        time.sleep(0.02)
    with contextlib.suppress(KeyError), timer("rollout"):
        time.sleep(0.02)
        raise KeyError
    with timer("update"), timer("inner"):
        pass
    seconds = timer.take()
    assert list(seconds) == ["time/rollout_s", "time/inner_s", "time/update_s"]
    assert 0.04 <= seconds["time/rollout_s"] < 1
    assert timer.take() == {}


def test_counters_give_each_step_its_own_counts_and_resume_their_totals():
    counters = Counters()
    counters.add("dropped/stale", 2)
    counters.add("dropped/unscored", 0)
    assert counters.take() == {"dropped/stale": 2, "dropped/unscored": 0}
    counters.add("dropped/unscored")
    assert counters.take() == {"dropped/stale": 0, "dropped/unscored": 1}
    resumed = Counters(json.loads(json.dumps(counters.totals)))
    assert resumed.take() == {"dropped/stale": 0, "dropped/unscored": 0}
    threads = [
        threading.Thread(target=lambda: [resumed.add("dropped/stale") for _ in range(1000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resumed.totals == {"dropped/stale": 4002, "dropped/unscored": 1}
