import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.importance import LOG_RATIO_BOUND, log_ratio, rollout_importance


def test_log_ratio_is_a_difference_within_bounds():
    ratio = log_ratio([[-1.0, -1.0, -90.0, 0.0]], [[-3.0, 0.0, 0.0, -90.0]], [[1, 0, 1, 1]])
    assert ratio.tolist() == [[2.0, 0.0, -LOG_RATIO_BOUND, LOG_RATIO_BOUND]]


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_masked_values_reach_neither_the_ratio_nor_its_gradient(bad):
    policy, old = jnp.array([[-1.0, bad]]), jnp.array([[-1.0, bad]])
    mask = jnp.array([[1, 0]])
    value, grad = jax.value_and_grad(lambda p: jnp.sum(jnp.exp(log_ratio(p, old, mask))))(policy)
    assert value == 2.0  # exp(0) at both: the caller masks the sum
    assert grad.tolist() == [[1.0, 0.0]]


OLD = np.log([[0.5, 0.5, 0.4, 0.9, 0.2]])
BEHAVIOR = np.log([[0.25, 0.5, 0.5, 0.1, 0.4]])
MASK = np.array([[1, 1, 0, 1, 1]])
SEGMENTS = np.array([[2, 2, 2, 3, 3]])


def test_token_weights_are_ratios_up_to_the_threshold():
    weights = rollout_importance(OLD, BEHAVIOR, MASK, SEGMENTS, level="token", threshold=3.0)
    np.testing.assert_allclose(weights, [[2.0, 1.0, 0.0, 3.0, 0.5]], rtol=1e-6)


def test_sequence_weights_are_products_up_to_the_threshold():
    weights = rollout_importance(OLD, BEHAVIOR, MASK, SEGMENTS, level="sequence", threshold=4.0)
    np.testing.assert_allclose(weights, [[2.0, 2.0, 0.0, 4.0, 4.0]], rtol=1e-6)


def test_a_long_sequence_overflows_nothing():
    old, behavior = np.zeros((1, 64)), np.full((1, 64), -15.0)
    args = (np.ones((1, 64)), np.ones((1, 64), int))
    up = rollout_importance(old, behavior, *args, level="sequence", threshold=np.inf)
    down = rollout_importance(behavior, old, *args, level="sequence", threshold=np.inf)
    np.testing.assert_allclose(up, np.full((1, 64), np.exp(LOG_RATIO_BOUND)), rtol=1e-5)
    np.testing.assert_allclose(down, np.full((1, 64), np.exp(-LOG_RATIO_BOUND)), rtol=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_no_gradient_flows_through_the_weights(level):
    def total(old):
        weights = rollout_importance(old, BEHAVIOR, MASK, SEGMENTS, level=level, threshold=9.0)
        return jnp.sum(weights)

    assert np.all(np.asarray(jax.grad(total)(jnp.asarray(OLD, jnp.float32))) == 0.0)


def test_on_policy_weights_average_to_one():
    # E_behavior[old / behavior] = 1: enumerated over a vocabulary of four.
    behavior, old = np.array([[0.1, 0.2, 0.3, 0.4]]), np.array([[0.4, 0.1, 0.25, 0.25]])
    ones = np.ones((1, 4))
    weights = rollout_importance(
        np.log(old), np.log(behavior), ones, ones.astype(int), level="token", threshold=np.inf
    )
    np.testing.assert_allclose((behavior * np.asarray(weights)).sum(), 1.0, rtol=1e-6)


def test_an_unknown_level_raises():
    with pytest.raises(ValueError, match=r"rollout_is level is 'batch'; expected 'token' or"):
        rollout_importance(OLD, BEHAVIOR, MASK, SEGMENTS, level="batch", threshold=2.0)
