"""Groups as Arrow tables: one row a trajectory, its task repeated beside it, and back without loss.

Token columns are ``list<int32>``, ``list<bool>`` and ``list<float>``; ``answer`` and ``metadata``
are JSON; ``score`` is derived (null where a verdict is missing) so that a query need not add up
rewards. Consecutive rows with the same ``group`` are one group.

Text is stored as it is, but for lone surrogates, which UTF-8 cannot hold: each becomes U+E000 and
four hex digits (and so does U+E000 itself), which reading undoes.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlvr_jax.types import JSON, Group, Message, Reward, Task, Trajectory

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_REWARD = pa.struct(
    [
        ("name", pa.string()),
        ("value", pa.float64()),
        ("weight", pa.float64()),
        ("status", pa.string()),
        ("detail", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("group", pa.int32()),
        ("step", pa.int64()),
        ("domain", pa.string()),
        ("task_id", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("answer", pa.string()),
        ("metadata", pa.string()),
        ("sample_index", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("turn_starts", pa.list_(pa.int32())),
        ("rewards", pa.list_(_REWARD)),
        ("score", pa.float64()),
        ("stop_reason", pa.string()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("text", pa.string()),
        ("error", pa.string()),
    ]
)
_TOKEN_DTYPES = {"tokens": np.int32, "response_mask": np.bool_, "logprobs": np.float32}
_ESCAPE = "\ue000"


def groups_to_table(groups: Sequence[Group]) -> pa.Table:
    """Returns a table of ``SCHEMA``, one row a trajectory.

    Raises:
      ValueError: a group has no trajectories, or an array is not of the dtype and length ``Trajectory`` states.
      TypeError: an answer or metadata is not JSON.
    """
    rows = [
        (i, group, trajectory)
        for i, group in enumerate(groups)
        for trajectory in group.trajectories
    ]
    if len({i for i, _, _ in rows}) != len(groups):
        raise ValueError(
            "a group has no trajectories; expected at least one, there is nothing to store"
        )
    for _, group, trajectory in rows:
        _check_arrays(group, trajectory)
    trajectories = [trajectory for _, _, trajectory in rows]
    tasks = [(_task_columns(group.task), len(group.trajectories)) for group in groups]
    ragged = {
        name: _ragged([getattr(t, name) for t in trajectories], dtype)
        for name, dtype in _TOKEN_DTYPES.items()
    }
    columns: dict[str, Any] = {
        **ragged,
        "group": [i for i, _, _ in rows],
        "step": [group.step for _, group, _ in rows],
        **{
            name: [task[name] for task, count in tasks for _ in range(count)]
            for name in ("domain", "task_id", "prompt", "answer", "metadata")
        },
        "sample_index": [t.sample_index for t in trajectories],
        "turn_starts": [t.turn_starts for t in trajectories],
        "rewards": [[_reward_columns(r) for r in t.rewards] for t in trajectories],
        "score": [None if math.isnan(t.score) else t.score for t in trajectories],
        "stop_reason": [t.stop_reason for t in trajectories],
        "policy_version_min": [t.policy_version[0] for t in trajectories],
        "policy_version_max": [t.policy_version[1] for t in trajectories],
        "text": [_encode_text(t.text) for t in trajectories],
        "error": [None if t.error is None else _encode_text(t.error) for t in trajectories],
    }
    arrays = [
        columns[f.name] if f.name in ragged else pa.array(columns[f.name], f.type) for f in SCHEMA
    ]
    return pa.table(arrays, schema=SCHEMA)


def table_to_groups(table: pa.Table) -> list[Group]:
    """Inverse of ``groups_to_table``; JSON arrays come back as lists, whatever sequence they were."""
    ragged = {name: _unragged(table[name], dtype) for name, dtype in _TOKEN_DTYPES.items()}
    rows = table.drop_columns([*ragged, "score"]).to_pylist()
    groups: list[Group] = []
    for _, indices in itertools.groupby(range(len(rows)), key=lambda i: rows[i]["group"]):
        members = list(indices)
        first = rows[members[0]]
        trajectories = tuple(
            _row_to_trajectory(rows[i], {name: arrays[i] for name, arrays in ragged.items()})
            for i in members
        )
        groups.append(
            Group(task=_row_to_task(first), trajectories=trajectories, step=first["step"])
        )
    return groups


def serialize_groups(groups: Sequence[Group]) -> bytes:
    """Groups as the bytes of a Parquet file, for a checkpoint's blobs."""
    sink = io.BytesIO()
    pq.write_table(groups_to_table(groups), sink, compression="zstd")
    return sink.getvalue()


def deserialize_groups(content: bytes) -> list[Group]:
    """Inverse of ``serialize_groups``."""
    return table_to_groups(pq.read_table(io.BytesIO(content)))


def _check_arrays(group: Group, trajectory: Trajectory) -> None:
    length = len(trajectory.tokens)
    for name, dtype in _TOKEN_DTYPES.items():
        array = getattr(trajectory, name)
        if array.dtype != dtype or array.shape != (length,):
            raise ValueError(
                f"task {group.key}, sample {trajectory.sample_index}: {name} is "
                f"{array.dtype}{list(array.shape)}; expected {np.dtype(dtype)}[{length}]"
            )


def _task_columns(task: Task) -> dict[str, Any]:
    return {
        "domain": _encode_text(task.domain),
        "task_id": _encode_text(task.id),
        "prompt": [{"role": m.role, "content": _encode_text(m.content)} for m in task.prompt],
        "answer": _encode_json(task.answer),
        "metadata": _encode_json(dict(task.metadata)),
    }


def _row_to_task(row: dict[str, Any]) -> Task:
    return Task(
        id=_decode_text(row["task_id"]),
        domain=_decode_text(row["domain"]),
        prompt=tuple(
            Message(role=m["role"], content=_decode_text(m["content"])) for m in row["prompt"]
        ),
        answer=json.loads(_decode_text(row["answer"])),
        metadata=json.loads(_decode_text(row["metadata"])),
    )


def _reward_columns(reward: Reward) -> dict[str, Any]:
    return {
        "name": reward.name,
        "value": float(reward.value),
        "weight": float(reward.weight),
        "status": reward.status,
        "detail": _encode_text(reward.detail),
    }


def _row_to_trajectory(row: dict[str, Any], arrays: dict[str, np.ndarray]) -> Trajectory:
    rewards = tuple(
        Reward(**{**reward, "detail": _decode_text(reward["detail"])}) for reward in row["rewards"]
    )
    return Trajectory(
        **arrays,
        turn_starts=tuple(row["turn_starts"]),
        rewards=rewards,
        stop_reason=row["stop_reason"],
        policy_version=(row["policy_version_min"], row["policy_version_max"]),
        sample_index=row["sample_index"],
        text=_decode_text(row["text"]),
        error=None if row["error"] is None else _decode_text(row["error"]),
    )


def _ragged(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> pa.ListArray:
    offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(
        offsets, pa.array(np.concatenate([np.empty(0, dtype), *arrays]))
    )


def _unragged(column: pa.ChunkedArray, dtype: type[np.generic]) -> list[np.ndarray]:
    arrays: list[np.ndarray] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        spans = itertools.pairwise(chunk.offsets.to_numpy())
        arrays += [values[start:end].astype(dtype) for start, end in spans]  # copies, so writable
    return arrays


def _encode_text(text: str) -> str:
    return re.sub("[\ud800-\udfff\ue000]", lambda match: f"{_ESCAPE}{ord(match[0]):04x}", text)


def _decode_text(text: str) -> str:
    return re.sub(f"{_ESCAPE}([0-9a-f]{{4}})", lambda match: chr(int(match[1], 16)), text)


def _encode_json(value: JSON) -> str:
    def plain(item: Any) -> JSON:
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, np.ndarray):
            return item.tolist()
        raise TypeError(
            f"a task holds {item!r} of type {type(item).__name__}; "
            "expected JSON values in answer and metadata"
        )

    # Characters as they are: two lone surrogates written as \u escapes would come back as one pair.
    return _encode_text(json.dumps(value, default=plain, ensure_ascii=False))
