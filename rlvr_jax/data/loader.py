"""From sources to what trains: packed batches of conversations, and lists of tasks.

``chat_dataset`` is one Grain pipeline: shuffle and repeat (or mix), tokenise, drop what has nothing to train on, pack
whole conversations into rows, batch. Two decisions:

Every process reads the same stream and keeps its own rows of each global batch. That costs each host the tokenising of
all rows (in threads, while the devices work), and buys batches that are the same for any number of processes, an
iterator state that is too, and ends that coincide: with a stream a process, packing would leave some with a batch more
than others, and those would wait for ever in a collective.

Threads, not worker processes, read and tokenise: tokenizers release the interpreter lock, and the state stays exact.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import grain
import numpy as np

from rlvr_jax.data.sources import Source, open_source
from rlvr_jax.data.transforms import Turn, to_messages, to_task
from rlvr_jax.errors import ConfigError
from rlvr_jax.types import Task, TrainBatch

# messages -> (token ids, mask of the tokens an assistant wrote), of the same length
Render = Callable[[Sequence[Turn]], tuple[Sequence[int], Sequence[bool] | np.ndarray]]

_PACKING_BINS_PER_ROW = 4  # more open bins than rows: first-fit then leaves fewer holes
_MIN_PACKING_BINS = 32
_STATE_VERSION = 1


class ChatDataset(Iterator[TrainBatch]):
    """Batches of conversations, with a state that can be saved as JSON. Made by ``chat_dataset``.

    Attributes:
      num_batches: batches given out so far, over all runs that this one resumes.
    """

    def __init__(
        self, batches: grain.IterDataset, *, counts: dict[str, int], identity: dict[str, str]
    ) -> None:
        self._iterator = iter(batches)
        self._start = self._iterator.get_state()
        self._identity = identity
        self._counts = counts
        self._counts_before = dict(counts)
        self.num_batches = 0

    def __next__(self) -> TrainBatch:
        batch = next(self._iterator)
        self.num_batches += 1
        return batch

    @property
    def counts(self) -> dict[str, int]:
        """Conversations so far: ``read``, ``truncated`` (cut to a row, trained on), ``dropped`` (nothing to train on).

        Packing reads ahead, so they lead the batches by up to the rows that are open.
        """
        # A resumed iterator goes back to where the open rows began, and counts up to here once more.
        return {name: max(count, self._counts_before[name]) for name, count in self._counts.items()}

    def get_state(self) -> dict[str, Any]:
        """JSON from which ``set_state`` continues with exactly the batch that would have come next."""
        return {
            "version": _STATE_VERSION,
            "identity": self._identity,
            "num_batches": self.num_batches,
            "counts": self.counts,
            "iterator": self._iterator.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state; starts over, with a warning, when it is of other data or settings.

        An old position in new data would skip some records and repeat others without a word. A state of fewer epochs
        continues: the number of epochs is not part of the identity.

        Raises:
          ConfigError: not a state of this class.
        """
        if not isinstance(state, dict) or state.get("version") != _STATE_VERSION:
            raise ConfigError(
                f"got the data state {state!r:.80}; expected one of version {_STATE_VERSION}, as get_state returns"
            )
        changed = [
            f"{key} was {state['identity'].get(key)}, is {value}"
            for key, value in self._identity.items()
            if key != "sources" and state["identity"].get(key) != value
        ]
        if changed:
            warnings.warn(
                f"the data changed since the checkpoint ({state['identity'].get('sources')} then, "
                f"{self._identity['sources']} now: {'; '.join(changed)}); starting again from its first record",
                stacklevel=2,
            )
            self._iterator.set_state(self._start)
            self._counts_before = dict(self._counts)
            self.num_batches = 0
            return
        self._iterator.set_state(state["iterator"])
        self._counts_before = state["counts"]
        self.num_batches = state["num_batches"]


def chat_dataset(
    sources: Sequence[Source],
    render: Render,
    *,
    length: int,
    batch_size: int,
    seed: int,
    weights: Sequence[float] | None = None,
    num_epochs: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> ChatDataset:
    """Conversations packed into rows, as batches for the negative log-likelihood of assistant tokens.

    A conversation longer than a row is cut at the row's end; what is cut off is never trained on as a conversation of
    its own. When ``num_epochs`` is finite the last batch is filled up with empty rows (segment 0, loss_mask 0), so
    nothing is left out and shapes stay the same.

    Args:
      sources: what to read (``open_source``).
      render: messages -> (ids, mask of assistant tokens), as a chat template with generation markers gives.
      length: T, tokens a row.
      batch_size: B, rows of a global batch; a multiple of ``process_count``.
      seed: of the order; every epoch has its own.
      weights: shares of the conversations (not tokens) drawn from each source, each repeated without end; None takes
        all records of all sources once an epoch.
      num_epochs: passes over the data; None for no end.
      process_index: which process this is.
      process_count: of how many.

    Returns:
      An iterator of TrainBatch, numpy arrays [batch_size / process_count, length]: ``positions`` count from the start
      of each conversation, ``parents`` are the column before (-1 at a start), ``sample_ids`` number the conversations
      of the global batch, ``advantages`` equal ``loss_mask``, log-probabilities are 0.

    Raises:
      ConfigError: arguments that cannot work; and from ``next``, a record that is no conversation (naming its file and
        line), or data in which no conversation has anything to train on.
    """
    _check_arguments(sources, length, batch_size, weights, num_epochs, process_index, process_count)
    parts = [grain.MapDataset.source(_TokenizedChats(source, render, length)) for source in sources]
    if weights is None:
        joined = grain.MapDataset.concatenate(parts) if len(parts) > 1 else parts[0]
        conversations = joined.shuffle(seed=seed).repeat(num_epochs)
    else:
        conversations = grain.MapDataset.mix(
            [part.shuffle(seed=seed + i).repeat(None) for i, part in enumerate(parts)], weights
        )
    num_records = sum(len(source) for source in sources)
    threads = min(8, os.cpu_count() or 1)
    trainable = _Trainable(
        conversations.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16 * threads)
        ),
        num_records,
    )
    rows = grain.experimental.FirstFitPackIterDataset(
        trainable,
        length_struct={"tokens": length, "trained": length},
        num_packing_bins=max(_PACKING_BINS_PER_ROW * batch_size, _MIN_PACKING_BINS),
        seed=seed,
    )

    def to_batch(packed: Sequence[dict[str, np.ndarray]]) -> TrainBatch:
        local = batch_size // process_count
        own = slice(process_index * local, (process_index + 1) * local)
        return _train_batch(packed, batch_size=batch_size, length=length, rows=own)

    content = [source.fingerprint for source in sources]
    return ChatDataset(
        rows.batch(batch_size, drop_remainder=False, batch_fn=to_batch),
        counts=trainable.counts,
        identity={
            "sources": ", ".join(source.name for source in sources),
            "content": hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest(),
            "settings": f"{length=} {batch_size=} {seed=} weights={weights and list(weights)}",
        },
    )


def load_tasks(spec: str, *, domain: str, instruction: str = "") -> list[Task]:
    """Reads tasks in a published format (``transforms.to_task``) from whatever ``open_source`` opens.

    Records whose gold answer no response could match, and repeated ones, are skipped with one warning that counts
    them and gives the first reason.

    Args:
      spec: what to read.
      domain: the registered domain that scores responses.
      instruction: appended to every question, such as "Put the final answer in \\\\boxed{}."

    Raises:
      ConfigError: nothing to read, or no usable task in it.
    """
    source = open_source(spec)
    tasks: dict[tuple[str, str], Task] = {}
    skipped: list[str] = []
    for index in range(len(source)):
        try:
            task = to_task(
                source[index], domain=domain, source=source.name, instruction=instruction
            )
        except ConfigError:
            raise
        except ValueError as error:
            skipped.append(f"{source.where(index)}: {error}")
            continue
        if task.key in tasks:
            skipped.append(f"{source.where(index)}: a repeated question")
        else:
            tasks[task.key] = task
    if not tasks:
        raise ConfigError(
            f"none of the {len(source)} records of {spec} is a usable task; {skipped[0]}"
        )
    if skipped:
        warnings.warn(
            f"skipped {len(skipped)} of {len(source)} records of {spec}; the first: {skipped[0]}",
            stacklevel=2,
        )
    return list(tasks.values())


class _TokenizedChats:
    """A Grain random-access source: record -> ids and mask, cut to a row, and the length before the cut."""

    def __init__(self, source: Source, render: Render, length: int) -> None:
        self._source = source
        self._render = render
        self._length = length

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record = self._source[index]
        try:
            tokens, assistant = self._render(to_messages(record))
        except ValueError as error:
            raise ConfigError(f"{self._source.where(index)}: {error}") from error
        if len(tokens) != len(assistant):
            raise ValueError(
                f"render gave {len(tokens)} ids and {len(assistant)} mask entries for {self._source.where(index)}"
            )
        trained = np.asarray(assistant, bool)[: self._length].copy()
        trained[:1] = False  # nothing stands before the first token to predict it from
        return {
            "tokens": np.asarray(tokens, np.int32)[: self._length],
            "trained": trained,
            "num_tokens": len(tokens),
        }


class _Trainable(grain.IterDataset):
    """Drops conversations without a token to train on, and counts; the counts are part of the iterator's state."""

    def __init__(self, parent: grain.IterDataset, num_records: int) -> None:
        super().__init__(parent)
        self._num_records = num_records
        self.counts = {"read": 0, "truncated": 0, "dropped": 0}

    def __iter__(self) -> grain.DatasetIterator:
        return _TrainableIterator(iter(self._parent), self.counts, self._num_records)


class _TrainableIterator(grain.DatasetIterator):
    def __init__(
        self, parent: grain.DatasetIterator, counts: dict[str, int], num_records: int
    ) -> None:
        super().__init__(parent)
        self._counts = counts
        self._num_records = num_records
        self._dropped_in_a_row = 0

    def __next__(self) -> dict[str, np.ndarray]:
        while True:
            chat = next(self._parent)
            self._counts["read"] += 1
            if chat["trained"].any():
                self._counts["truncated"] += chat["num_tokens"] > len(chat["tokens"])
                self._dropped_in_a_row = 0
                return {"tokens": chat["tokens"], "trained": chat["trained"]}
            self._counts["dropped"] += 1
            self._dropped_in_a_row += 1
            if self._dropped_in_a_row >= self._num_records:
                raise ConfigError(
                    f"{self._dropped_in_a_row} conversations in a row have no assistant token within the row length; "
                    "expected a longer row, or data with turns of the assistant"
                )

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._parent.get_state(), "counts": dict(self._counts)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._counts.update(state["counts"])
        self._dropped_in_a_row = 0


def _train_batch(
    packed: Sequence[dict[str, np.ndarray]], *, batch_size: int, length: int, rows: slice
) -> TrainBatch:
    """Stacks packed rows, fills up to ``batch_size`` with empty ones, and keeps ``rows``."""

    def stack(key: str) -> np.ndarray:
        full = np.zeros((batch_size, length), np.int32)
        full[: len(packed)] = [row[key] for row in packed]
        return full

    positions, segments = stack("tokens_positions"), stack("tokens_segment_ids")
    loss_mask = stack("trained").astype(np.float32)
    # Conversations are numbered through the whole batch: each row starts where the one before stopped.
    first = np.cumsum(segments.max(axis=1)) - segments.max(axis=1)
    fields = {
        "tokens": stack("tokens"),
        "positions": positions,
        "segment_ids": segments,
        "prefix_ids": np.zeros_like(segments),
        "parents": np.where(positions > 0, np.arange(length) - 1, -1).astype(np.int32),
        "sample_ids": np.where(segments > 0, segments - 1 + first[:, None], -1).astype(np.int32),
        "loss_mask": loss_mask,
        "advantages": loss_mask,
        "behavior_logprobs": np.zeros_like(loss_mask),
        "ref_logprobs": np.zeros_like(loss_mask),
    }
    return TrainBatch(**{name: cast(Any, array[rows]) for name, array in fields.items()})


def _check_arguments(
    sources: Sequence[Source],
    length: int,
    batch_size: int,
    weights: Sequence[float] | None,
    num_epochs: int | None,
    process_index: int,
    process_count: int,
) -> None:
    if not sources:
        raise ConfigError("no data sources; name at least one")
    if length < 2:
        raise ConfigError(f"length is {length}; expected at least 2 tokens a row")
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"batch_size ({batch_size}) must be a positive multiple of the number of processes ({process_count})"
        )
    if not 0 <= process_index < process_count:
        raise ConfigError(f"process_index is {process_index}; expected 0 to {process_count - 1}")
    if num_epochs is not None and num_epochs < 1:
        raise ConfigError(f"num_epochs is {num_epochs}; expected at least 1, or None for no end")
    if weights is None:
        return
    if len(weights) != len(sources) or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"got the weights {list(weights)} for {len(sources)} sources; expected one finite number > 0 for each"
        )
    if num_epochs is not None:
        raise ConfigError(
            f"num_epochs is {num_epochs} with weights; a weighted mixture has no end, set num_epochs=None"
        )
