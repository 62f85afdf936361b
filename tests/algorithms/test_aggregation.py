import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlvr_jax.algorithms.aggregation import (
    LOSS_AGG_MODES,
    loss_weights,
    spread_by_sample,
    sum_by_sample,
)

BUDGET = 10
weights_jit = jax.jit(
    functools.partial(loss_weights, max_response_length=BUDGET),
    static_argnames=("mode", "num_samples"),
)


def reference_loss(losses, mask, ids, mode):
    """The loss by its definition, sequence by sequence, in float64."""
    sequences = [losses[(ids == i) & mask].astype(np.float64) for i in range(ids.max() + 1)]
    sequences = [s for s in sequences if len(s)]
    if not sequences:
        return 0.0
    match mode:
        case "token-mean":
            return np.concatenate(sequences).mean()
        case "seq-mean-token-sum":
            return np.mean([s.sum() for s in sequences])
        case "seq-mean-token-mean":
            return np.mean([s.mean() for s in sequences])
        case "seq-mean-token-sum-norm":
            return np.mean([s.sum() / BUDGET for s in sequences])


def random_batch(seed, rows=4, length=12, num_samples=6):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(-1, num_samples, (rows, length)), axis=1)
    mask = (rng.random((rows, length)) < 0.6) & (ids >= 0)
    return rng.normal(size=(rows, length)), mask, ids


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("seed", range(3))
def test_weighted_sum_is_the_loss_of_the_definition(mode, seed):
    losses, mask, ids = random_batch(seed)
    weights = np.asarray(weights_jit(mask, ids, mode=mode, num_samples=6))
    assert weights.dtype == np.float32
    assert np.all(weights[~mask] == 0.0)
    expected = reference_loss(losses, mask, ids, mode)
    np.testing.assert_allclose((weights * losses).sum(), expected, rtol=1e-5, atol=1e-6)


def test_token_mean_over_two_ranks_divides_by_the_global_count():
    # Rank 0 holds one token with loss 4, rank 1 three with loss 1: 1.75, and not the mean of the means, 2.5.
    losses = np.array([[4.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    mask, ids = np.array([[1, 0, 0], [1, 1, 1]]), np.array([[0, -1, -1], [1, 1, 1]])
    weights = np.asarray(loss_weights(mask, ids, mode="token-mean", num_samples=2))
    assert (weights * losses).sum() == 1.75


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_fully_masked_batch_has_weights_zero(mode):
    weights = weights_jit(np.zeros((2, 4)), np.full((2, 4), -1), mode=mode, num_samples=3)
    assert np.all(np.asarray(weights) == 0.0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_fully_masked_sequence_does_not_count(mode):
    mask = np.array([[1, 1, 0, 0], [0, 0, 0, 0]])
    ids = np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    both = weights_jit(mask, ids, mode=mode, num_samples=2)
    alone = weights_jit(mask[:1], ids[:1], mode=mode, num_samples=1)
    np.testing.assert_array_equal(both[:1], alone)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_inserted_masked_tokens_change_no_weight(mode):
    _, mask, ids = random_batch(0)
    weights = np.asarray(weights_jit(mask, ids, mode=mode, num_samples=6))
    wide_mask, wide_ids = np.insert(mask, 5, False, axis=1), np.insert(ids, 5, ids[:, 5], axis=1)
    wide = np.asarray(weights_jit(wide_mask, wide_ids, mode=mode, num_samples=6))
    np.testing.assert_array_equal(np.delete(wide, 5, axis=1), weights)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_num_samples_is_only_an_upper_bound(mode):
    _, mask, ids = random_batch(1)
    few = weights_jit(mask, ids, mode=mode, num_samples=6)
    np.testing.assert_array_equal(weights_jit(mask, ids, mode=mode, num_samples=50), few)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.bool_, (3, 8)), hnp.arrays(np.int32, (3, 8), elements=st.integers(0, 4)))
def test_mean_modes_have_weights_that_sum_to_one(mask, ids):
    for mode in ("token-mean", "seq-mean-token-mean"):
        total = np.asarray(weights_jit(mask, ids, mode=mode, num_samples=5)).sum()
        np.testing.assert_allclose(total, float(mask.any()), rtol=1e-5)


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"loss_agg_mode is 'mean'; expected one of token-mean"):
        loss_weights(np.ones((1, 2)), np.zeros((1, 2), int), mode="mean", num_samples=1)


@pytest.mark.parametrize("budget", [None, 0])
def test_the_normalised_mode_needs_its_constant(budget):
    with pytest.raises(ValueError, match=r"max_response_length is .*divides by it"):
        loss_weights(
            np.ones((1, 2)),
            np.zeros((1, 2), int),
            mode="seq-mean-token-sum-norm",
            num_samples=1,
            max_response_length=budget,
        )


def test_sum_by_sample_ignores_what_is_masked():
    values = np.array([[1.0, np.nan, 2.0, np.inf]])
    sums = sum_by_sample(values, [[1, 0, 1, 0]], [[0, 0, 2, -1]], num_samples=3)
    assert sums.tolist() == [1.0, 0.0, 2.0]


def test_spread_by_sample_gives_each_token_the_value_of_its_sequence():
    spread = spread_by_sample([5.0, 7.0], [[1, 1, 0, 1]], [[0, 1, 1, 1]])
    assert spread.tolist() == [[5.0, 7.0, 0.0, 7.0]]
    assert spread_by_sample([5.0, np.nan], [[1, 0]], [[0, -1]]).tolist() == [[5.0, 0.0]]
