"""Trajectories on disk: one Parquet file for each append, which is there whole or not at all.

Files are named ``step_<step>.<attempt>.parquet`` in one flat directory, so that a query engine reads
them with one glob, and a resumed run drops by name what it is going to do again. One writer a
directory; readers may look at any time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from rlvr_jax.trajectories.schema import groups_to_table, table_to_groups
from rlvr_jax.types import Group


class ParquetStore:
    """An append-only ``TrajectoryStore`` in a local directory, created if absent.

    Raises:
      OSError: the directory cannot be created.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"trajectory directory {self._directory} cannot be created: got {error}; "
                "expected a path under a writable directory; choose another workdir"
            ) from error

    def append(self, groups: Sequence[Group]) -> None:
        """Stores the groups, in one file for each ``step`` among them.

        Raises:
          OSError: the file cannot be written (a full disk); what was stored before is intact.
          ValueError, TypeError: see ``groups_to_table``.
        """
        for step in sorted({group.step for group in groups}):
            table = groups_to_table([group for group in groups if group.step == step])
            attempt = 1 + max((attempt for s, attempt, _ in self._files() if s == step), default=-1)
            path = self._directory / f"step_{step}.{attempt}.parquet"
            partial = path.with_suffix(".partial")
            try:
                pq.write_table(table, partial, compression="zstd")
                os.replace(partial, path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
                raise OSError(
                    f"trajectories of step {step} could not be written to {path}: got {error}; "
                    f"expected a writable directory with about {table.nbytes / 1e6:.3g} MB free; "
                    "free some or choose another workdir"
                ) from error

    def read(self, steps: int | Iterable[int] | None = None) -> list[Group]:
        """Returns the groups of the given steps (None: of all), by step, in the order of appending."""
        wanted = {steps} if isinstance(steps, int) else steps if steps is None else set(steps)
        paths = [path for step, _, path in self._files() if wanted is None or step in wanted]
        groups: list[Group] = []
        for path in paths:
            # Not read_table, which takes "=" in a directory's name for a partition.
            with pq.ParquetFile(path) as file:
                groups += table_to_groups(file.read())
        return groups

    def steps(self) -> list[int]:
        """The steps that have trajectories, ascending."""
        return sorted({step for step, _, _ in self._files()})

    def truncate(self, step: int) -> None:
        """Removes ``step`` and later, which a resumed run does again, and what a killed writer left."""
        for path in self._directory.glob("step_*.partial"):
            path.unlink()
        for found, _, path in self._files():
            if found >= step:
                path.unlink()

    def _files(self) -> list[tuple[int, int, Path]]:
        """(step, attempt, path), in numeric order."""
        names = (
            (re.fullmatch(r"step_(\d+)\.(\d+)\.parquet", path.name), path)
            for path in self._directory.iterdir()
        )
        return sorted((int(match[1]), int(match[2]), path) for match, path in names if match)
