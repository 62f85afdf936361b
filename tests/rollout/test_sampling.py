"""Drawing: the right distribution, never an impossible token, keys that depend on nothing but their names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.models.policy_head import LogitTransform, transform_logits
from rlvr_jax.rollout.sampling import draw, sample_keys, uniforms

draw_sampled = jax.jit(functools.partial(draw, greedy=False))
draw_greedy = jax.jit(functools.partial(draw, greedy=True))
BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    top = wide.max(-1, keepdims=True)
    return wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))


def test_4000_draws_follow_the_softmax():
    """Chi-square, V=50, keys as the engine makes them."""
    V, M = 50, 4000
    logits = np.random.default_rng(0).normal(size=V).astype(np.float32) * 1.5
    keys = sample_keys(7, jnp.arange(M // 4, dtype=jnp.uint32), 4)
    tokens, logprobs = draw_sampled(
        jnp.broadcast_to(logits, (M, V)), uniforms(keys, jnp.full((M,), 3))
    )
    expected = np.exp(log_softmax(logits))
    counts = np.bincount(tokens, minlength=V)
    assert scipy.stats.chisquare(counts, expected * M).pvalue > 1e-4
    # The test can fail: the same counts do not follow the softmax at another temperature.
    hotter = np.exp(log_softmax(logits / 1.3))
    assert scipy.stats.chisquare(counts, hotter * M).pvalue < 1e-4
    np.testing.assert_allclose(logprobs, log_softmax(logits)[tokens], atol=1e-5)


def test_a_draw_is_the_inverse_of_the_cumulative_distribution():
    """Over several blocks of the vocabulary, and by the definition in float64."""
    V, M = 1000, 512
    rng = np.random.default_rng(1)
    logits = rng.normal(size=V).astype(np.float32)
    uniform = rng.uniform(size=M).astype(np.float32)
    tokens, logprobs = draw_sampled(jnp.broadcast_to(logits, (M, V)), uniform)
    ends = np.cumsum(np.exp(log_softmax(logits)))
    # Where float32 sums could decide either way, both neighbours are right.
    low, high = np.searchsorted(ends, uniform - 1e-5), np.searchsorted(ends, uniform + 1e-5)
    assert np.all((low <= tokens) & (tokens <= high))
    assert np.mean(low == high) > 0.9
    np.testing.assert_allclose(logprobs, log_softmax(logits)[tokens], atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    masked=st.floats(0, 0.999),
    scale=st.sampled_from([0.0, 1.0, 30.0, 300.0]),
    uniform=st.one_of(
        st.sampled_from([0.0, float(BELOW_ONE), 0.5, 1e-30]),
        st.floats(0, float(BELOW_ONE), width=32),
    ),
)
def test_a_token_of_probability_zero_is_never_drawn(seed, masked, scale, uniform):
    V = 600
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(1, V)) * scale).astype(np.float32)
    logits[:, rng.uniform(size=V) < masked] = -1e30
    logits[0, rng.integers(V)] = 0.0
    tokens, logprobs = draw_sampled(logits, np.array([uniform], np.float32))
    token = int(tokens[0])
    assert 0 <= token < V
    assert np.exp(np.float32(logits[0, token] - logits[0].max())) > 0
    np.testing.assert_allclose(logprobs[0], log_softmax(logits)[0, token], atol=1e-4, rtol=1e-6)


def test_both_ends_of_the_uniform_give_the_first_and_the_last_possible_token():
    logits = np.full((2, 700), -1e30, np.float32)
    logits[:, [3, 300, 650]] = [0.0, 1.0, -1.0]
    tokens, _ = draw_sampled(logits, np.array([0.0, BELOW_ONE], np.float32))
    assert tokens.tolist() == [3, 650]


def test_greedy_takes_the_lowest_id_among_the_most_likely():
    logits = np.random.default_rng(0).normal(size=(3, 700)).astype(np.float32)
    logits[0, [600, 17, 303]] = 9.0
    logits[1] = 0.0
    tokens, logprobs = draw_greedy(logits, np.full(3, 0.9, np.float32))
    assert tokens.tolist() == [17, 0, int(np.argmax(logits[2]))]
    np.testing.assert_allclose(logprobs, log_softmax(logits)[np.arange(3), tokens], atol=1e-5)


def test_keys_are_those_of_the_protocol_whatever_they_are_batched_with():
    ids = np.array([5, 2**32 - 1, 0], np.uint32)
    together = jax.random.key_data(sample_keys(3, jnp.asarray(ids), 4)).reshape(3, 4, 2)
    for row, request_id in enumerate(ids):
        alone = jax.random.key_data(sample_keys(3, jnp.asarray(ids[row : row + 1]), 2))
        np.testing.assert_array_equal(alone, together[row, :2])
        by_hand = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), request_id), 1)
        np.testing.assert_array_equal(jax.random.key_data(by_hand), together[row, 1])
    assert len(np.unique(together.reshape(-1, 2), axis=0)) == 12
    assert not np.array_equal(jax.random.key_data(sample_keys(4, jnp.asarray(ids), 4)), together)


def test_a_uniform_depends_on_key_and_position_only():
    keys = sample_keys(0, jnp.arange(4, dtype=jnp.uint32), 2)
    at = jnp.arange(8)
    together = uniforms(keys, at)
    assert np.all((together >= 0) & (together < 1))
    assert len(np.unique(together)) == 8
    np.testing.assert_array_equal(uniforms(keys[3:5], at[3:5]), together[3:5])
    assert not np.any(np.isclose(uniforms(keys, at + 1), together))


TRANSFORMS = [
    LogitTransform(temperature=0.7),
    LogitTransform(top_k=5),
    LogitTransform(top_p=0.8),
    LogitTransform(min_p=0.1),
    LogitTransform(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02),
    LogitTransform(top_k=1),
    LogitTransform(top_p=1e-6),
    LogitTransform(top_k=1000),
]


def reference_transform(logits: np.ndarray, t: LogitTransform) -> np.ndarray:
    """float64 log-probabilities of one row, -inf where truncated: sort, cut, renormalise."""
    logits = logits.astype(np.float64) / t.temperature
    alive = np.ones(len(logits), bool)
    if t.top_k:
        alive[np.argsort(-logits)[t.top_k :]] = False
    if t.top_p < 1:
        order = np.argsort(-np.where(alive, logits, -np.inf))
        probs = np.exp(log_softmax(np.where(alive, logits, -1e30)))[order]
        alive[order[np.cumsum(probs) - probs >= t.top_p]] = False
    if t.min_p:
        alive &= np.exp(logits - logits.max()) >= t.min_p
    return np.where(alive, log_softmax(np.where(alive, logits, -1e30)), -np.inf)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_truncation_leaves_the_right_tokens_and_renormalises(transform):
    logits = np.random.default_rng(2).normal(size=(4, 100)).astype(np.float32) * 2
    ours = np.asarray(jax.jit(functools.partial(transform_logits, transform=transform))(logits))
    expected = np.stack([reference_transform(row, transform) for row in logits])
    np.testing.assert_array_equal(ours > -1e29, np.isfinite(expected))
    alive = np.isfinite(expected)
    np.testing.assert_allclose(log_softmax(ours)[alive], expected[alive], atol=1e-5)
    # And what is drawn from it is scored under it.
    tokens, logprobs = draw_sampled(ours, np.array([0.0, 0.3, 0.6, BELOW_ONE], np.float32))
    np.testing.assert_allclose(logprobs, expected[np.arange(4), tokens], atol=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_truncation_agrees_with_transformers(transform):
    torch = pytest.importorskip("torch", reason="pip install 'rlvr_jax[parity]'")
    process = pytest.importorskip(
        "transformers.generation.logits_process", reason="pip install 'rlvr_jax[parity]'"
    )
    logits = np.random.default_rng(3).normal(size=(4, 100)).astype(np.float32) * 2
    steps = [process.TemperatureLogitsWarper(transform.temperature)]
    if transform.top_k:
        steps.append(process.TopKLogitsWarper(transform.top_k))
    if transform.top_p < 1:
        steps.append(process.TopPLogitsWarper(transform.top_p))
    if transform.min_p:
        steps.append(process.MinPLogitsWarper(transform.min_p))
    theirs = torch.from_numpy(logits)
    for step in steps:
        theirs = step(None, theirs)
    ours = np.asarray(transform_logits(jnp.asarray(logits), transform))
    alive = np.isfinite(theirs.numpy())
    np.testing.assert_array_equal(ours > -1e29, alive)
    np.testing.assert_allclose(ours[alive], theirs.numpy()[alive], rtol=1e-6)


def test_a_token_that_is_kept_has_a_finite_logprob_and_changes_no_other_truncation():
    logits = jnp.asarray([[0.0, 1.0, 2.0, 3.0]])
    transform = LogitTransform(top_k=2)
    without = np.asarray(transform_logits(logits, transform))
    kept = np.asarray(transform_logits(logits, transform, keep=jnp.array([0])))
    assert (without > -1e29).tolist() == [[False, False, True, True]]
    assert (kept > -1e29).tolist() == [[True, False, True, True]]
    allowed = np.asarray(transform_logits(logits, transform, keep=jnp.array([3])))
    np.testing.assert_array_equal(allowed, without)
