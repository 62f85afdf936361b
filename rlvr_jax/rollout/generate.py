"""The sampler as one pure function: prefill each prompt once, then decode its G samples together.

A prompt's keys and values are computed once and shared by its samples: every decode step attends to two stretches,
the prompt's (one per group) and the sample's own. All samples of a call are at the same response index, so their cache
is written with one slice and never shifted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlvr_jax.distributed.sharding import constrain
from rlvr_jax.models.attention import KeyValues, key_bucket, row_masks
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, bind, by_head
from rlvr_jax.models.layers import AttentionRule
from rlvr_jax.models.policy_head import LogitTransform, transform_logits
from rlvr_jax.rollout.sampling import draw, sample_keys, uniforms


class Rollout(NamedTuple):
    """Samples of one call, as arrays.

    tokens: int32[P, G, R], zero past the end; logprobs: float32[P, G, R], nats, zero past the end;
    lengths: int32[P, G], sampled tokens, the stop id included; stopped: bool[P, G], ended on a stop id;
    prompt_experts: int16[P, S, L, k] and experts: int16[P, G, R, L, k], where each layer sent the tokens of prompts and
    samples, -1 for those that never went through the model; None unless asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    stopped: jax.Array
    prompt_experts: jax.Array | None = None
    experts: jax.Array | None = None


def generate(
    params: Params,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    request_ids: jax.Array,
    seed: jax.Array,
    *,
    config: ModelConfig,
    num_samples: int,
    max_tokens: int,
    transform: LogitTransform,
    stop_token_ids: tuple[int, ...],
    dtype: Any = jnp.float32,
    record_experts: bool = False,
) -> Rollout:
    """Samples ``num_samples`` continuations of every prompt.

    Args:
      params: the decoder's.
      prompts: int32[P, S], right-padded (the ids under padding change nothing); S should be a ``key_bucket``.
      prompt_lengths: int32[P]; 0 marks a row that only fills the batch.
      request_ids: uint32[P].
      seed: uint32[].
      max_tokens: R, the most tokens a sample may have.
      stop_token_ids: ids that end a sample.
      dtype: of activations and cache.
      record_experts: return where the tokens of a mixture of experts went.
    """
    P, S = prompts.shape
    G, R = num_samples, key_bucket(max_tokens)
    M, num_routed = P * G, len(config.stacks["layers"])
    greedy = transform.temperature == 0
    model = bind(config, params)
    keys = sample_keys(seed, request_ids, G)
    lengths = jnp.repeat(prompt_lengths, G)
    stops = jnp.asarray(stop_token_ids, jnp.int32)

    # Prefill: one row a prompt.
    columns = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (P, S))
    inside = (columns < prompt_lengths[:, None]).astype(jnp.int32)
    masks = row_masks(inside, jnp.zeros_like(inside))

    def attend_prompt(
        q: jax.Array, k: jax.Array, v: jax.Array, _: Any, rule: AttentionRule
    ) -> tuple[jax.Array, Any]:
        k, v = by_head(k, P), by_head(v, P)
        return rule.attention(
            q, [KeyValues(k, v, rule.near(mask, columns, columns)) for mask in masks]
        ), (k, v)

    hidden, prompt_caches, chosen = model.routed(
        prompts.reshape(-1),
        columns.reshape(-1),
        attend_prompt,
        observe=lambda routing: routing.experts if record_experts else None,
        dtype=dtype,
    )
    prompt_experts = None
    if record_experts:  # [L, P * S, k]
        chosen = jnp.moveaxis(chosen, 0, 1).reshape(P, S, num_routed, -1)
        prompt_experts = _kept(chosen, inside > 0)
    last = jnp.maximum(prompt_lengths - 1, 0)
    hidden = jnp.take_along_axis(hidden.reshape(P, S, -1), last[:, None, None], axis=1)[:, 0]
    hidden = constrain(jnp.repeat(hidden, G, axis=0), "tokens", None)
    head = model.gathered_head()

    def next_tokens(hidden: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = transform_logits(model.logits(hidden, head), transform)
        return draw(logits, uniforms(keys, lengths + index), greedy=greedy)

    def is_stop(tokens: jax.Array) -> jax.Array:
        return (tokens[:, None] == stops[None, :]).any(-1)

    # Decode. The layers are unrolled; their weights are sliced and cast once, here, outside the loop.
    layers = model.unstack(dtype)
    prompt_mask = jnp.broadcast_to(inside.astype(bool)[:, None, :], (P, G, S))
    prompt_keys = [
        KeyValues(prompt_caches[0][i], prompt_caches[1][i], prompt_mask)
        for i in range(config.num_layers)
    ]
    own_positions = lengths[:, None] + jnp.arange(R)[None, :]
    empty = jnp.zeros((M, config.num_kv_heads, R, config.head_dim), dtype)

    def step(carry: dict[str, Any]) -> dict[str, Any]:
        index = carry["index"]
        at = lengths + index - 1
        own_mask = jnp.broadcast_to((jnp.arange(R) < index)[None, None, :], (M, 1, R))

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, rule: AttentionRule
        ) -> tuple[jax.Array, Any]:
            prompt, (cache_k, cache_v) = cache
            cache_k = jax.lax.dynamic_update_slice_in_dim(cache_k, k[:, :, None], index - 1, 2)
            cache_v = jax.lax.dynamic_update_slice_in_dim(cache_v, v[:, :, None], index - 1, 2)
            own = KeyValues(cache_k, cache_v, rule.near(own_mask, at[:, None], own_positions))
            seen = rule.near(prompt.mask, at.reshape(P, G), columns)
            return rule.attention(q, [prompt._replace(mask=seen), own]), (cache_k, cache_v)

        last_tokens = jax.lax.dynamic_index_in_dim(carry["tokens"], index - 1, 1, keepdims=False)
        caches = list(zip(prompt_keys, carry["caches"], strict=True))
        hidden, caches, routings = model.unrolled(
            layers, last_tokens, at, attend, caches, dtype=dtype
        )
        experts = carry["experts"]
        if record_experts:
            chosen = jnp.stack(
                [routing.experts for routing in routings if routing is not None], 1
            )  # [M, L, k]
            experts = jax.lax.dynamic_update_slice_in_dim(
                experts, _kept(chosen, ~carry["done"])[:, None], index - 1, 1
            )
        tokens, logprobs = next_tokens(hidden, index)
        carry = carry | {"experts": experts}
        return _record(carry, tokens, logprobs, is_stop(tokens), caches)

    tokens, logprobs = next_tokens(hidden, jnp.int32(0))
    start = {
        "index": jnp.int32(0),
        "tokens": jnp.zeros((M, R), jnp.int32),
        "logprobs": jnp.zeros((M, R), jnp.float32),
        "lengths": jnp.zeros((M,), jnp.int32),
        "done": lengths == 0,
        "stopped": jnp.zeros((M,), bool),
        "caches": [(empty, empty)] * config.num_layers,
        "experts": jnp.full((M, R, num_routed, config.experts_per_token), -1, jnp.int16)
        if record_experts
        else None,
    }
    carry = _record(start, tokens, logprobs, is_stop(tokens), start["caches"])
    carry = jax.lax.while_loop(lambda c: (c["index"] < max_tokens) & ~c["done"].all(), step, carry)
    return Rollout(
        tokens=carry["tokens"].reshape(P, G, R)[:, :, :max_tokens],
        logprobs=carry["logprobs"].reshape(P, G, R)[:, :, :max_tokens],
        lengths=carry["lengths"].reshape(P, G),
        stopped=carry["stopped"].reshape(P, G),
        prompt_experts=prompt_experts,
        experts=carry["experts"].reshape(P, G, R, num_routed, -1)[:, :, :max_tokens]
        if record_experts
        else None,
    )


def _kept(experts: jax.Array, real: jax.Array) -> jax.Array:
    """int16[..., L, k]: the experts of real tokens, -1 for the others."""
    return jnp.where(real[..., None, None], experts, -1).astype(jnp.int16)


def _record(
    carry: dict[str, Any], tokens: jax.Array, logprobs: jax.Array, stop: jax.Array, caches: Any
) -> dict[str, Any]:
    """Writes one token of every live sample at response index ``carry['index']``."""
    live, index = ~carry["done"], carry["index"]

    def put(buffer: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(live, value, jnp.zeros_like(value))
        return jax.lax.dynamic_update_slice_in_dim(buffer, value[:, None], index, 1)

    return {
        "index": index + 1,
        "tokens": put(carry["tokens"], tokens),
        "logprobs": put(carry["logprobs"], logprobs),
        "lengths": carry["lengths"] + live,
        "done": carry["done"] | stop,
        "stopped": carry["stopped"] | (stop & live),
        "caches": caches,
        "experts": carry["experts"],
    }
