"""From tensors of a file to parameters on the mesh, one device's slice of one parameter at a time.

What is in the files is compared with what the configuration implies before a byte of it is read, and everything that is
wrong is listed by name. Then, for each parameter, each process reads the slices of its own devices, once each: rows of
the file's tensors, turned into [in, out], converted, stacked over layers. The host holds one slice and some blocks of
rows; nobody holds the model. Where a file is remote, slices that differ in columns alone are read together, since a
request gives whole rows: then the host holds as many slices as its devices share those rows. Kernels that are
to be kept in few bits are quantised as each slice comes: nobody holds them in float32.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from etils import epath
from numpy.typing import DTypeLike

from rlvr_jax.distributed.processes import gather
from rlvr_jax.distributed.sharding import param_shardings
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.checksums import damaged
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, Params, abstract_params
from rlvr_jax.models.families import Family, Tensor
from rlvr_jax.models.frozen import finished, kernel_sharding, quantize_piece, quantizes
from rlvr_jax.models.layout import Part, file_parts, file_shape, flatten, nest, param_shapes
from rlvr_jax.models.quantized import Quantization

_BLOCK_BYTES = 1 << 23
_NUM_THREADS = 8  # blocks in flight: what keeps a bucket's requests going
Index = tuple[tuple[int, int], ...]  # (start, stop) in each axis of a parameter


class Source(Protocol):
    """Named tensors with a configuration.

    Attributes:
      files: what the weights are in.
      remote: whether each read is a request to another machine.
    """

    family: Family
    files: tuple[epath.Path, ...]
    remote: bool

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> set[str]: ...

    def name_of(self, tensor: Tensor) -> str:
        """The name of a parameter in this kind of file, ``{layer}`` and ``{expert}`` standing for their indices."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """As the file has it: [out, in] for kernels."""
        ...

    def dtype(self, name: str) -> str:
        """As the file calls it."""
        ...

    def readable(self, name: str) -> bool:
        """Whether numbers of its dtype can be read."""
        ...

    @property
    def readable_kinds(self) -> str:
        """Which dtypes those are, for a message."""
        ...

    def rows(self, name: str, tensor: Tensor, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, in Hugging Face's order; any float dtype."""
        ...


class Weights:
    """Weights that are there, whole and of their configuration; nothing of them has been read yet.

    Args:
      source: where the tensors are.
      path: of what, for messages.

    Attributes:
      config: of the model.
      source, path: as given.

    Raises:
      WeightsError: tensors are missing, not part of the model, misshapen or of a dtype that is not read; all are named.
    """

    def __init__(self, source: Source, path: epath.Path) -> None:
        self.config, self.source, self.path = source.config, source, path
        self._shapes = param_shapes(self.config)
        parts = file_parts(source.family, source.name_of, self._shapes)
        _check_complete(source, parts, path)
        self._tensors = {tensor.path: tensor for tensor in source.family.tensors}
        # Of each (parameter, layer, expert) the tensor of the file, and its first row there.
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, int]] = {}
        for name, in_file in parts.items():
            starts = itertools.accumulate((part.shape[0] for part in in_file), initial=0)
            for part, start in zip(in_file, starts, strict=False):
                self._places[part.tensor.path, part.index] = (name, start)

    def dtypes(self) -> dict[str, list[str]]:
        """Which tensors have which dtype, the most frequent first."""
        found: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for name, _ in self._places.values()):
            found.setdefault(self.source.dtype(name), []).append(name)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))

    def check_content(self, *, shared: bool = False) -> None:
        """Compares the files with their published checksums, where there are any, and a tied head with its embedding.

        Args:
          shared: all processes call this, and each reads a part of the files.

        Raises:
          WeightsError: a file is damaged; a tied model has a head of its own.
        """
        count, index = (jax.process_count(), jax.process_index()) if shared else (1, 0)
        problems = damaged(self.source.files[index::count])
        if count > 1:
            problems = [problem for part in gather("checksums", problems) for problem in part]
        if problems:
            raise WeightsError(
                f"files in {self.path} are not what was published: {'; '.join(problems)}: copy them again, or, if they "
                "were changed on purpose, remove the checksum"
            )
        if self.config.tie_embeddings:
            self.check_tied_head()

    def load(
        self,
        dtype: DTypeLike = np.float32,
        *,
        mesh: jax.sharding.Mesh | None = None,
        quantization: Quantization | None = None,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> Params:
        """Reads the parameters.

        Args:
          dtype: of the arrays returned, whatever the files have.
          mesh: where they go; None for NumPy arrays on the host.
          quantization: how the layers' kernels are kept, as ``frozen.abstract_base`` has it; ``dtype`` is of the rest.
          advance: called, from several threads, with how many bytes of parameters were read.

        Returns:
          The decoder's params: nested dict of arrays, layers stacked on axis 0.

        Raises:
          ValueError: the model does not divide over the mesh.
          OSError: a file cannot be read.
        """
        dtype = np.dtype(dtype)
        with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:

            def read(path: str, indices: Sequence[Index]) -> list[np.ndarray]:
                of = np.dtype(np.float32) if quantizes(path, quantization) else dtype
                return self._read(path, indices, of, pool=pool, advance=advance)

            def one(path: str) -> Any:
                kept = quantization if quantizes(path, quantization) else None
                put: Callable[[np.ndarray, Any], Any] = jax.device_put
                if kept is not None:
                    put = functools.partial(quantize_piece, path=path, quantization=kept)
                if mesh is None:
                    [whole] = read(path, [tuple((0, size) for size in self._shapes[path])])
                    parameter: Any = put(whole, None) if kept else whole
                elif kept:
                    spread = kernel_sharding(path, self._shapes[path], mesh)
                    parameter = self._place(path, spread, read, put)
                else:
                    parameter = self._place(path, shardings[path], read, put)
                return finished(parameter, path, kept, mesh) if kept else parameter

            shardings: dict[str, Any] = {}
            if mesh is not None:
                shardings = flatten(param_shardings(mesh, abstract_params(self.config), PARAM_AXES))
            return nest({path: one(path) for path in self._shapes})

    def num_bytes(self, dtype: DTypeLike, mesh: jax.sharding.Mesh | None) -> int:
        """How many bytes of parameters this process will read: what ``advance`` adds up to."""
        size = np.dtype(dtype).itemsize
        if mesh is None:
            return size * sum(map(math.prod, self._shapes.values()))
        shardings = flatten(param_shardings(mesh, abstract_params(self.config), PARAM_AXES))
        return size * sum(
            math.prod(stop - start for start, stop in index)
            for path, sharding in shardings.items()
            for index in _devices_by_index(self._shapes[path], sharding)
        )

    def _place(
        self,
        path: str,
        sharding: jax.sharding.Sharding,
        read: Callable[[str, Sequence[Index]], list[np.ndarray]],
        put: Callable[[np.ndarray, Any], Any],
    ) -> Any:
        """A parameter on the mesh, each slice as ``put`` makes it an array, or several, of a device.

        ``jax.make_array_from_callback`` would hold the slices of all devices at once.
        """
        devices = _devices_by_index(self._shapes[path], sharding)
        together: dict[Any, list[Index]] = {}
        for index in devices:
            together.setdefault(self._without_columns(path, index), []).append(index)
        placed: list[Any] = []
        for indices in together.values():
            for index, piece in zip(indices, read(path, indices), strict=True):
                placed += [put(piece, device) for device in devices[index]]
            jax.block_until_ready(placed)  # or the next slice would be read while this one waits

        counts = [
            size // of_slice
            for size, of_slice in zip(
                self._shapes[path], sharding.shard_shape(self._shapes[path]), strict=True
            )
        ]

        def whole(*slices: jax.Array) -> jax.Array:
            shape = tuple(size * count for size, count in zip(slices[0].shape, counts, strict=True))
            return jax.make_array_from_single_device_arrays(shape, sharding, slices)

        return jax.tree.map(whole, *placed)

    def _without_columns(self, path: str, index: Index) -> Index:
        """What slices have in common that are read together."""
        tensor = self._tensors[path]
        if not self.source.remote or len(index) - tensor.num_indices < 2:
            return index
        return index[:-2] + (index[-1:] if tensor.transpose else index[-2:-1])

    def _read(
        self,
        path: str,
        indices: Sequence[Index],
        dtype: np.dtype[Any],
        *,
        pool: concurrent.futures.Executor,
        advance: Callable[[int], None],
    ) -> list[np.ndarray]:
        """Slices of a parameter that differ in the file's columns alone."""
        tensor = self._tensors[path]
        pieces = [np.empty([stop - start for start, stop in index], dtype) for index in indices]
        stacked, own = indices[0][: tensor.num_indices], indices[0][tensor.num_indices :]
        first, last = own[-1] if tensor.transpose else own[0]
        columns = [
            slice(*index[tensor.num_indices :][0 if tensor.transpose else -1])
            for index in indices
            if len(own) > 1
        ]
        row_values = self._shapes[path][-2 if tensor.transpose else -1] if len(own) > 1 else 1
        step = max(1, _BLOCK_BYTES // (4 * row_values))

        def read_block(job: tuple[tuple[int, ...], int]) -> None:
            at, start = job
            stop = min(start + step, last)
            name, offset = self._places[path, at]
            block = self.source.rows(name, tensor, offset + start, offset + stop)
            inside = tuple(i - begin for i, (begin, _) in zip(at, stacked, strict=True))
            for number, piece in enumerate(pieces):
                target = piece[inside].T if tensor.transpose else piece[inside]
                target = target[start - first : stop - first]
                target[...] = block[:, columns[number]] if columns else block
                advance(target.nbytes)

        stacks = itertools.product(*(range(*bounds) for bounds in stacked))
        for _ in pool.map(read_block, itertools.product(stacks, range(first, last, step))):
            pass  # to raise what a thread raised
        return pieces

    def check_tied_head(self) -> None:
        """A tied model may be saved with a head, a copy of its embedding; another would be lost without a word.

        Raises:
          WeightsError: it has another.
        """
        source = self.source
        head, embedding = self._tensors["head/kernel"], self._tensors["embed/embedding"]
        name, of_table = source.name_of(head), source.name_of(embedding)
        if name not in source.names():
            return
        rows, columns = source.shape(of_table)
        step = max(1, _BLOCK_BYTES // (4 * columns))
        same = source.shape(name) == (rows, columns) and all(
            np.array_equal(
                source.rows(name, head, start, min(start + step, rows)),
                source.rows(of_table, embedding, start, min(start + step, rows)),
            )
            for start in range(0, rows, step)
        )
        if not same:
            raise WeightsError(
                f"{self.path} ties its embeddings, yet {name} differs from the embedding; expected the same numbers: "
                "set tie_word_embeddings to false in config.json if the head is meant"
            )


def _devices_by_index(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding
) -> dict[Index, list[Any]]:
    """The slices that this process needs, and its devices that need them."""
    devices: dict[Index, list[Any]] = {}
    for device, slices in sharding.addressable_devices_indices_map(shape).items():
        assert slices is not None
        bounds = (part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))
        devices.setdefault(tuple(bounds), []).append(device)
    return devices


def _check_complete(source: Source, parts: Mapping[str, Sequence[Part]], path: epath.Path) -> None:
    expected = {name: file_shape(in_file) for name, in_file in parts.items()}
    # A tied model may come with its head.
    optional = {source.name_of(t) for t in source.family.tensors if t.path == "head/kernel"}
    names = source.names()
    present = [name for name in expected if name in names]
    problems = {
        "missing": sorted(expected.keys() - names),
        "not part of the model": sorted(names - expected.keys() - optional),
        "misshapen": [
            f"{name} {got} (expected {expected[name]}"
            + (", looks transposed)" if got == expected[name][::-1] else ")")
            for name in present
            if (got := source.shape(name)) != expected[name]
        ],
        f"of a dtype that is not read (expected {source.readable_kinds})": [
            f"{name} has dtype {source.dtype(name)}"
            for name in [*present, *sorted((optional & names) - expected.keys())]
            if not source.readable(name)
        ],
    }
    found = [f"{kind}: {listed(items)}" for kind, items in problems.items() if items]
    if found:
        raise WeightsError(
            f"the tensors in {path} are not those of its configuration; {'; '.join(found)}: "
            "take the weights and the configuration from the same model, in numbers that are read"
        )


def listed(items: Sequence[str], limit: int = 24) -> str:
    """The first names of a list that may be long."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more
