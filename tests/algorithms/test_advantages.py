import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlvr_jax.algorithms.advantages import ESTIMATORS, group_advantages, zero_variance

GROUP_BASELINES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
EPSILON = 1e-6
advantages_jit = jax.jit(group_advantages, static_argnames="estimator")


def reference(scores: np.ndarray, mask: np.ndarray, estimator: str) -> np.ndarray:
    """The definitions, in float64, one group at a time."""
    scores, result = scores.astype(np.float64), np.zeros(scores.shape)
    if estimator == "reinforce_plus_plus":
        live = scores[mask]
        result[mask] = (live - live.mean()) / (live.std(ddof=1) + EPSILON)
        return result
    for p in range(len(scores)):
        live = scores[p][mask[p]]
        if len(live) < 2 or np.ptp(live) <= 1e-6:
            continue
        values = live - live.mean()
        if estimator == "grpo":
            values = values / (live.std(ddof=1) + EPSILON)
        if estimator == "rloo":
            values = np.array([r - np.delete(live, i).mean() for i, r in enumerate(live)])
        result[p][mask[p]] = values
    if estimator == "reinforce_plus_plus_baseline":
        result[mask] /= np.sqrt((result[mask] ** 2).sum() / (mask.sum() - 1)) + EPSILON
    return result


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
@pytest.mark.parametrize("seed", range(3))
def test_estimators_match_their_definition(estimator, seed):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(2, 3, (6, 5)), rng.random((6, 5)) < 0.7
    scores[0], mask[1], mask[2] = 1.7, False, [True] + [False] * 4
    expected = reference(scores, mask, estimator)
    result = advantages_jit(np.where(mask, scores, np.nan), mask, estimator=estimator)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_literal_numbers():
    scores, mask = np.array([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]), np.ones((2, 4))
    as_list = functools.partial(group_advantages, scores, mask, epsilon=0.0)
    half, std, std4 = 0.5, 3**-0.5, 0.5
    np.testing.assert_allclose(as_list(estimator="dr_grpo")[0], [half, -half, -half, half])
    np.testing.assert_allclose(as_list(estimator="grpo")[0], np.array([1, -1, -1, 1]) * half / std)
    np.testing.assert_allclose(
        as_list(estimator="grpo")[1], np.array([3, -1, -1, -1]) / 4 / std4, rtol=1e-6
    )
    np.testing.assert_allclose(as_list(estimator="rloo")[1], [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_seven_equal_float32_scores_have_advantage_exactly_zero(estimator):
    # Their float32 standard deviation is 8e-9, not 0: dividing by it would give -0.0074.
    scores, mask = np.full((1, 7), 0.1, np.float32), np.ones((1, 7), bool)
    assert zero_variance(scores, mask).tolist() == [True]
    assert np.all(np.asarray(group_advantages(scores, mask, estimator=estimator)) == 0.0)


def test_zero_variance_uses_a_tolerance_on_the_raw_score():
    scores = np.array(
        [[0.3, 0.1 + 0.2, 0.3], [0.0, 1e-3, 0.0], [0.0, 1.0, 0.0], [3e6, 3e6 + 1, 3e6]]
    )
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 1]])
    assert zero_variance(scores, mask).tolist() == [True, False, True, True]
    assert zero_variance(scores, mask, 1e-2).tolist() == [True, True, True, True]


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_unscored_samples_get_zero_and_do_not_count(estimator):
    scores = np.array([[1.0, 0.0, 0.5, np.nan], [np.nan, 0.2, 0.9, 0.1]])
    result = np.asarray(group_advantages(scores, np.isfinite(scores), estimator=estimator))
    assert result[0, 3] == 0.0 and result[1, 0] == 0.0
    trimmed = np.stack([scores[0, :3], scores[1, 1:]])
    alone = np.asarray(group_advantages(trimmed, np.ones((2, 3)), estimator=estimator))
    np.testing.assert_allclose(result[0, :3], alone[0], rtol=1e-6)
    np.testing.assert_allclose(result[1, 1:], alone[1], rtol=1e-6)


@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_a_batch_without_any_score_has_advantages_zero(estimator):
    result = group_advantages(np.full((2, 3), np.nan), np.zeros((2, 3)), estimator=estimator)
    assert np.all(np.asarray(result) == 0.0)


@pytest.mark.parametrize("estimator", GROUP_BASELINES)
def test_a_group_of_one_raises_when_traced(estimator):
    one = jax.ShapeDtypeStruct((4, 1), jnp.float32)
    with pytest.raises(ValueError, match=r"group of 1 .* raise group_size"):
        jax.eval_shape(functools.partial(group_advantages, estimator=estimator), one, one)


def test_reinforce_plus_plus_takes_groups_of_one():
    result = group_advantages([[1.0], [0.0]], [[1], [1]], estimator="reinforce_plus_plus")
    np.testing.assert_allclose(result, [[0.5**0.5], [-(0.5**0.5)]], rtol=1e-5)


def test_an_unknown_estimator_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown adv_estimator 'grop'; did you mean 'grpo'.*rloo"
    ):
        group_advantages(np.zeros((1, 2)), np.ones((1, 2)), estimator="grop")


def test_misshapen_input_raises():
    with pytest.raises(AssertionError):
        group_advantages(np.zeros(4), np.ones(4), estimator="grpo")
    with pytest.raises(AssertionError):
        group_advantages(np.zeros((2, 4)), np.ones((2, 3)), estimator="grpo")


score_arrays = hnp.arrays(np.float32, (4, 6), elements=st.floats(-10, 10, width=32))
mask_arrays = hnp.arrays(np.bool_, (4, 6))


@settings(max_examples=60, deadline=None)
@given(score_arrays, mask_arrays)
def test_group_advantages_sum_to_zero(scores, mask):
    for estimator in ("dr_grpo", "rloo", "grpo"):
        result = np.asarray(advantages_jit(scores, mask, estimator=estimator))
        assert np.all(result[~mask] == 0.0)
        np.testing.assert_allclose(result.sum(axis=1), 0.0, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(score_arrays, mask_arrays, st.permutations(range(6)))
def test_the_order_of_samples_does_not_matter(scores, mask, order):
    for estimator in ESTIMATORS:
        plain = np.asarray(advantages_jit(scores, mask, estimator=estimator))
        moved = advantages_jit(scores[:, order], mask[:, order], estimator=estimator)
        np.testing.assert_allclose(moved, plain[:, order], rtol=1e-3, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(score_arrays, mask_arrays)
def test_better_scores_never_get_lower_advantages(scores, mask):
    for estimator in ESTIMATORS:
        result = np.asarray(advantages_jit(scores, mask, estimator=estimator))
        for row, live, values in zip(scores, mask, result, strict=True):
            ordered = values[live][np.argsort(row[live], kind="stable")]
            assert np.all(np.diff(ordered) >= -1e-5)
