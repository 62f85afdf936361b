"""One safetensors file, here or in a bucket: its header is parsed once, and rows of its tensors are read on demand.

The format is eight bytes that count the header's, the header (JSON: name -> dtype, shape, offsets), and the data. A
local file is mapped, so that a column of a tensor touches only its own pages; of a remote one (``gs://``, whatever
fsspec opens), a range of bytes is fetched.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, NamedTuple

import fsspec
import jax.numpy as jnp
import numpy as np
from etils import epath
from fsspec.implementations.local import LocalFileSystem

from rlvr_jax.errors import WeightsError

# What is converted to the parameters' dtype. All else is another number format, or a quantisation.
DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own bound


class Entry(NamedTuple):
    """A tensor as the header describes it; ``start`` and ``stop`` are bytes of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile:
    """An open safetensors file.

    Args:
      path: the file.

    Attributes:
      entries: name -> description of every tensor.
      remote: whether each read is a request to another machine.

    Raises:
      WeightsError: the file is cut short or no safetensors.
      OSError: it cannot be opened.
    """

    def __init__(self, path: epath.Path) -> None:
        self._path = path
        self._files, self._key = fsspec.core.url_to_fs(os.fspath(path))
        self.remote = not isinstance(self._files, LocalFileSystem)
        self._size = int(self._files.size(self._key))
        self._map = np.zeros(0, np.uint8)
        if not self.remote and self._size:
            self._map = np.memmap(self._key, np.uint8, mode="r")
        try:
            self.entries = self._parse()
        except (ValueError, KeyError, TypeError) as error:
            raise WeightsError(
                f"{path} cannot be read as safetensors ({error}); it may be cut short: copy it again"
            ) from error

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor of at least one dimension, in the file's dtype: a read-only view or a copy.

        Raises:
          OSError: the file cannot be read (any more).
        """
        entry = self.entries[name]
        row_bytes = (entry.stop - entry.start) // entry.shape[0]
        content = self._read(entry.start + start * row_bytes, entry.start + stop * row_bytes)
        return content.view(DTYPES[entry.dtype]).reshape(stop - start, *entry.shape[1:])

    def _read(self, start: int, stop: int) -> np.ndarray:
        """uint8[stop - start]."""
        if not self.remote:
            return self._map[start:stop]
        content = np.frombuffer(self._files.cat_file(self._key, start=start, end=stop), np.uint8)
        if len(content) != stop - start:
            raise OSError(
                f"{self._path} gave {len(content)} bytes from {start} on; expected {stop - start}: has it changed "
                "since it was opened?"
            )
        return content

    def _parse(self) -> dict[str, Entry]:
        if self._size < 8:
            raise ValueError(f"{self._size} bytes, no header")
        num_bytes = int.from_bytes(self._read(0, 8).tobytes(), "little")
        if num_bytes > min(_MAX_HEADER_BYTES, self._size - 8):
            raise ValueError(f"a header of {num_bytes} bytes in a file of {self._size}")
        header = json.loads(self._read(8, 8 + num_bytes).tobytes())
        header.pop("__metadata__", None)
        entries = {}
        for name, entry in header.items():
            start, stop = (8 + num_bytes + int(offset) for offset in entry["data_offsets"])
            shape = tuple(int(size) for size in entry["shape"])
            entries[name] = Entry(entry["dtype"], shape, start, stop)
            known = DTYPES.get(entry["dtype"])
            if known is not None and stop - start != math.prod(shape) * known.itemsize:
                raise ValueError(f"tensor {name} has {stop - start} bytes for its shape {shape}")
        end = max((entry.stop for entry in entries.values()), default=8 + num_bytes)
        if end != self._size:
            raise ValueError(f"{self._size} bytes, of {end} that its header tells of")
        return entries
