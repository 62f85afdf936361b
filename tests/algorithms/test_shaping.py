import numpy as np
import pytest

from rlvr_jax.algorithms.shaping import filter_groups, overlong_penalty


def test_overlong_penalty_is_linear_from_the_start_of_the_buffer():
    penalty = overlong_penalty(
        [10, 20, 22, 25, 30], max_response_length=25, buffer_length=5, penalty_factor=0.5
    )
    np.testing.assert_allclose(penalty, [0.0, 0.0, -0.2, -0.5, -1.0], rtol=1e-6)


@pytest.mark.parametrize("buffer_length", [0, -1, 26])
def test_a_buffer_that_cannot_be_raises(buffer_length):
    with pytest.raises(
        ValueError, match=r"buffer_length is .*; expected 1 to .*25.*overlong_buffer"
    ):
        overlong_penalty([1], max_response_length=25, buffer_length=buffer_length)


def test_groups_are_filtered_on_the_raw_score_not_on_the_shaped_one():
    raw, mask = np.zeros((1, 3)), np.ones((1, 3))
    penalty = overlong_penalty(
        [[10, 22, 30]], max_response_length=25, buffer_length=5, penalty_factor=0.5
    )
    shaped = raw + np.asarray(penalty)
    np.testing.assert_allclose(shaped, [[0.0, -0.2, -1.0]], rtol=1e-6)
    assert filter_groups(raw, mask).tolist() == [False]
    assert filter_groups(shaped, mask).tolist() == [True]  # what filtering too late would do


def test_groups_with_fewer_than_two_verdicts_are_filtered():
    scores = np.array([[1.0, np.nan, np.nan], [1.0, 0.0, np.nan], [np.nan] * 3])
    assert filter_groups(scores, np.isfinite(scores)).tolist() == [False, True, False]


def test_seven_equal_float32_scores_are_filtered():
    assert filter_groups(np.full((1, 7), 0.1, np.float32), np.ones((1, 7))).tolist() == [False]
