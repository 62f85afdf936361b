import numpy as np
import pytest

from rlvr_jax.algorithms.returns import discounted_returns


@pytest.mark.parametrize(
    ("mask", "rewards", "gamma", "expected"),
    [
        # Multiplying the running return by the mask would cut the credit at the observation.
        ([1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 1], 1.0, [1, 1, 0, 0, 1, 1]),
        # Observation tokens do not discount.
        ([1, 1, 0, 0, 1], [0, 0, 0, 0, 2], 0.5, [0.5, 1.0, 0, 0, 2.0]),
        ([0, 1, 1, 0], [9, 1, 1, 9], 0.5, [0, 1.5, 1, 0]),
        ([0, 0], [1, 1], 1.0, [0, 0]),
    ],
)
def test_returns_flow_across_observations(mask, rewards, gamma, expected):
    assert discounted_returns([rewards], [mask], gamma=gamma).tolist() == [expected]


def test_returns_match_the_definition_over_own_tokens():
    rng = np.random.default_rng(0)
    rewards, mask = rng.normal(size=(3, 9)), rng.random((3, 9)) < 0.6
    expected = np.zeros((3, 9))
    for row in range(3):
        own = np.flatnonzero(mask[row])
        for i, t in enumerate(own):
            expected[row, t] = sum(0.9**k * rewards[row, u] for k, u in enumerate(own[i:]))
    rewards = np.where(mask, rewards, np.nan)
    np.testing.assert_allclose(discounted_returns(rewards, mask, gamma=0.9), expected, rtol=1e-5)


def test_the_kl_of_observation_tokens_stays_out_of_the_return():
    kl, mask, reward = np.array([[0.1, 5.0, 0.1]]), np.array([[1, 0, 1]]), 1.0
    returns = np.asarray(discounted_returns(np.array([[0, 0, reward]]) - kl, mask, gamma=1.0))
    np.testing.assert_allclose(returns, [[reward - 0.2, 0.0, reward - 0.1]], rtol=1e-6)
