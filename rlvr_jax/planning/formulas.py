"""Each phase by formula: temporaries as XLA has them, least traffic, and the collectives that cannot be avoided.

Temporaries are a handful of terms with factors fitted to compiled programs: gradients, what the backward pass keeps,
scores of attention, the head's working set. Those of XLA:CPU, which tests/planning holds within 20 % of the compiler's,
and those of XLA:TPU, which were compared with the configs that are shipped (docs/planning.md), differ in two factors.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.moe import TOKENS_AT_ONCE
from rlvr_jax.planning.measure import Memory, Phase
from rlvr_jax.planning.traffic import Collective
from rlvr_jax.planning.work import Work

HEAD_CHUNK = 256  # tokens whose logits a device holds at once (policy_head.target_logprobs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the formulas are made of, on one device; bytes where nothing is said.

    Attributes:
      model: all parameters, of a reference or the base of adapters.
      trained, state: parameters that are trained, and with their moments, but for what waits on the host.
      waiting: of the train state, what waits on the host between updates.
      float32: of as many numbers as are trained.
      base: the frozen parameters beside which adapters are trained; 0 without adapters.
      layer, head: parameters of one layer, and of embedding and head, gathered from where they are spread; float32.
      experts: the part of ``layer`` that is experts.
      layers: how many.
      width: of activations, bytes a number.
      rows, length, keys: of a micro-batch; tokens that a device has of each of its rows, and keys that each of them is
        compared with.
      pieces: micro-batches of an update.
      on_cpu: whether XLA:CPU compiles it.
    """

    model: int
    trained: int
    state: int
    base: int
    waiting: int
    float32: int
    layer: float
    experts: float
    head: float
    layers: int
    width: int
    rows: int
    length: int
    keys: int
    pieces: int
    on_cpu: bool

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.length


def rollout(
    model: ModelConfig, work: Work, sizes: Sizes, mesh: dict[str, int], shards: int
) -> Phase:
    """Weights gathered once, the caches, and one prompt's attention at a time; every decode step reads it all."""
    tensor, P = mesh.get("tensor", 1), work.prompt_rows // shards
    S, R = work.prompt_width, key_bucket(work.max_tokens)
    a_key = 2 * model.num_layers * model.num_kv_heads * model.head_dim * sizes.width / tensor
    caches = P * (S + work.group_size * R) * a_key
    weights = sizes.layers * sizes.layer * sizes.width / 4
    gathers = mesh["fsdp"] * mesh["expert"] * mesh["context"] > 1
    scores = P * model.num_heads / tensor * S**2 * 4
    steps = work.max_tokens
    found = _gathers(sizes, mesh, times=1, width=sizes.width) if gathers else []
    if tensor > 1:
        rows = P * work.group_size * model.embed_dim * 4
        found.append(("all-reduce", rows, 2.0 * sizes.layers * steps, tensor))
    found += _exchanges(model, sizes, mesh, P * work.group_size, steps)
    found += _exchanges(model, sizes, mesh, P * S, 1)
    return Phase(
        memory=_memory(
            arguments=sizes.base + sizes.trained + 4 * P * (S + 2) + 4,
            outputs=P * work.group_size * (8 * work.max_tokens + 5),
            aliased=0,
            temporaries=weights * (2 if gathers and sizes.on_cpu else 1)
            + 1.3 * gathers * model.vocab_size * model.embed_dim / tensor * 4
            + 1.4 * caches
            + 4 * scores
            + _experts_work(model, sizes, mesh, P * S),
        ),
        bytes=steps * (weights + sizes.head / 2 + caches) + 4 * scores * sizes.layers,
        collectives=_collectives(found),
        runs=work.rollout_calls,
        **_UNKNOWN,
    )


def scoring(model: ModelConfig, work: Work, sizes: Sizes, mesh: dict[str, int], rows: int) -> Phase:
    """One forward pass over all rows of a minibatch at once."""
    scores, hidden, _, logits = _working_set(model, sizes, mesh, rows)
    found = _gathers(sizes, mesh, times=1, width=sizes.width) + _sums(model, sizes, mesh, rows, 2)
    found += _exchanges(model, sizes, mesh, rows * sizes.length, 1)
    found += _whole_rows(model, sizes, mesh, rows, 1)
    batch = _batch_bytes(work, sizes, rows)
    return Phase(
        memory=_memory(
            arguments=sizes.model + batch,
            outputs=batch,
            aliased=0,
            temporaries=(2.05 if sizes.on_cpu else 1.3) * scores
            + 1.1 * hidden
            + _whole_head(model, mesh) * sizes.width / 4
            + 2.5 * logits
            + _experts_work(model, sizes, mesh, rows * sizes.length),
        ),
        bytes=sizes.layers * (sizes.layer + 4 * scores + 12 * hidden) + 2 * sizes.head,
        collectives=_collectives(found),
        runs=work.minibatches,
        **_UNKNOWN,
    )


def update(
    model: ModelConfig,
    work: Work,
    sizes: Sizes,
    mesh: dict[str, int],
    remat: str,
    all_rows: int,
) -> Phase:
    """Gradients (twice where they are added up), what the backward pass keeps, the head's working set and a layer's."""
    scores, hidden, heads, logits = _working_set(model, sizes, mesh, sizes.rows)
    mlp = sizes.tokens * _mlp_dim(model) / mesh.get("tensor", 1) * 4
    dots = 2 * hidden + heads + 2 * mlp
    a_layer = {"full": 0.0, "dots": dots, "offload": 0.0, "none": 2.5 * dots + 1.75 * scores}[remat]
    kept = sizes.layers * (hidden * sizes.width / 4 + a_layer)
    # The backward pass is in the head first, then in one layer after the other, with the head's gradient beside it.
    in_head = 1.05 * sizes.head + 2.5 * logits
    whole_head = (2.9 if sizes.on_cpu else 2.0) * _whole_head(model, mesh)
    in_layer = (2.0 if remat == "none" else 4.1) * scores + hidden + 0.5 * (heads + sizes.head)
    in_layer += 2 * _experts_work(model, sizes, mesh, sizes.tokens)
    passes = sizes.pieces * (3 if remat == "full" else 2)
    found = _gathers(sizes, mesh, times=passes, width=4)
    layers = float(sizes.pieces * sizes.layers)
    copies = mesh["fsdp"] * mesh["data"] * mesh["context"]
    found += [
        ("all-reduce", sizes.layer - sizes.experts, layers, copies * mesh["expert"]),
        ("all-reduce", sizes.experts, layers, copies),
    ]
    # There and back in the forward pass, its recomputation and the backward pass.
    found += _exchanges(model, sizes, mesh, sizes.tokens, passes)
    found += _whole_rows(model, sizes, mesh, sizes.rows, passes)
    found += _sums(model, sizes, mesh, sizes.rows, 6 * sizes.pieces)
    batch = _batch_bytes(work, sizes, all_rows)
    return Phase(
        memory=_memory(
            arguments=sizes.state + sizes.base + batch + 12,
            outputs=sizes.state + 12,
            aliased=sizes.state + 12,
            # What waits on the host comes here. Gradients have the parameters' dtype, and are added up in float32.
            temporaries=sizes.waiting
            + sizes.trained
            + (sizes.float32 if sizes.pieces > 1 else 0)
            + kept
            + whole_head
            + max(in_head, in_layer),
        ),
        bytes=sizes.pieces
        * (sizes.layers * (4 * sizes.layer + 12 * scores + 40 * hidden) + 6 * sizes.head)
        + 3 * sizes.state,
        collectives=_collectives(found),
        runs=work.updates,
        **_UNKNOWN,
    )


_UNKNOWN: dict[str, Any] = {
    "resident_bytes": 0,
    "flops": 0.0,
    "how": "estimated",
    "compile_s": 0.0,
}


def _working_set(
    model: ModelConfig, sizes: Sizes, mesh: dict[str, int], rows: int
) -> tuple[float, float, float, float]:
    """Float32 bytes of some rows' attention scores, hidden states, heads, and a chunk of logits, on one device."""
    tensor, tokens = mesh.get("tensor", 1), rows * sizes.length
    return (
        rows * model.num_heads / tensor * sizes.length * sizes.keys * 4,
        tokens * model.embed_dim * 4,
        tokens * (model.num_heads + 2 * model.num_kv_heads) / tensor * model.head_dim * 4,
        HEAD_CHUNK * model.vocab_size / tensor * 4,
    )


def _whole_head(model: ModelConfig, mesh: dict[str, int]) -> float:
    """Float32 bytes of the head, which every device of a tensor axis gathers; 0 where it has it in any case."""
    return 4.0 * model.vocab_size * model.embed_dim if mesh.get("tensor", 1) > 1 else 0.0


def _mlp_dim(model: ModelConfig) -> int:
    """Of what a token goes through: its experts' together, with the shared one."""
    return model.mlp_dim * max(1, model.experts_per_token) + model.shared_mlp_dim


def _experts_work(model: ModelConfig, sizes: Sizes, mesh: dict[str, int], tokens: int) -> float:
    """Bytes of the rows that a device's experts see, before and after, and inside, for so many tokens a device."""
    if not model.num_experts:
        return 0.0
    rows = tokens * model.experts_per_token * (mesh["expert"] if tokens <= TOKENS_AT_ONCE else 1)
    inner = 3 * model.mlp_dim / mesh["tensor"] * (4 + sizes.width)
    return rows * (model.embed_dim * (4 + sizes.width) + inner)


def _batch_bytes(work: Work, sizes: Sizes, rows: int) -> int:
    """Bytes of a minibatch on one device."""
    return sum(
        rows * sizes.length * math.prod(leaf.shape[2:]) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(work.batch)
    )


Found = list[tuple[str, float, float, int]]  # kind, bytes, count, group size


def _gathers(sizes: Sizes, mesh: dict[str, int], *, times: int, width: int) -> Found:
    """Of the weights: the layers one by one, embedding and head. All lie on fsdp and context,
    all but the experts on expert too."""
    fsdp, layers = mesh["fsdp"] * mesh["context"], float(times * sizes.layers)
    return [
        ("all-gather", (sizes.layer - sizes.experts) * width / 4, layers, fsdp * mesh["expert"]),
        ("all-gather", sizes.experts * width / 4, layers, fsdp),
        ("all-gather", sizes.head * width / 4, float(times), fsdp * mesh["expert"]),
    ]


def _exchanges(
    model: ModelConfig, sizes: Sizes, mesh: dict[str, int], tokens: int, times: int
) -> Found:
    """Of so many tokens a device over the expert axis: shown to all, their sums sent back in float32."""
    expert, count = mesh["expert"], float(times * sizes.layers)
    everyones = tokens * expert * model.embed_dim
    return [
        ("all-gather", everyones * sizes.width, count, expert),
        ("reduce-scatter", everyones * 4.0, count, expert),
    ]


def _whole_rows(
    model: ModelConfig, sizes: Sizes, mesh: dict[str, int], rows: int, times: int
) -> Found:
    """Of keys and values over the context axis."""
    heads = 2 * model.num_kv_heads / mesh["tensor"] * model.head_dim
    size = rows * sizes.length * mesh["context"] * heads * sizes.width
    return [("all-gather", size, float(times * sizes.layers), mesh["context"])]


def _sums(model: ModelConfig, sizes: Sizes, mesh: dict[str, int], rows: int, times: int) -> Found:
    """Of activations over the tensor axis, two a layer in each pass."""
    hidden = rows * sizes.length * model.embed_dim * 4.0
    return [("all-reduce", hidden, float(times * sizes.layers), mesh.get("tensor", 1))]


def _collectives(found: Found) -> tuple[Collective, ...]:
    # Groups of the tensor axis are neighbours; those of the others reach over the whole mesh at worst.
    return tuple(
        Collective(kind=kind, bytes=round(size), count=count, group_size=group, span=group)
        for kind, size, count, group in found
        if group > 1 and size
    )


def _memory(arguments: int, outputs: int, aliased: int, temporaries: float) -> Memory:
    return Memory(
        arguments=arguments,
        outputs=outputs,
        aliased=aliased,
        temporaries=round(temporaries),
        code=0,
    )
