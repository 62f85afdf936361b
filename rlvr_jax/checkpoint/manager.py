"""Checkpoints that survive being killed, filled up or damaged at any moment.

A checkpoint is a directory ``step_<n>`` with the arrays (``state/``, written by Orbax in the
background), what the host has to remember (``host.json``, ``blobs/``) and, written last,
``manifest.json``: the size and CRC-32 of every file and the shape of every array. The manifest is
the commit marker and the one test of health: a checkpoint without it was never finished, a file
that disagrees with it is damaged, arrays that disagree with what is asked for are another model's.

``save`` returns as soon as the arrays are copied to the host, so the caller may donate them to the
next step. On CPU the copy is a reference, which makes JAX decline the donation while the save runs:
one more state is alive for that long.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from etils import epath
from jax.experimental import multihost_utils

from rlvr_jax.errors import CheckpointError
from rlvr_jax.types import JSON

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_CHUNK_BYTES = 1 << 22
_NONE_YET, _ALL_DAMAGED = -1, -2  # what _select agrees on across processes when there is no step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What ``Checkpointer.restore`` found: the arguments of the ``save`` that wrote it."""

    step: int
    state: Any
    host: dict[str, JSON]
    blobs: dict[str, bytes]


class Checkpointer:
    """Saves in the background and restores the newest healthy checkpoint.

    With several processes, each calls every method, in the same order, on a directory they share;
    ``host`` and ``blobs`` are those of process 0. Remote paths (``gs://...``) work where
    ``etils.epath`` can open them.

    Args:
      directory: where the checkpoints are, created if absent.
      keep: how many finished checkpoints to keep. One more exists while a save runs: nothing old is deleted before
        the new one is committed.

    Raises:
      CheckpointError: the directory cannot be created.
      ValueError: ``keep`` is not positive.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(
                f"keep is {keep}; expected the number of checkpoints to keep, at least 1"
            )
        name = os.fspath(directory)
        self._directory = epath.Path(name if "://" in name else os.path.abspath(name))
        self._keep = keep
        absl_logging.get_absl_logger().addFilter(_not_a_failed_save)
        self._orbax = ocp.StandardCheckpointer()
        self._committer = concurrent.futures.ThreadPoolExecutor(1, "checkpoint-commit")
        self._pending: concurrent.futures.Future[None] | None = None
        self._damaged: set[int] = set()
        self._last_saved: int | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint directory {self._directory} cannot be created: got {_brief(error)}; "
                "expected a path under a writable directory; choose another workdir"
            ) from error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first; their health is only known to ``restore``."""
        return [
            step for step in self._step_directories() if (self._path(step) / _MANIFEST).exists()
        ]

    def save(
        self,
        step: int,
        state: Any,
        host: Mapping[str, JSON],
        blobs: Mapping[str, bytes] | None = None,
    ) -> None:
        """Starts a checkpoint, once the one before is done; a step committed already is left as is.

        Args:
          step: number of updates done, >= 0.
          state: pytree of jax arrays; may be donated as soon as this returns.
          host: JSON with string keys; NumPy scalars become plain numbers.
          blobs: file name -> content, for what is not JSON (groups in flight).

        Raises:
          CheckpointError: this save could not be started, or the one before failed (and this one
            was not started).
          TypeError: ``host`` would not come back from JSON as it is.
          ValueError: a blob's name is not a plain file name.
        """
        self.wait()
        files = {"host.json": _encode_json(host)}
        for name, content in (blobs or {}).items():
            if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
                raise ValueError(
                    f"blob {name!r}: expected a name of letters, digits, '_', '.' and '-'"
                )
            files[f"blobs/{name}"] = bytes(content)
        path = self._path(step)
        # Process 0 may still be writing the manifest of the last save: the others know of it by this.
        if step == self._last_saved or (step in self.steps() and step not in self._damaged):
            logger.info("checkpoint %s exists already; it is kept", path)
            return
        arrays = _describe(state)
        num_bytes = sum(map(len, files.values()))
        num_bytes += sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        with self._removing_what_fails(step, num_bytes):
            if jax.process_index() == 0:
                path.rmtree(missing_ok=True)  # what a killed run or a damaged disk left there
                path.mkdir(parents=True)
            self._orbax.save(path / "state", state)
        self._last_saved = step
        self._pending = self._committer.submit(self._commit, step, files, arrays, num_bytes)

    def wait(self) -> None:
        """Blocks until the save in progress is committed; raises ``CheckpointError`` if it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits like ``wait``, then stops the threads."""
        try:
            self.wait()
        finally:
            self._committer.shutdown()
            self._orbax.close()

    def restore(self, abstract_state: Any) -> Restored | None:
        """Loads the newest healthy checkpoint, or returns None if no save was ever finished here.

        Half-written and damaged checkpoints are skipped with one warning that says what, why, and
        which is used.

        Args:
          abstract_state: the state's pytree with ``jax.ShapeDtypeStruct`` (or arrays) as leaves.
            Their shardings are what the arrays come back with, whatever mesh wrote them; a leaf
            without one goes to the first local device.

        Raises:
          CheckpointError: it holds arrays of another model, or every committed checkpoint is damaged.
        """
        if (found := self._select()) is None:
            return None
        step, path, saved = found
        _check_arrays(path, saved, _describe(abstract_state))
        blobs = path / "blobs"
        return Restored(
            step=step,
            state=self._orbax.restore(path / "state", jax.tree.map(_placed, abstract_state)),
            host=json.loads((path / "host.json").read_text()),
            blobs={b.name: b.read_bytes() for b in (blobs.iterdir() if blobs.exists() else ())},
        )

    def restore_params(self, abstract_params: Any) -> tuple[int, Any, dict[str, JSON]] | None:
        """Loads only ``state.params`` and ``host``: (step, params, host), or None; else as ``restore`` does."""
        if (found := self._select()) is None:
            return None
        step, path, saved = found
        item = {"params": jax.tree.map(_placed, abstract_params)}
        saved = {name: array for name, array in saved.items() if name.startswith("params/")}
        _check_arrays(path, saved, _describe(item))
        args = ocp.args.PyTreeRestore(
            item=item,
            restore_args=ocp.checkpoint_utils.construct_restore_args(item),
            partial_restore=True,
        )
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            params = reader.restore(path / "state", args=args)["params"]
        return step, params, json.loads((path / "host.json").read_text())

    def _path(self, step: int) -> epath.Path:
        return self._directory / f"step_{step}"

    def _step_directories(self) -> list[int]:
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in self._directory.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def _commit(
        self, step: int, files: dict[str, bytes], arrays: dict[str, str], num_bytes: int
    ) -> None:
        """In the background, once the arrays are on their way: other files, manifest, clean-up."""
        path = self._path(step)
        with self._removing_what_fails(step, num_bytes):
            self._orbax.wait_until_finished()  # of all processes: Orbax ends a save with a barrier
            if jax.process_index() != 0:
                return
            for name, content in files.items():
                (path / name).parent.mkdir(exist_ok=True)
                (path / name).write_bytes(content)
            body = {
                "step": step,
                "files": {
                    os.fspath(file.relative_to(path)): _checksum(file) for file in _walk(path)
                },
                "arrays": arrays,
            }
            partial = path / f"{_MANIFEST}.partial"
            partial.write_text(json.dumps({"body": body, "crc32": _body_checksum(body)}))
            partial.replace(path / _MANIFEST)
        self._damaged.discard(step)
        kept = [s for s in self.steps() if s not in self._damaged][-self._keep :]
        for old in set(self._step_directories()) - set(kept):
            try:
                self._path(old).rmtree()
            except OSError as error:
                # The new checkpoint is safe; an old one too many is no reason to stop.
                logger.warning(
                    "old checkpoint %s could not be deleted: %s", self._path(old), _brief(error)
                )

    @contextlib.contextmanager
    def _removing_what_fails(self, step: int, num_bytes: int) -> Iterator[None]:
        """Turns a failed write into a ``CheckpointError``, and removes its half-written directory."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            # On a full disk TensorStore raises ValueError, the file system OSError.
            self._last_saved = None
            path = self._path(step)
            free = ""
            with contextlib.suppress(OSError):
                free = f" ({shutil.disk_usage(self._directory).free / 1e9:.3g} GB are free)"
            with contextlib.suppress(OSError):
                path.rmtree(missing_ok=True)
            left = self.steps() if self._directory.is_dir() else []
            earlier = (
                f"The checkpoint of step {left[-1]} is intact" if left else "There is no other"
            )
            raise CheckpointError(
                f"checkpoint {path} could not be written: got {_brief(error)}; expected a writable "
                f"directory with {num_bytes / 1e9:.3g} GB of free space{free}; free some or choose "
                f"another workdir. {earlier}."
            ) from error

    def _select(self) -> tuple[int, epath.Path, dict[str, str]] | None:
        """Step, path and arrays of the newest healthy checkpoint; process 0 chooses for all."""
        self.wait()
        choice = np.int64(_NONE_YET)
        if jax.process_index() == 0:
            choice = np.int64(self._newest_healthy())
        if jax.process_count() > 1:
            choice = multihost_utils.broadcast_one_to_all(choice)
        self._damaged = {step for step in self._step_directories() if step > choice}
        if choice == _ALL_DAMAGED:
            raise CheckpointError(
                f"every committed checkpoint in {self._directory} is damaged (the log says how); "
                "expected a healthy one; put back a copy, or delete the directory to start over"
            )
        if choice == _NONE_YET:
            return None
        path = self._path(int(choice))
        return int(choice), path, json.loads((path / _MANIFEST).read_bytes())["body"]["arrays"]

    def _newest_healthy(self) -> int:
        skipped: list[str] = []
        chosen = _NONE_YET
        for step in reversed(self._step_directories()):
            fault = _find_fault(self._path(step))
            if fault is None:
                chosen = step
                break
            skipped.append(f"{self._path(step).name} ({fault})")
        if chosen == _NONE_YET and self.steps():
            chosen = _ALL_DAMAGED
        if skipped:
            using = f"using step_{chosen}" if chosen >= 0 else "there is no earlier one"
            logger.warning("skipped in %s: %s; %s", self._directory, ", ".join(skipped), using)
        return chosen


def _find_fault(path: epath.Path) -> str | None:
    """Why the checkpoint cannot be used, or None if every file is as its manifest says."""
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        if manifest["crc32"] != _body_checksum(manifest["body"]):
            return f"damaged: {_MANIFEST} does not match its own checksum"
        files = {
            path / name: tuple(expected) for name, expected in manifest["body"]["files"].items()
        }
    except FileNotFoundError:
        return f"half-written: no {_MANIFEST}, so its save never finished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"damaged: {_MANIFEST} is not valid"
    with concurrent.futures.ThreadPoolExecutor() as pool:  # reading and CRC-32 both release the GIL
        for file, (size, crc), fault in zip(
            files, files.values(), pool.map(_try_checksum, files), strict=True
        ):
            name = file.relative_to(path)
            if isinstance(fault, OSError):
                return f"damaged: {name} cannot be read: {_brief(fault)}"
            if fault[0] != size:
                return f"damaged: {name} has {fault[0]} bytes, expected {size}"
            if fault[1] != crc:
                return f"damaged: {name} has another checksum than when it was written"
    return None


def _walk(path: epath.Path) -> Iterator[epath.Path]:
    for child in sorted(path.iterdir()):
        if child.is_dir():
            yield from _walk(child)
        else:
            yield child


def _checksum(path: epath.Path) -> tuple[int, int]:
    """(size in bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
    return size, crc


def _try_checksum(path: epath.Path) -> tuple[int, int] | OSError:
    try:
        return _checksum(path)
    except OSError as error:
        return error


def _body_checksum(body: JSON) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _describe(tree: Any) -> dict[str, str]:
    """Path of each array -> dtype[shape], to tell another model from this one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(
            path, simple=True, separator="/"
        ): f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
        for path, leaf in leaves
    }


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf as Orbax wants it: never without a sharding, which it would guess from the mesh that wrote it."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_arrays(path: epath.Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    different = [
        f"{name} is {saved.get(name, 'absent')}, expected {wanted.get(name, 'none')}"
        for name in [*wanted, *(name for name in saved if name not in wanted)]
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise CheckpointError(
            f"checkpoint {path} is of another model or optimizer: {'; '.join(different[:3])}{more}; "
            "use the config that wrote it, or another workdir"
        )


def _encode_json(host: Mapping[str, JSON]) -> bytes:
    """JSON that reads back as what it was (NaN too); non-string keys and arrays, which would not, are refused."""

    def plain(value: Any, where: str) -> JSON:
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(
                        f"{where} has the key {key!r}; expected a string, as JSON would make it one"
                    )
            return {key: plain(item, f"{where}[{key!r}]") for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
        raise TypeError(
            f"{where} is a {type(value).__name__}; expected JSON; put bytes and arrays into blobs"
        )

    return json.dumps(plain(host, "host")).encode()


def _brief(error: BaseException) -> str:
    """Type and first line; of a long one, which names paths before the cause, both ends."""
    line = (str(error).strip().splitlines() or [""])[0]
    return (
        f"{type(error).__name__}: {line if len(line) <= 300 else f'{line[:100]} ... {line[-190:]}'}"
    )


def _not_a_failed_save(record: logging.LogRecord) -> bool:
    """Orbax logs each failure several times with tracebacks of 300 lines, and then raises it to us, who report it."""
    return not (record.exc_info and f"{os.sep}orbax{os.sep}checkpoint{os.sep}" in record.pathname)
