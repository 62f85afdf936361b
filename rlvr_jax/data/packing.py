"""From ragged trajectories to fixed shapes: the only crossing from the host side to the device side.

A row of the batch holds token trees. A tree is a prompt, stored once, and the responses a group sampled from it; each
response is a segment of its own that attends to the prompt and to itself, at the positions of the plain sequence. What
the network computes for a token is therefore the same as without sharing, and so is the gradient; but the prompt is
paid for once instead of G times, and responses of any length lie next to each other without padding.

Everything is a pure function of the groups in their given order: same groups, same batch, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rlvr_jax.types import Group, TrainBatch, Trajectory


@dataclasses.dataclass(frozen=True)
class _Branch:
    """One trajectory to train on, cut at its first sampled token."""

    prompt: np.ndarray  # int32[Tp]
    tokens: np.ndarray  # int32[Tr], from the first sampled token to the last
    response_mask: np.ndarray  # bool[Tr]
    logprobs: np.ndarray  # float32[Tr]
    advantage: float
    sample_id: int
    experts: np.ndarray | None  # int16[Tp + Tr, L, k]

    @property
    def size(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class _Tree:
    """Branches that share a prompt; what is placed in a row as a whole."""

    branches: tuple[_Branch, ...]

    @property
    def prompt(self) -> np.ndarray:
        return self.branches[0].prompt

    @property
    def size(self) -> int:
        return len(self.prompt) + sum(branch.size for branch in self.branches)


def pack_groups(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    *,
    length: int,
    row_multiple: int = 1,
    min_rows: int = 1,
    rows: int | None = None,
    pad_id: int = 0,
    share_prompt: bool = True,
    mask_truncated: bool = False,
) -> TrainBatch:
    """Packs the scored trajectories of some groups into rows.

    Rows are filled first-fit by decreasing size. A group whose tree does not fit ``length`` is spread over several
    trees that repeat the prompt; it stays one group for its advantages, which are already made.

    Args:
      groups: what was sampled. Unscored trajectories, and those in which nothing was sampled, are left out.
      advantages: one float[G] for each group; entries of unscored trajectories are not read.
      length: T, tokens of a row.
      row_multiple: the number of rows is ``bucket(needed, row_multiple)``; the rows of a micro-batch, say.
      min_rows: what is needed at least.
      rows: the exact number of rows, instead of the bucket.
      pad_id: token id under padding (never read by a model that masks).
      share_prompt: store a prompt once for a tree (else every trajectory is one plain segment).
      mask_truncated: leave out trajectories that ran out of tokens (stop reason ``length``; DAPO's overlong filtering).

    Returns:
      A TrainBatch of NumPy arrays [rows, length]; ``sample_ids`` count the trajectories of all groups in order, those
      left out included, so that they index ``np.concatenate(advantages)``. ``ref_logprobs`` are 0, for the trainer to
      fill. ``experts`` are there when a trajectory has some.

    Raises:
      ValueError: a trajectory is longer than ``length``, has no prompt, or has a log-probability or an advantage that
        is not finite; more than ``rows`` rows are needed; advantages do not match the groups.
    """
    trees = []
    for branches in _branches_of_groups(groups, advantages, length, mask_truncated):
        trees.extend(_trees(branches, length, share_prompt))
    placed = _first_fit([tree.size for tree in trees], length)
    num_rows = bucket(max(len(placed), min_rows), row_multiple) if rows is None else rows
    if len(placed) > num_rows:
        raise ValueError(
            f"{len(trees)} trees need {len(placed)} rows of {length} tokens, got rows={num_rows}; "
            f"raise rows to {len(placed)}, raise length, or pack fewer groups"
        )
    shape = (num_rows, length)
    # The fields of TrainBatch are declared as jax arrays; on this side of the crossing they are NumPy.
    arrays: dict[str, Any] = {
        "tokens": np.full(shape, pad_id, np.int32),
        "positions": np.zeros(shape, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "prefix_ids": np.zeros(shape, np.int32),
        "parents": np.full(shape, -1, np.int32),
        "sample_ids": np.full(shape, -1, np.int32),
        "loss_mask": np.zeros(shape, np.float32),
        "advantages": np.zeros(shape, np.float32),
        "behavior_logprobs": np.zeros(shape, np.float32),
        "ref_logprobs": np.zeros(shape, np.float32),
    }
    recorded = [b.experts for t in trees for b in t.branches if b.experts is not None]
    if recorded:
        arrays["experts"] = np.full((*shape, *recorded[0].shape[1:]), -1, np.int16)
    for row, members in enumerate(placed):
        views = {name: array[row] for name, array in arrays.items()}
        _write_row(views, [trees[index] for index in members], share_prompt)
    return TrainBatch(**arrays)


def row_length(groups: Sequence[Group], least: int = 0) -> int:
    """Tokens a row should have: ``least``, or with 0 what the largest group's tree takes, in steps of 128.

    The steps keep the number of compiled lengths small. Never less than the longest trajectory, which cannot be cut.
    """
    trees = [
        group.trajectories[0].turn_starts[0]
        + sum(int(t.response_mask.sum()) for t in group.trajectories)
        for group in groups
    ]
    longest = max(len(t.tokens) for group in groups for t in group.trajectories)
    return max(least or -(-max(trees) // 128) * 128, longest)


def bucket(count: int, multiple: int = 1) -> int:
    """The smallest of ``multiple`` times 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least ``count``.

    Powers of two and the halves between: 2 shapes to compile per doubling, at most a third of the rows empty.
    """
    if multiple < 1:
        raise ValueError(f"row_multiple is {multiple}; expected an integer >= 1")
    units = -(-count // multiple)
    power = 1
    while True:
        for size in (power, power * 3 // 2):
            if size >= units:
                return size * multiple
        power *= 2


def packing_stats(batch: TrainBatch) -> dict[str, float]:
    """How full a batch is.

    Returns:
      ``rows``; ``real_tokens`` (not padding); ``trained_tokens``; ``fill`` (real tokens / tokens computed on, 0 to 1).
    """
    segment_ids = np.asarray(batch.segment_ids)
    real = int(np.count_nonzero(segment_ids))
    return {
        "rows": float(segment_ids.shape[0]),
        "real_tokens": float(real),
        "trained_tokens": float(np.count_nonzero(np.asarray(batch.loss_mask))),
        "fill": real / segment_ids.size if segment_ids.size else 0.0,
    }


def _branches_of_groups(
    groups: Sequence[Group], advantages: Sequence[np.ndarray], length: int, mask_truncated: bool
) -> Iterator[list[_Branch]]:
    """Yields the branches of each group, checked."""
    if len(groups) != len(advantages):
        raise ValueError(
            f"got advantages for {len(advantages)} groups; expected {len(groups)}, one array for each group"
        )
    first_id = 0
    for group, values in zip(groups, advantages, strict=True):
        expected = (len(group.trajectories),)
        if np.shape(values) != expected:
            raise ValueError(
                f"advantages of group {group.key} have shape {np.shape(values)}; expected {expected}, one for each "
                "trajectory, unscored ones included"
            )
        yield [
            _branch(group, index, trajectory, float(values[index]), first_id + index, length)
            for index, trajectory in enumerate(group.trajectories)
            if trajectory.scored
            and np.any(trajectory.response_mask)
            and not (mask_truncated and trajectory.stop_reason == "length")
        ]
        first_id += len(group.trajectories)


def _branch(
    group: Group, index: int, trajectory: Trajectory, advantage: float, sample_id: int, length: int
) -> _Branch:
    sampled = np.flatnonzero(trajectory.response_mask)
    # What follows the last sampled token predicts nothing that is trained on.
    start, end = int(sampled[0]), int(sampled[-1]) + 1
    where = f"trajectory {index} of group {group.key}"
    if end > length:
        raise ValueError(
            f"{where} has {end} tokens; expected at most length={length}; raise length, or lower the "
            "prompt and response budgets (a trajectory is never cut: its end would lose its context)"
        )
    if start == 0:
        raise ValueError(
            f"{where} starts with a sampled token; expected a prompt of at least one token, from which the first "
            "sampled token is predicted; give the prompt a begin-of-text token"
        )
    logprobs = np.where(trajectory.response_mask, trajectory.logprobs, 0.0)[start:end]
    if not (np.isfinite(advantage) and np.all(np.isfinite(logprobs))):
        raise ValueError(
            f"{where} is scored and has advantage {advantage} and log-probabilities from {logprobs.min()} to "
            f"{logprobs.max()}; expected finite numbers; the sampler or the advantages are at fault"
        )
    return _Branch(
        prompt=np.asarray(trajectory.tokens[:start], np.int32),
        tokens=np.asarray(trajectory.tokens[start:end], np.int32),
        response_mask=np.asarray(trajectory.response_mask[start:end], bool),
        logprobs=np.asarray(logprobs, np.float32),
        advantage=advantage,
        sample_id=sample_id,
        experts=None if trajectory.experts is None else trajectory.experts[:end],
    )


def _trees(branches: list[_Branch], length: int, share_prompt: bool) -> list[_Tree]:
    """The fewest trees (first-fit) over the branches of a group, each at most ``length`` tokens."""
    if not share_prompt:
        return [_Tree((branch,)) for branch in branches]
    by_prompt: dict[bytes, list[_Branch]] = {}  # an environment may start samples differently
    for branch in branches:
        by_prompt.setdefault(branch.prompt.tobytes(), []).append(branch)
    trees = []
    for same in by_prompt.values():
        room = length - len(same[0].prompt)
        for members in _first_fit([branch.size for branch in same], room):
            trees.append(_Tree(tuple(same[index] for index in sorted(members))))
    return trees


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of ``sizes`` in bins of ``capacity``: first-fit by decreasing size, equal sizes in order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        target = next((b for b, left in enumerate(room) if left >= sizes[index]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(capacity)
        bins[target].append(index)
        room[target] -= sizes[index]
    return bins


def _write_row(row: dict[str, np.ndarray], trees: Sequence[_Tree], share_prompt: bool) -> None:
    """Writes trees into a row: all prompts, then all responses, so that attention to prompts can end with them."""
    column = segment = 0
    shared: list[tuple[_Tree, int, int]] = []  # with its prompt's segment and end
    for tree in trees:
        segment += 1
        column = _write_prompt(row, tree.branches[0], column, segment)
        if share_prompt:
            shared.append((tree, segment, column))
        else:
            column = _write_branch(row, tree.branches[0], column, segment, 0, column)
    for tree, prompt_segment, prompt_end in shared:
        for branch in tree.branches:
            segment += 1
            column = _write_branch(row, branch, column, segment, prompt_segment, prompt_end)


def _write_prompt(row: dict[str, np.ndarray], branch: _Branch, column: int, segment: int) -> int:
    """Returns the next free column."""
    prompt = branch.prompt
    end = column + len(prompt)
    span = slice(column, end)
    row["tokens"][span] = prompt
    row["positions"][span] = np.arange(len(prompt))
    row["segment_ids"][span] = segment
    row["parents"][span] = np.arange(column - 1, end - 1)
    row["parents"][column] = -1
    if branch.experts is not None:
        row["experts"][span] = branch.experts[: len(prompt)]
    return end


def _write_branch(
    row: dict[str, np.ndarray],
    branch: _Branch,
    column: int,
    segment: int,
    prefix: int,
    prompt_end: int,
) -> int:
    """Returns the next free column."""
    end, prompt_size = column + branch.size, len(branch.prompt)
    span = slice(column, end)
    row["tokens"][span] = branch.tokens
    row["positions"][span] = np.arange(prompt_size, prompt_size + branch.size)
    row["segment_ids"][span] = segment
    row["prefix_ids"][span] = prefix
    row["parents"][span] = np.arange(column - 1, end - 1)
    row["parents"][column] = prompt_end - 1
    row["sample_ids"][span] = branch.sample_id
    row["loss_mask"][span] = branch.response_mask
    row["advantages"][span] = np.where(branch.response_mask, branch.advantage, 0.0)
    row["behavior_logprobs"][span] = branch.logprobs
    if branch.experts is not None:
        row["experts"][span] = branch.experts[prompt_size:]
    return end
