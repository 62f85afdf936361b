"""Fine-tuning on conversations of random lengths: packed into rows by the trainer's own pipeline, against one a row."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.measure import Program
from benchmarks.updates import Programs, Update, place
from rlvr_jax.data.loader import chat_dataset
from rlvr_jax.data.packing import packing_stats
from rlvr_jax.types import JSON, TrainBatch


class NumberChats:
    """A source of conversations, each a number that says which tokens it has; see ``data.sources.Source``."""

    def __init__(self, lengths: np.ndarray, vocab_size: int, seed: int) -> None:
        self.name, self.fingerprint = "numbers", f"{len(lengths)}-{seed}"
        self._lengths, self._vocab_size, self._seed = lengths, vocab_size, seed

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, JSON]:
        rng = np.random.default_rng((self._seed, index))
        tokens = rng.integers(0, self._vocab_size, self._lengths[index])
        text = " ".join(map(str, tokens))
        return {"messages": [{"role": "assistant", "content": text}]}

    def where(self, index: int) -> str:
        return f"{self.name}:{index}"


def render(turns: Sequence[Any]) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation of ``NumberChats``, all of them the assistant's."""
    tokens = [int(number) for turn in turns for number in turn.content.split()]
    return tokens, [True] * len(tokens)


def random_lengths(count: int, longest: int, padding: float, seed: int) -> np.ndarray:
    """int[count], uniform, of mean ``(1 - padding) * longest``: rows of one conversation are padded by that share."""
    mean = (1 - padding) * longest
    spread = min(longest - mean, mean - 2)
    uniform = np.random.default_rng(seed).uniform(mean - spread, mean + spread, count)
    return np.round(uniform).astype(int)


def one_a_row(batch: TrainBatch) -> TrainBatch:
    """The conversations of a packed batch, each in a row of its own: NumPy arrays [conversations, T]."""
    segments = np.asarray(batch.segment_ids)
    places = [(row, s) for row, of_row in enumerate(segments) for s in range(1, of_row.max() + 1)]

    def spread(field: np.ndarray, padding: int) -> np.ndarray:
        out = np.full((len(places), field.shape[1]), padding, field.dtype)
        for target, (row, segment) in enumerate(places):
            values = field[row][segments[row] == segment]
            out[target, : len(values)] = values
        return out

    names = [f.name for f in dataclasses.fields(batch) if getattr(batch, f.name) is not None]
    fields = {name: np.asarray(getattr(batch, name)) for name in names}
    ids = {"sample_ids", "parents"}
    alone: dict[str, Any] = {
        name: spread(x, -1 if name in ids else 0) for name, x in fields.items()
    }
    alone["segment_ids"] = (alone["segment_ids"] > 0).astype(np.int32)
    alone["parents"] = np.where(alone["positions"] > 0, np.arange(segments.shape[1]) - 1, -1)
    alone["parents"] = alone["parents"].astype(np.int32)
    return TrainBatch(**alone)


def measure_packing(
    programs: Programs, *, rows: int, length: int, padding: float, warmup: int, steps: int
) -> dict[str, Any]:
    """Updates on packed and on padded rows in turn, the program and the conversations being the same.

    Returns:
      ``packed`` and ``padded``, each with ``step_s`` (median), ``tok_s`` (conversations' own tokens a second) and
      ``fill``; ``speedup``, the ratio of the ``tok_s``; ``pack_s``, the host's seconds for a packed batch.
    """
    # One batch is measured again and again, so that neither fill nor data are a matter of chance between the two.
    count = max(64, 8 * round(rows / (1 - padding)))
    lengths = random_lengths(count, length, padding, programs.seed)
    source = NumberChats(lengths, programs.model.vocab_size, programs.seed)
    data = chat_dataset(
        [source], render, length=length, batch_size=rows, seed=programs.seed, num_epochs=None
    )
    batches = [next(data)]
    began = time.perf_counter()
    batches += [next(data) for _ in range(4)]
    pack_s = (time.perf_counter() - began) / 4
    alone = jax.tree.map(lambda *xs: np.concatenate(xs), *map(one_a_row, batches))
    chosen = {
        "packed": batches[1],
        "padded": jax.tree.map(lambda x: x[:rows], alone),
    }
    program = Program(programs.fine_tuning(), programs.mesh)
    state = programs.state(programs.params())
    kinds = {name: place(programs, batch) for name, batch in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    update = Update("sft", program, state, (), tokens=0, flops=0.0, fill=1.0, mesh=programs.mesh)
    for turn in range(warmup + steps):
        for name, pieces in kinds.items():
            update.arguments = (pieces, None)
            began = time.perf_counter()
            update.run()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - began)
    report: dict[str, Any] = {"padding": padding, "pack_s": round(pack_s, 4)}
    for name, batch in chosen.items():
        stats = packing_stats(batch)
        step_s = statistics.median(seconds[name])
        report[name] = {
            "step_s": round(step_s, 5),
            "tok_s": round(stats["real_tokens"] / step_s, 1),
            "fill": round(stats["fill"], 4),
        }
    report["speedup"] = round(report["packed"]["tok_s"] / report["padded"]["tok_s"], 3)
    return report
