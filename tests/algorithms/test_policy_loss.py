import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.policy_loss import ppo_clip_loss

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
ppo = functools.partial(ppo_clip_loss, **CLIP)


def one_token(advantage, ratio, **changes):
    args = (
        jnp.log(jnp.array([[ratio]])),
        jnp.zeros((1, 1)),
        jnp.array([[advantage]]),
        jnp.ones((1, 1)),
    )
    return ppo_clip_loss(*args, **(CLIP | changes))


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.0, 1.2, -1.2),
        (1.0, 1.5, -1.28),  # clipped above
        (1.0, 0.1, -0.1),  # moving back is never clipped
        (-1.0, 1.0, 1.0),
        (-1.0, 0.5, 0.8),  # clipped below
        (-1.0, 2.0, 2.0),
        (-1.0, 10.0, 3.0),  # the dual clip
        (0.0, 10.0, 0.0),
    ],
)
def test_literal_losses(advantage, ratio, expected):
    np.testing.assert_allclose(one_token(advantage, ratio).loss, [[expected]], rtol=1e-5)


def test_the_dual_clip_constant_reaches_the_loss():
    np.testing.assert_allclose(one_token(-1.0, 10.0, clip_ratio_c=5.0).loss, [[5.0]], rtol=1e-5)
    np.testing.assert_allclose(one_token(-1.0, 10.0, clip_ratio_c=None).loss, [[10.0]], rtol=1e-5)


def test_loss_and_flags_match_the_definition():
    rng = np.random.default_rng(0)
    policy, old = rng.normal(-2, 1, (2, 8, 50))
    advantages, mask = rng.normal(size=(8, 50)), rng.random((8, 50)) < 0.8
    ratio = np.exp(policy - old)
    loss = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    dual = (advantages < 0) & (-advantages * 3.0 < loss)
    loss = np.where(dual, -advantages * 3.0, loss)
    clipped = -advantages * np.clip(ratio, 0.8, 1.28) > -advantages * ratio
    result = ppo(policy, old, advantages, mask)
    np.testing.assert_allclose(result.loss, np.where(mask, loss, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.ratio, np.where(mask, ratio, 0), rtol=1e-5)
    np.testing.assert_array_equal(result.clipped_low | result.clipped_high, clipped & mask)
    np.testing.assert_array_equal(result.clipped_dual, dual & mask)
    assert np.any(result.clipped_low) and np.any(result.clipped_high) and np.any(dual)


def test_the_gradient_is_the_policy_gradient_inside_and_zero_where_clipped():
    policy = jnp.log(jnp.array([[1.0, 1.1, 2.0, 0.5, 10.0, 0.5]]))
    advantages = jnp.array([[2.0, -3.0, 1.0, -1.0, -1.0, 1.0]])
    ones, zeros = jnp.ones((1, 6)), jnp.zeros((1, 6))
    gradient = jax.grad(lambda p: jnp.sum(ppo(p, zeros, advantages, ones).loss))(policy)
    # d(-A r)/d log pi = -A r
    np.testing.assert_allclose(gradient, [[-2.0, 3.3, 0.0, 0.0, 0.0, -0.5]], rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_masked_entries_may_hold_anything(bad):
    policy, old, advantages = (
        jnp.array([[-1.0, bad, -1.0]]),
        jnp.array([[-1.0, -1.0, bad]]),
        jnp.array([[1.0, bad, bad]]),
    )
    mask = jnp.array([[1, 0, 0]])
    loss, gradient = jax.value_and_grad(lambda p: jnp.sum(ppo(p, old, advantages, mask).loss))(
        policy
    )
    assert loss == -1.0
    assert gradient.tolist() == [[-1.0, 0.0, 0.0]]


def test_an_enormous_ratio_stays_finite():
    for advantage in (1.0, -1.0):
        policy, old = jnp.array([[0.0]]), jnp.array([[-1e4]])
        result = ppo_clip_loss(
            policy,
            old,
            jnp.array([[advantage]]),
            jnp.ones((1, 1)),
            **(CLIP | {"clip_ratio_c": None}),
        )
        assert np.all(np.isfinite(result.loss)) and np.all(np.isfinite(result.ratio))
