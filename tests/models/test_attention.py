"""Attention over stretches of keys: against float64, however the keys are cut into stretches; masks."""

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.attention import (
    KeyValues,
    grouped_query_attention,
    key_bucket,
    row_masks,
)

B, K, R, S, H = 2, 2, 3, 16, 8
attention = jax.jit(grouped_query_attention)


def random_inputs(seed=0, Q=S):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B * Q, K * R, H)).astype(np.float32)
    k, v = (rng.normal(size=(B, K, S, H)).astype(np.float32) for _ in "kv")
    mask = rng.uniform(size=(B, Q, S)) < 0.5
    mask[..., 0] = True
    return q, k, v, mask


def plain_attention(q, k, v, mask):
    """float64, one query and one head at a time; rows of the mask that are all false are left out (NaN)."""
    out = np.full(q.shape, np.nan)
    Q = mask.shape[1]
    for i in range(q.shape[0]):
        b, query = divmod(i, Q)
        for head in range(K * R):
            keys = k[b, head // R][mask[b, query]].astype(np.float64)
            values = v[b, head // R][mask[b, query]].astype(np.float64)
            scores = keys @ q[i, head].astype(np.float64) / np.sqrt(H)
            if len(scores):
                weights = np.exp(scores - scores.max())
                out[i, head] = weights @ values / weights.sum()
    return out


def test_equals_softmax_attention_in_float64():
    q, k, v, mask = random_inputs()
    ours = attention(q, [KeyValues(k, v, mask)])
    np.testing.assert_allclose(ours, plain_attention(q, k, v, mask), atol=1e-5)


def test_one_softmax_runs_across_all_stretches():
    q, k, v, mask = random_inputs()
    whole = attention(q, [KeyValues(k, v, mask)])
    cut = [
        KeyValues(k[:, :, part], v[:, :, part], mask[:, :, part])
        for part in (slice(0, 3), slice(3, 4), slice(4, 16))
    ]
    np.testing.assert_allclose(attention(q, cut), whole, atol=1e-5)
    np.testing.assert_allclose(attention(q, cut[::-1]), whole, atol=1e-5)


def test_stretches_may_share_their_keys_among_different_numbers_of_queries():
    """The sampler's case: a prompt for G queries, and each query's own keys."""
    G = S
    q, k, v, mask = random_inputs()
    rng = np.random.default_rng(1)
    own_k, own_v = (rng.normal(size=(B * G, K, 4, H)).astype(np.float32) for _ in "kv")
    own_mask = rng.uniform(size=(B * G, 1, 4)) < 0.5
    ours = attention(q, [KeyValues(k, v, mask), KeyValues(own_k, own_v, own_mask)])
    for i in range(B * G):
        b, query = divmod(i, G)
        expected = attention(
            np.repeat(q[i : i + 1], B, 0),
            [
                KeyValues(
                    np.repeat(np.concatenate([k[b], own_k[i]], 1)[None], B, 0),
                    np.repeat(np.concatenate([v[b], own_v[i]], 1)[None], B, 0),
                    np.repeat(np.concatenate([mask[b, query], own_mask[i, 0]])[None, None], B, 0),
                )
            ],
        )[0]
        np.testing.assert_allclose(ours[i], expected, atol=1e-5)


def test_what_is_masked_changes_no_bit_and_stays_out_of_the_gradient():
    q, k, v, mask = random_inputs()
    mask[:, :, 10:] = False
    ours = attention(q, [KeyValues(k, v, mask)])
    noisy_k, noisy_v = k.copy(), v.copy()
    noisy_k[:, :, 10:], noisy_v[:, :, 10:] = 1e4, -1e4
    np.testing.assert_array_equal(attention(q, [KeyValues(noisy_k, noisy_v, mask)]), ours)
    gradient = jax.jit(jax.grad(lambda k: attention(q, [KeyValues(k, v, mask)]).sum()))(k)
    assert not np.any(gradient[:, :, 10:])
    assert np.any(gradient[:, :, :10])


def test_a_query_with_nothing_to_attend_to_stays_finite_with_a_finite_gradient():
    q, k, v, mask = random_inputs()
    mask[0, 3] = False

    def total(q):
        return jnp.sum(attention(q, [KeyValues(k, v, mask)]) ** 2)

    assert np.all(np.isfinite(attention(q, [KeyValues(k, v, mask)])))
    assert np.all(np.isfinite(jax.grad(total)(q)))


def test_large_scores_do_not_overflow():
    q, k, v, mask = random_inputs()
    ours = attention(q * 1e3, [KeyValues(k * 1e3, v, mask)])
    assert np.all(np.isfinite(ours))


def test_scores_and_sums_are_float32_in_bfloat16():
    q, k, v, mask = random_inputs()
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    ours = attention(q, [KeyValues(k, v, mask)])
    assert ours.dtype == jnp.bfloat16
    expected = plain_attention(*(np.asarray(x, np.float32) for x in (q, k, v)), mask)
    rounded = np.asarray(jnp.asarray(expected, jnp.float32).astype(jnp.bfloat16), np.float32)
    # One rounding, at the end: off by one unit in the last place where it is on the edge, else equal.
    np.testing.assert_allclose(np.asarray(ours, np.float32), rounded, rtol=2**-7, atol=1e-6)
    assert np.mean(np.asarray(ours, np.float32) == rounded) > 0.99


def test_row_masks_of_a_tree():
    """A prompt of two tokens (segment 1), two responses (2, 3), then another row's tree (4), then padding."""
    segments = jnp.array([[1, 1, 2, 2, 3, 4, 0]])
    prefixes = jnp.array([[0, 0, 1, 1, 1, 0, 0]])
    prefix, own = (np.asarray(mask[0], int) for mask in row_masks(segments, prefixes))
    assert prefix.tolist() == [
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]
    assert own.tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 0],
    ]


def test_key_buckets_are_odd_multiples_of_16():
    """All of them before jax 0.12; there two take another kernel."""
    left_out = {16, 80} if jax.__version_info__ >= (0, 12) else set()
    sizes = [size for size in range(16, 500, 32) if size not in left_out]
    for length in range(400):
        assert key_bucket(length) == next(size for size in sizes if size >= length)
