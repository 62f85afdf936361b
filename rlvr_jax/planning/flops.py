"""FLOPs of a traced program: every matrix product, loops multiplied out.

XLA's own ``cost_analysis`` counts the body of a loop once, so that a model of 80 scanned layers looks like one of a
single layer. The jaxpr knows how often a scan runs. What is not a matrix product is not counted: in a transformer it
costs memory traffic, not arithmetic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core

from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.planning.work import Work


def matmul_flops(jaxpr: Any, *, while_trips: int = 1, expert_axis: int = 1) -> float:
    """FLOPs of all matrix products of a jaxpr, 2 per multiply-add, over all devices.

    Args:
      jaxpr: as of ``jax.jit(f).trace(...).jaxpr``.
      while_trips: how often loops run whose count is not in the program (the decode loop ends early if all samples
        do).
      expert_axis: devices that a program's experts are divided over; each sees the tokens of all, and multiplies those
        of its own experts: on average, their share.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (_, rhs_contract), (_, rhs_batch) = params["dimension_numbers"]
            total += _product_flops(equation, {*rhs_contract, *rhs_batch})
        elif name == "ragged_dot_general":
            numbers = params["ragged_dot_dimension_numbers"]
            (_, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
            used = {*rhs_contract, *rhs_batch, *numbers.rhs_group_dimensions}
            total += _product_flops(equation, used) / expert_axis
        elif name == "cond":
            total += max(
                matmul_flops(branch.jaxpr, while_trips=while_trips, expert_axis=expert_axis)
                for branch in params["branches"]
            )
        else:
            times = {"scan": params.get("length", 1), "while": while_trips}.get(name, 1)
            if (
                name == "shard_map"
            ):  # its jaxpr is that of one device, but for axes that stay the partitioner's
                axes = params.get("newly_manual_axes", params["mesh"].axis_names)
                times = math.prod(params["mesh"].shape[axis] for axis in axes)
                expert_axis = params["mesh"].shape["expert"]
            total += times * sum(
                matmul_flops(inner, while_trips=while_trips, expert_axis=expert_axis)
                for inner in _inner(params)
            )
    return total


def _product_flops(equation: Any, used: set[int]) -> float:
    """2 x size of the left side x size of the right side's own dimensions."""
    lhs, rhs = (operand.aval.shape for operand in equation.invars[:2])
    return 2.0 * math.prod(lhs) * math.prod(n for i, n in enumerate(rhs) if i not in used)


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, jax.extend.core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, jax.extend.core.Jaxpr):
                yield part


@functools.lru_cache(maxsize=16)
def _active_kernels(model: ModelConfig) -> float:
    """Parameters of all layers' kernels that a token meets."""
    return sum(
        math.prod(leaf.shape)
        * (model.experts_per_token / model.num_experts if leaf.ndim == 4 else 1)
        for name in model.stacks
        for leaf in jax.tree.leaves(abstract_params(model)[name])
        if leaf.ndim > 2
    )


def forward_flops(model: ModelConfig, *, tokens: int, keys: int) -> float:
    """Of all layers for ``tokens`` queries that look at ``keys`` keys each, by formula; the head is not counted.

    Kernels take 2 FLOPs a parameter and token (of a token's own experts only), attention 4 N H a key.
    """
    attention = 2 * keys * model.num_heads * (2 * model.head_dim + 1)
    return tokens * (2.0 * _active_kernels(model) + model.num_layers * attention)


def head_flops(model: ModelConfig, *, tokens: int) -> float:
    """Of the logits of ``tokens`` tokens."""
    return 2.0 * tokens * model.vocab_size * model.embed_dim


def step_flops(model: ModelConfig, work: Work, remat: str) -> dict[str, float]:
    """FLOPs of matrix products of one run of each phase, over all devices, by formula."""
    B, T = work.batch.tokens.shape
    keys = T + (T if work.bounds.prefix_width is None else work.bounds.prefix_width)
    S, R = work.prompt_width, key_bucket(work.max_tokens)
    samples = work.prompt_rows * work.group_size
    layers = forward_flops(model, tokens=B * T, keys=keys)
    attention = layers - forward_flops(model, tokens=B * T, keys=0)
    head = head_flops(model, tokens=B * work.bounds.num_targets)
    again = {"full": layers, "dots": attention, "offload": attention, "none": 0.0}[remat]
    return {
        "rollout": forward_flops(model, tokens=work.prompt_rows * S, keys=2 * S)
        + forward_flops(model, tokens=samples * (work.max_tokens - 1), keys=S + R)
        + head_flops(model, tokens=samples * work.max_tokens),
        "reference": layers + head,
        "update": 3 * layers + again + 4 * head,
    }
