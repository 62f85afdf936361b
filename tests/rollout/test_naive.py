"""The engine against the slow reference: the same tokens, greedy and sampled, and the same log-probabilities."""

import dataclasses

import jax
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.models.decoder import init_params
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.rollout.naive import NaiveSampler
from rlvr_jax.types import Sampler, SamplingParams

from .conftest import letters

IDS = [7, 2**32 - 1, 0, 12]


def prompts_of(lengths, vocab_size, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def assert_same(ours, expected):
    for group, expected_group in zip(ours, expected, strict=True):
        for one, other in zip(group, expected_group, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.stop_reason == other.stop_reason
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


@pytest.fixture(scope="module")
def naive(config, params):
    return NaiveSampler(config, params, decode=letters)


def test_greedy_tokens_equal(engine, naive, config):
    arguments = {
        "params": SamplingParams(temperature=0.0, max_tokens=12),
        "num_samples": 1,
        "request_ids": IDS,
    }
    prompts = prompts_of([1, 9, 16, 33], config.vocab_size)
    ours = engine.sample(prompts, **arguments)
    assert_same(ours, naive.sample(prompts, **arguments))
    assert len({tuple(group[0].tokens) for group in ours}) == 4


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=12, seed=3, stop=("aa", "bc", "ed", "lg", "xf")),
        SamplingParams(
            temperature=0.7,
            top_k=40,
            top_p=0.9,
            max_tokens=12,
            seed=4,
            stop_token_ids=tuple(range(0, 320, 8)),
        ),
    ],
    ids=["plain with stop strings", "truncated with stop ids"],
)
def test_sampled_tokens_equal(engine, naive, config, sampling):
    arguments = {"params": sampling, "num_samples": 4, "request_ids": IDS}
    prompts = prompts_of([1, 9, 16, 3], config.vocab_size)
    ours = engine.sample(prompts, **arguments)
    assert_same(ours, naive.sample(prompts, **arguments))
    assert {one.stop_reason for group in ours for one in group} == {"stop", "length"}


@pytest.mark.slow
def test_tokens_equal_on_another_model(config):
    """One layer, one kv head, tied embeddings, another RoPE base."""
    config = dataclasses.replace(
        config, num_layers=1, num_kv_heads=1, rope_theta=500.0, tie_embeddings=True
    )
    params = init_params(config, jax.random.key(5))
    params["embed"]["embedding"] *= 15
    engine = Engine(config, params, mesh=make_mesh(devices=jax.devices()[:1]))
    arguments = {
        "params": SamplingParams(max_tokens=8, seed=1),
        "num_samples": 2,
        "request_ids": [1, 2],
    }
    prompts = prompts_of([3, 8], config.vocab_size, seed=1)
    assert_same(
        engine.sample(prompts, **arguments),
        NaiveSampler(config, params).sample(prompts, **arguments),
    )


def test_both_are_samplers(engine, naive):
    assert isinstance(engine, Sampler)
    assert isinstance(naive, Sampler)
