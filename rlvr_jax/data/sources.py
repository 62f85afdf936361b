"""Random-access sources of JSON-like records: JSONL, Parquet, TFDS ArrayRecord, and globs and slices of them.

The one idea: a source knows its length, any record by index, where that record came from (for error messages), and a
fingerprint of its content, so that a resumed run notices that its data changed. Nothing is shuffled, mixed or
tokenised here (``loader``), and no record is held in memory beyond what a file format forces.

Specs, as ``open_source`` takes them:
  ``chat.jsonl``, ``chat.parquet``, ``shards/*.jsonl``; ``tfds:NAME?split=train&data_dir=DIR``;
  any of them with a slice, as of a Python list: ``chat.jsonl@[-100:]``, ``chat.jsonl@[:5000]``.
"""

from __future__ import annotations

import array
import bisect
import collections
import glob
import hashlib
import itertools
import json
import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlvr_jax.errors import ConfigError, require
from rlvr_jax.types import JSON

_ROW_GROUP_CACHE_BYTES = 512 * 2**20
_SUFFIXES = ".jsonl, .ndjson, .parquet"


class Source(Protocol):
    """Records by index. ``fingerprint`` is a hash of the content: the same data under another path has the same."""

    name: str
    fingerprint: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, JSON]: ...

    def where(self, index: int) -> str:
        """Where record ``index`` is, for a person who has to mend it."""
        ...


class JsonlSource:
    """One JSON object a line, lines ending in ``\\n`` only (U+2028 and U+0085 inside a string end nothing).

    Every line is parsed once when the file is opened (about 10 s a gigabyte), so that a bad one stops a run before
    its first step; only byte offsets are kept. Blank lines are skipped.

    Raises:
      ConfigError: a line that is not a JSON object, naming file and line; a file without records.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self._starts = array.array("q")
        self._lengths = array.array("q")
        self._lines = array.array("q")
        content = hashlib.blake2b(digest_size=16)
        start = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    _parse_line(line, f"{path}:{number}")
                    content.update(line)
                    self._starts.append(start)
                    self._lengths.append(len(line))
                    self._lines.append(number)
                start += len(line)
        if not self._starts:
            raise ConfigError(f"{path} holds no records; expected one JSON object a line")
        self.fingerprint = content.hexdigest()
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> dict[str, JSON]:
        # pread shares no file position: Grain reads from several threads.
        line = os.pread(self._descriptor, self._lengths[index], self._starts[index])
        return _parse_line(line, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"


class ParquetSource:
    """Rows of a Parquet file. Row groups are read when needed, the recent ones kept up to 512 MiB.

    The fingerprint covers the footer (schema, sizes, offsets and statistics of every column chunk), not the pages.

    Raises:
      ConfigError: a damaged file, or one without rows.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        try:
            self._file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ConfigError(f"{path} is not a readable Parquet file: {error}") from error
        metadata = self._file.metadata
        if not metadata.num_rows:
            raise ConfigError(f"{path} holds no records")
        rows = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        self._ends = list(itertools.accumulate(rows))
        self._groups: collections.OrderedDict[int, pa.Table] = collections.OrderedDict()
        self._lock = threading.Lock()
        with open(path, "rb") as file:
            file.seek(-8, os.SEEK_END)
            footer_bytes = int.from_bytes(file.read(4), "little")
            file.seek(-8 - footer_bytes, os.SEEK_END)
            self.fingerprint = hashlib.blake2b(file.read(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, JSON]:
        group = bisect.bisect_right(self._ends, index)
        offset = index - (self._ends[group - 1] if group else 0)
        return self._group(group).slice(offset, 1).to_pylist()[0]

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"

    def _group(self, group: int) -> pa.Table:
        with self._lock:
            if group not in self._groups:
                self._groups[group] = self._file.read_row_group(group)
                while (
                    len(self._groups) > 1
                    and sum(table.nbytes for table in self._groups.values())
                    > _ROW_GROUP_CACHE_BYTES
                ):
                    self._groups.popitem(last=False)
            self._groups.move_to_end(group)
            return self._groups[group]


class TfdsSource:
    """A split of a TensorFlow Datasets dataset in ArrayRecord files, read without TensorFlow.

    Text comes back from TFDS as bytes and is decoded; arrays become lists. A registered dataset that is not on disk
    yet is downloaded and prepared by TFDS.

    Args:
      name: as TFDS takes it: ``name[/config][:version]``.
      split: ``train``, ``test[:100]``, ...
      data_dir: where the prepared data are; None for the default of TFDS.

    Raises:
      ConfigError: an unknown dataset or split, or one prepared in another file format.
      MissingExtraError: without the package array_record.
    """

    def __init__(self, name: str, *, split: str, data_dir: str | None = None) -> None:
        self.name = f"tfds:{name}?split={split}"
        require("array_record", "tfds")
        tfds: Any = require("tensorflow_datasets", "tfds")
        try:
            self._records = tfds.data_source(name, split=split, data_dir=data_dir)
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"{self.name} could not be opened in {data_dir or 'the default data_dir'}: {reason} "
                "Expected data prepared with file_format='array_record'; add data_dir=DIR to the spec if needed"
            ) from error
        if not len(self._records):
            raise ConfigError(f"{self.name} holds no records")
        info = self._records.dataset_info
        splits = {
            key: [part.num_bytes, *part.shard_lengths] for key, part in sorted(info.splits.items())
        }
        self.fingerprint = _digest(info.full_name, split, splits)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, JSON]:
        try:
            return _plain(self._records[index])
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.where(index)}: text is not UTF-8: {error}") from error

    def where(self, index: int) -> str:
        return f"{self.name} record {index}"


class Subset:
    """Some records of a source, in the order of ``indices`` (distinct, within the source)."""

    def __init__(
        self, source: Source, indices: range | np.ndarray, name: str | None = None
    ) -> None:
        self.name = name or source.name
        self._source = source
        self._indices = indices
        self.fingerprint = _digest(
            source.fingerprint, np.asarray(indices, np.int64).tobytes().hex()
        )

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, JSON]:
        return self._source[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))


class Concatenation:
    """Sources one after another."""

    def __init__(self, name: str, sources: Sequence[Source]) -> None:
        self.name = name
        self._sources = sources
        self._ends = list(itertools.accumulate(len(source) for source in sources))
        self.fingerprint = _digest(*(source.fingerprint for source in sources))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, JSON]:
        source, offset = self._locate(index)
        return source[offset]

    def where(self, index: int) -> str:
        source, offset = self._locate(index)
        return source.where(offset)

    def _locate(self, index: int) -> tuple[Source, int]:
        part = bisect.bisect_right(self._ends, index)
        return self._sources[part], index - (self._ends[part - 1] if part else 0)


def open_source(spec: str) -> Source:
    """Opens what ``spec`` names (the module's docstring has the forms).

    Raises:
      ConfigError: nothing there, nothing in it, an unknown format, or a slice that is malformed or selects nothing.
    """
    sliced = re.fullmatch(r"(.+)@\[([^\[\]]*)\]", spec, re.DOTALL)
    if not sliced:
        return _open_unsliced(spec)
    bounds = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", sliced[2])
    if not bounds:
        raise ConfigError(
            f"slice [{sliced[2]}] of {spec!r} is malformed; expected [start:stop], either may be left out or negative"
        )
    source = _open_unsliced(sliced[1])
    start, stop = (int(bound) if bound else None for bound in bounds.groups())
    indices = range(len(source))[start:stop]
    if not indices:
        raise ConfigError(f"{spec} selects no records; {sliced[1]} holds {len(source)}")
    return Subset(source, indices, spec)


def split_source(source: Source, held_out: float, *, seed: int) -> tuple[Source, Source]:
    """Splits off a random share for evaluation: the same records for the same seed and source length.

    Args:
      source: at least two records.
      held_out: share of the records in (0, 1); at least one record falls on either side.
      seed: of the permutation.

    Returns:
      (training source, held-out source), disjoint, in the order of the original.

    Raises:
      ConfigError: a share outside (0, 1), or fewer than two records.
    """
    if not 0 < held_out < 1 or len(source) < 2:
        raise ConfigError(
            f"cannot hold out {held_out} of the {len(source)} records of {source.name}; "
            "expected a share in (0, 1) of at least 2 records"
        )
    count = min(max(round(held_out * len(source)), 1), len(source) - 1)
    order = np.random.default_rng(seed).permutation(len(source))
    return (
        Subset(source, np.sort(order[count:])),
        Subset(source, np.sort(order[:count]), f"{source.name} (held out)"),
    )


def _open_unsliced(spec: str) -> Source:
    if spec.startswith("tfds:"):
        return _open_tfds(spec)
    if os.path.isdir(spec):
        raise ConfigError(
            f"{spec} is a directory; name its files, as in {spec.rstrip('/')}/*.jsonl"
        )
    if os.path.exists(spec):
        return _open_file(spec)
    paths = sorted(glob.glob(spec, recursive=True), key=_natural)
    if not paths:
        raise ConfigError(
            f"no file matches {spec!r}; check the path (working directory {os.getcwd()})"
        )
    sources = [_open_file(path) for path in paths]
    return sources[0] if len(sources) == 1 else Concatenation(spec, sources)


def _open_file(path: str) -> Source:
    if path.endswith((".jsonl", ".ndjson")):
        return JsonlSource(path)
    if path.endswith(".parquet"):
        return ParquetSource(path)
    raise ConfigError(
        f"{path}: unknown format {os.path.splitext(path)[1]!r}; expected one of {_SUFFIXES}"
    )


def _open_tfds(spec: str) -> Source:
    name, _, query = spec.removeprefix("tfds:").partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - {"split", "data_dir"})
    if not name or unknown or not options.get("split"):
        raise ConfigError(
            f"{spec!r} is malformed (unknown options: {unknown}); expected tfds:NAME?split=SPLIT[&data_dir=DIR]"
        )
    return TfdsSource(name, split=options["split"], data_dir=options.get("data_dir"))


def _parse_line(line: bytes, where: str) -> dict[str, JSON]:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # some editors put a byte order mark first
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: got a JSON {type(record).__name__}; expected an object")
    return record


def _plain(value: Any) -> Any:
    """NumPy and bytes, nested, as JSON values."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _natural(path: str) -> list[tuple[bool, int, str]]:
    """Sort key under which shard-9 comes before shard-10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in re.split(r"(\d+)", path)
    ]


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
