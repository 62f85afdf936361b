"""What one step of a config has to do, in array shapes: made with the trainer's own packing and bucketing.

The plan is for the worst case: every response runs to ``rollout.max_tokens``, and no group is dropped.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from rlvr_jax.data.packing import bucket, pack_groups, row_length
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.policy_head import RowBounds
from rlvr_jax.rollout.engine import MIN_ROWS_OF_A_CPU, prompt_bucket
from rlvr_jax.training.rl import split
from rlvr_jax.training.step import row_bounds
from rlvr_jax.types import Group, Reward, Task, TrainBatch, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Shapes and counts of one step.

    Attributes:
      prompt_rows, prompt_width: of an engine call, int32[prompt_rows, prompt_width].
      group_size, max_tokens: samples of a prompt, and their most tokens.
      rollout_calls: engine calls of a step.
      batch: ShapeDtypeStructs [B, T] of a minibatch, without shardings.
      bounds, num_samples: static bounds of that batch.
      minibatches: batches of a step; each gets reference log-probabilities once.
      updates: of a step.
      sampled_tokens: of a step.
    """

    prompt_rows: int
    prompt_width: int
    group_size: int
    max_tokens: int
    rollout_calls: int
    batch: TrainBatch
    bounds: RowBounds
    num_samples: int
    minibatches: int
    updates: int
    sampled_tokens: int


def measure_work(
    config: ConfigDict,
    model: ModelConfig,
    *,
    prompt_tokens: int,
    num_shards: int,
    num_column_shards: int = 1,
    on_cpu: bool,
) -> Work:
    """The work of one step.

    Args:
      config: of a reinforcement learning run.
      model: shape of its model; a mixture's replayed experts are part of a batch.
      prompt_tokens: of the longest prompt.
      num_shards: over how many shards the mesh spreads rows.
      num_column_shards: over how many it spreads the tokens of a row; the sampler's rows are spread over both.
      on_cpu: whether the run itself is on CPU devices, where engine and trainer fill up small batches.
    """
    G, P, R = (
        config.rollout.group_size,
        config.tasks.tasks_per_step,
        config.rollout.max_tokens,
    )
    num_groups = max(map(len, split(range(P), config.train.num_minibatches)))
    needed, fields, bounds = _packed(
        num_groups, G, prompt_tokens, R, config.train.row_length, num_column_shards
    )
    least = (2 if on_cpu and not config.train.micro_rows else 1) * num_shards
    rows = bucket(max(needed, least), config.train.micro_rows or num_shards)
    per_call = min(P, max(1, config.rollout.max_rows // G))  # prompts that run_groups hands over
    prompt_rows = prompt_bucket(
        per_call,
        G,
        max_rows=config.rollout.max_rows,
        num_shards=num_shards * num_column_shards,
        least_rows=MIN_ROWS_OF_A_CPU if on_cpu else 1,
    )
    batch: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), fields)
    if config.rollout.router_replay:
        num_routed = len(model.stacks["layers"])
        chosen = (*batch.tokens.shape, num_routed, model.experts_per_token)
        experts: Any = jax.ShapeDtypeStruct(chosen, jnp.int16)
        batch = dataclasses.replace(batch, experts=experts)
    minibatches = min(config.train.num_minibatches, P)
    return Work(
        prompt_rows=prompt_rows,
        prompt_width=key_bucket(prompt_tokens),
        group_size=G,
        max_tokens=R,
        rollout_calls=-(-P // min(per_call, prompt_rows)),
        batch=batch,
        bounds=bounds,
        num_samples=P * G,
        minibatches=minibatches,
        updates=minibatches * config.train.num_epochs,
        sampled_tokens=P * G * R,
    )


@functools.lru_cache(maxsize=64)  # a search asks for the same packing again and again
def _packed(
    num_groups: int,
    group_size: int,
    prompt_tokens: int,
    max_tokens: int,
    length: int,
    num_column_shards: int,
) -> tuple[int, Any, RowBounds]:
    """Rows that a minibatch needs, ShapeDtypeStructs of its fields, and their bounds."""
    groups = [_group(index, group_size, prompt_tokens, max_tokens) for index in range(num_groups)]
    batch = pack_groups(
        groups,
        [np.zeros(group_size, np.float32)] * num_groups,
        length=key_bucket(row_length(groups, length), num_column_shards),
    )
    needed = int(np.count_nonzero(np.asarray(batch.segment_ids).any(1)))
    fields = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return needed, fields, row_bounds(batch)


def _group(index: int, group_size: int, prompt_tokens: int, max_tokens: int) -> Group:
    """A group of responses that all run out of tokens."""
    size = prompt_tokens + max_tokens
    trajectory = Trajectory(
        tokens=np.zeros(size, np.int32),
        response_mask=np.arange(size) >= prompt_tokens,
        logprobs=np.zeros(size, np.float32),
        turn_starts=(prompt_tokens,),
        rewards=(Reward(name="plan", value=0.0),),
        stop_reason="stop",
        policy_version=(0, 0),
    )
    task = Task(id=str(index), domain="plan", prompt=(), answer=None)
    return Group(task=task, trajectories=(trajectory,) * group_size, step=0)
