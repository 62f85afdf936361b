"""The engine and the trainer agree on models of every make: windows, caps, norms, biases, experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig, RopeScaling
from rlvr_jax.models.decoder import STRICT, attend_rows, bind, init_params
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.rollout.naive import NaiveSampler
from rlvr_jax.types import Completion, SamplingParams

BASE = ModelConfig(
    vocab_size=128,
    num_layers=3,
    embed_dim=32,
    mlp_dim=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=False,
)
# Windows are shorter than prompts, and than responses.
MODELS = {
    "gemma2-like": dataclasses.replace(
        BASE, local_layers=(0, 2), sliding_window=5, post_norm=True, norm_plus_one=True, activation="gelu_tanh",
        embed_scale=32**0.5, attn_scale_dim=12, attn_softcap=4.0, final_softcap=6.0,
    ),
    "gemma3-like": dataclasses.replace(
        BASE, local_layers=(0, 1), sliding_window=6, local_rope_theta=100.0, qk_norm="head", post_norm=True,
        rope_scaling=RopeScaling(kind="linear", factor=8.0),
    ),
    "qwen3-like": dataclasses.replace(BASE, qk_norm="head", qkv_bias=True, num_layers=2),
    "mistral-like": dataclasses.replace(BASE, local_layers=(0, 1, 2), sliding_window=4),
    "smollm3-like": dataclasses.replace(BASE, nope_layers=(1,), partial_rotary_factor=0.5),
    "olmo2-like": dataclasses.replace(BASE, qk_norm="all", pre_norm=False, post_norm=True),
    "mixture": dataclasses.replace(BASE, num_experts=5, experts_per_token=2),
    "deepseek-like": dataclasses.replace(
        BASE, num_experts=6, experts_per_token=2, router_scores="sigmoid", router_bias=True, shared_mlp_dim=20,
        shared_gate=True, num_dense_layers=1, dense_mlp_dim=40, local_layers=(1,), sliding_window=5,
    ),
}  # fmt: skip
PROMPT_LENGTHS = (3, 9, 14)
MAX_TOKENS, NUM_SAMPLES = 11, 3


def random_params(config: ModelConfig) -> Any:
    """Larger than at the start, norms and biases too, so that nothing is near enough to zero to be missed."""
    rng = np.random.default_rng(0)
    params = init_params(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf + rng.normal(0, 0.1, leaf.shape), params)
    params["embed"]["embedding"] *= 10
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def sample(sampler: Any) -> list[list[Completion]]:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, BASE.vocab_size, size).tolist() for size in PROMPT_LENGTHS]
    settings = SamplingParams(max_tokens=MAX_TOKENS, seed=3)
    return sampler.sample(
        prompts, params=settings, num_samples=NUM_SAMPLES, request_ids=range(len(prompts))
    )


def tree_logprobs(config: ModelConfig, params: Any, found: list[list[Completion]]) -> np.ndarray:
    """Log-probabilities of all sampled tokens, float32[P, G, R], from rows of a prompt and its samples."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, BASE.vocab_size, size) for size in PROMPT_LENGTHS]
    prompt_width, width = key_bucket(max(PROMPT_LENGTHS)), key_bucket(MAX_TOKENS)
    T = prompt_width + NUM_SAMPLES * width
    shape = (len(prompts), T)
    tokens, positions, segments, prefixes = (np.zeros(shape, np.int32) for _ in range(4))
    for row, (prompt, samples) in enumerate(zip(prompts, found, strict=True)):
        size = len(prompt)
        tokens[row, :size], positions[row, :size], segments[row, :size] = prompt, range(size), 1
        for index, completion in enumerate(samples):
            start, count = prompt_width + index * width, len(completion.tokens)
            here = slice(start, start + count)
            tokens[row, here], positions[row, here] = (
                completion.tokens,
                size + np.arange(count),
            )
            segments[row, here], prefixes[row, here] = index + 2, 1

    def logprobs(params: Any) -> jax.Array:
        decoder = bind(config, params)
        hidden, _ = decoder(
            jnp.asarray(tokens.reshape(-1)),
            jnp.asarray(positions.reshape(-1)),
            attend_rows(jnp.asarray(segments), jnp.asarray(prefixes), prefix_width=prompt_width),
        )
        return jax.nn.log_softmax(decoder.logits(hidden)).reshape(*shape, -1)

    table = np.asarray(jax.jit(logprobs, compiler_options=STRICT)(params))
    out = np.zeros((len(prompts), NUM_SAMPLES, MAX_TOKENS), np.float32)
    for row, samples in enumerate(found):
        for index, completion in enumerate(samples):
            start = prompt_width + index * width
            parents = [PROMPT_LENGTHS[row] - 1, *range(start, start + len(completion.tokens) - 1)]
            out[row, index] = table[row, parents, completion.tokens]
    return out


FAST = {
    "gemma2-like",
    "gemma3-like",
    "deepseek-like",
}  # between them, every feature that sampler and trainer do apart


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=() if m in FAST else pytest.mark.slow) for m in MODELS]
)
def test_logprobs_of_the_engine_are_those_of_a_packed_forward_pass(name: str) -> None:
    config = MODELS[name]
    params = random_params(config)
    mesh = make_mesh(devices=jax.devices()[:1])
    found = sample(Engine(config, params, mesh=mesh))
    recorded = np.stack([[c.logprobs for c in samples] for samples in found])
    assert recorded.shape == (3, NUM_SAMPLES, MAX_TOKENS) and recorded.std() > 0.3
    np.testing.assert_allclose(recorded, tree_logprobs(config, params, found), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2-like", "gemma3-like"])
def test_the_engine_samples_what_the_naive_sampler_does(name: str) -> None:
    config = MODELS[name]
    params = random_params(config)
    mesh = make_mesh(devices=jax.devices()[:1])
    for ours, naive in zip(
        sample(Engine(config, params, mesh=mesh)), sample(NaiveSampler(config, params)), strict=True
    ):
        for a, b in zip(ours, naive, strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
