"""The sampler as a pure function: what is under the padding, what is computed once, what the arrays hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.decoder import Decoder
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rollout.generate import generate

LENGTHS = np.array([5, 16, 0, 1], np.int32)


@pytest.fixture(scope="module")
def run(config):
    return jax.jit(
        functools.partial(
            generate,
            config=config,
            num_samples=3,
            max_tokens=6,
            transform=LogitTransform(),
            stop_token_ids=tuple(range(0, 320, 4)),
        )
    )


def prompts_with(padding, vocab_size):
    prompts = np.random.default_rng(0).integers(0, vocab_size, (4, 16)).astype(np.int32)
    return np.where(np.arange(16) < LENGTHS[:, None], prompts, padding)


def test_ids_under_padding_change_no_bit(run, config, params):
    ids = np.arange(4, dtype=np.uint32)
    one, other = (
        run(params, prompts_with(padding, config.vocab_size), LENGTHS, ids, np.uint32(0))
        for padding in (0, 77)
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def test_arrays_are_zero_past_the_end_and_in_rows_that_only_fill(run, config, params):
    ids = np.arange(4, dtype=np.uint32)
    prompts = prompts_with(0, config.vocab_size)
    tokens, logprobs, lengths, stopped = map(
        np.asarray, run(params, prompts, LENGTHS, ids, np.uint32(0))[:4]
    )
    assert tokens.shape == logprobs.shape == (4, 3, 6)
    assert not tokens[2].any() and not lengths[2].any() and not stopped[2].any()
    real = [0, 1, 3]
    assert np.all(lengths[real] >= 1)
    inside = np.arange(6) < lengths[..., None]
    assert np.all((logprobs < 0) == inside)
    assert not tokens[~inside].any()
    # A sample stops at its first stop id, and only there.
    is_stop = (tokens % 4 == 0) & inside
    last = np.arange(6) == lengths[..., None] - 1
    np.testing.assert_array_equal(is_stop.any(-1), stopped)
    assert not np.any(is_stop & ~last)
    assert np.all(lengths[real][~stopped[real]] == 6)
    assert stopped[real].any() and not stopped[real].all()


def test_a_prompt_is_computed_once_and_its_cache_is_shared_by_its_samples(
    config, params, monkeypatch
):
    """16 samples of 2 prompts of 48 tokens: 96 tokens of prefill, 32 a decode step, no copy of the prompts' keys."""
    P, G, S = 2, 16, 48
    scanned, unrolled = [], []
    forward, decode = Decoder.routed, Decoder.unrolled

    def spy_forward(self, tokens, *args, **kwargs):
        scanned.append(tokens.shape)
        return forward(self, tokens, *args, **kwargs)

    def spy_decode(self, layers, tokens, *args, **kwargs):
        unrolled.append(tokens.shape)
        return decode(self, layers, tokens, *args, **kwargs)

    monkeypatch.setattr(Decoder, "routed", spy_forward)
    monkeypatch.setattr(Decoder, "unrolled", spy_decode)
    program = functools.partial(
        generate,
        config=config,
        num_samples=G,
        max_tokens=16,
        transform=LogitTransform(),
        stop_token_ids=(),
    )
    jaxpr = jax.make_jaxpr(program)(
        params,
        jnp.zeros((P, S), jnp.int32),
        jnp.full((P,), S),
        jnp.zeros((P,), jnp.uint32),
        jnp.uint32(0),
    )
    assert scanned == [(P * S,)]
    assert set(unrolled) == {(P * G,)}
    repeated = P * G * config.num_kv_heads * S * config.head_dim
    if key_bucket(16) == 16:  # else a sample's own keys are as many as its prompt's
        assert max(sizes_in(jaxpr.jaxpr)) < repeated


def sizes_in(jaxpr):
    """Number of elements of every value a jaxpr computes, inner ones included."""
    for equation in jaxpr.eqns:
        yield from (np.prod(value.aval.shape, dtype=int) for value in equation.outvars)
        for parameter in equation.params.values():
            for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from sizes_in(inner)
