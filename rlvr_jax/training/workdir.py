"""The run's folder: writable, and of the same run as what is in it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlvr_jax.distributed.processes import gather, on_first
from rlvr_jax.errors import ConfigError, Preempted

CONFIG_FILE = "config.json"
# Settings that may change when a run goes on: how long, how often, on what machine.
FREE = ("num_steps", "checkpoint.", "mesh.", "verifiers.", "rollout.max_rows", "max_mismatch")
VISIBLE_WITHIN_S = 60.0
OURS = (
    "checkpoints",
    "trajectories",
    "held_out",
    "model",
    "adapter",
    "tensorboard",
    "metrics.jsonl",
)
OURS += (CONFIG_FILE, "summary.json", "curve.png")


def open_workdir(workdir: str | Path, config: ConfigDict, *, fresh: bool) -> Path:
    """Makes the folder ready, and saves the resolved config in it. Of several processes, the first one does.

    Args:
      workdir: made if absent.
      config: of the run.
      fresh: removes what an earlier run left, and nothing else.

    Raises:
      ConfigError: it cannot be written, or holds a run with other settings. A run that got nowhere (no step of
        anything is there) may be started again with any. Or the processes do not see the same folder.
      ProcessError: (on the other processes) it was wrong on the first.
    """
    path = Path(workdir).resolve()
    on_first("workdir", lambda: _prepare(path, config, fresh=fresh))
    seen = gather("seen", _appears(path / CONFIG_FILE))
    if not all(seen):
        raise ConfigError(
            f"workdir {path}: process {seen.index(False)} of {len(seen)} does not see what process 0 wrote there; "
            "expected one folder that all processes share (NFS, say): choose another --workdir"
        )
    return path


def preempted(step: int, num_steps: int, workdir: Path) -> Preempted:
    """To be raised once the run is saved."""
    return Preempted(
        f"told to stop after step {step} of {num_steps}: all of it is in {workdir}, and the same command goes on"
    )


def _appears(file: Path) -> bool:
    """Whether the file is there, or comes within the time for which network file systems keep what they know."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True


def _prepare(path: Path, config: ConfigDict, *, fresh: bool) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"workdir {path} cannot be written: {error}; expected a writable folder: choose another --workdir"
        ) from error
    if fresh:
        for name in OURS:
            target = path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
    wanted = json.loads(config.to_json_best_effort())
    file = path / CONFIG_FILE
    if file.exists() and any(path.glob("*/step_*")):
        try:
            saved = json.loads(file.read_text())
        except ValueError as error:
            raise ConfigError(
                f"{file} is damaged ({error}); expected the settings of the run in {path}: put it back, or use "
                "--fresh to start over"
            ) from error
        _check_same_run(saved, wanted, path)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(wanted, indent=2) + "\n")
    partial.replace(file)


def _check_same_run(saved: Any, wanted: Any, path: Path) -> None:
    before, now = dict(_leaves(saved)), dict(_leaves(wanted))
    changed = [
        f"{key} ({before.get(key, 'absent')!r} -> {now.get(key, 'absent')!r})"
        for key in sorted({*before, *now})
        if before.get(key, "absent") != now.get(key, "absent") and not key.startswith(FREE)
    ]
    if changed:
        raise ConfigError(
            f"{path} holds a run with other settings: {', '.join(changed)}; "
            "use those settings to resume it, --fresh to start over, or another --workdir"
        )


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), tree
