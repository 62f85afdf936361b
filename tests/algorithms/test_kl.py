"""The KL estimators, by exact enumeration: one token from a small vocabulary, outcomes weighted by probability."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.kl import (
    KL_ESTIMATORS,
    KL_LOSSES,
    KLController,
    kl_estimate,
    kl_loss,
    kl_penalty_by_sample,
)

V = 6
ONES = jnp.ones((1, V))
THETA, REF, OTHER = (
    jnp.asarray(np.random.default_rng(seed).normal(size=(1, V)), jnp.float32) for seed in range(3)
)
log_probs = jax.nn.log_softmax


def reverse_kl(theta):
    return jnp.sum(jnp.exp(log_probs(theta)) * (log_probs(theta) - log_probs(REF)))


def forward_kl(theta):
    return jnp.sum(jnp.exp(log_probs(REF)) * (log_probs(REF) - log_probs(theta)))


def expected_gradient(kl_loss_type, behavior_logits):
    """Gradient of E_behavior[kl_loss]: the mean of what every sampled token would contribute."""
    behavior = log_probs(behavior_logits)

    def expected_loss(theta):
        loss = kl_loss(log_probs(theta), log_probs(REF), behavior, ONES, kl_loss_type=kl_loss_type)
        return jnp.sum(jnp.exp(behavior) * loss)

    return jax.value_and_grad(expected_loss)(THETA)


@pytest.mark.parametrize("behavior", [THETA, OTHER], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("kl_loss_type", [name for name in KL_LOSSES if name.endswith("+")])
def test_a_plus_gives_exactly_the_gradient_of_the_reverse_kl(kl_loss_type, behavior):
    _, gradient = expected_gradient(kl_loss_type, behavior)
    np.testing.assert_allclose(gradient, jax.grad(reverse_kl)(THETA), atol=1e-6)


@pytest.mark.parametrize("behavior", [THETA, OTHER], ids=["on_policy", "off_policy"])
@pytest.mark.parametrize("kl_loss_type", ["k1+", "k3+", "low_var_kl+"])
def test_weighted_k1_and_k3_also_have_the_value_of_the_kl(kl_loss_type, behavior):
    value, _ = expected_gradient(kl_loss_type, behavior)
    np.testing.assert_allclose(value, reverse_kl(THETA), rtol=1e-5)


def test_a_monte_carlo_gradient_of_the_default_loss_agrees_too():
    # 200 000 tokens sampled from another policy; the standard error of each entry is below 2e-3.
    probabilities = np.asarray(log_probs(OTHER), np.float64)[0]
    probabilities = np.exp(probabilities) / np.exp(probabilities).sum()
    tokens = np.random.default_rng(0).choice(V, size=(1, 200_000), p=probabilities)

    def mean_loss(theta):
        policy, ref, behavior = (log_probs(x)[0][tokens] for x in (theta, REF, OTHER))
        return jnp.mean(kl_loss(policy, ref, behavior, np.ones(tokens.shape), kl_loss_type="k3+"))

    np.testing.assert_allclose(jax.grad(mean_loss)(THETA), jax.grad(reverse_kl)(THETA), atol=1e-2)


def test_plain_k3_has_on_policy_the_gradient_of_the_forward_kl():
    _, gradient = expected_gradient("k3", THETA)
    np.testing.assert_allclose(gradient, jax.grad(forward_kl)(THETA), atol=1e-6)
    assert np.abs(gradient - jax.grad(reverse_kl)(THETA)).max() > 0.01


def test_plain_k2_is_right_on_policy_only():
    exact = jax.grad(reverse_kl)(THETA)
    np.testing.assert_allclose(expected_gradient("k2", THETA)[1], exact, atol=1e-6)
    assert np.abs(expected_gradient("k2", OTHER)[1] - exact).max() > 0.01


def test_plain_k1_has_no_gradient_and_is_refused_as_a_loss():
    def expected_k1(theta):
        k1 = kl_estimate(log_probs(theta), log_probs(REF), ONES, estimator="k1")
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(log_probs(theta))) * k1)

    np.testing.assert_allclose(jax.grad(expected_k1)(THETA), np.zeros((1, V)), atol=1e-6)
    for name in ("k1", "kl"):
        with pytest.raises(ValueError, match=r"expected gradient of zero.*use 'k1\+' or 'k3\+'"):
            kl_loss(THETA, REF, THETA, ONES, kl_loss_type=name)
    with pytest.raises(ValueError, match="is not a KL"):
        kl_loss(THETA, REF, THETA, ONES, kl_loss_type="abs")
    with pytest.raises(ValueError, match="unknown kl_loss_type 'k4'"):
        kl_loss(THETA, REF, THETA, ONES, kl_loss_type="k4")


def test_estimators_have_their_literal_values():
    policy, ref = jnp.log(jnp.array([[0.5, 0.1]])), jnp.log(jnp.array([[0.25, 0.2]]))
    x = np.log([2.0, 0.5])
    expected = {"k1": x, "abs": np.abs(x), "k2": x**2 / 2, "k3": np.array([0.5, 2.0]) - 1 + x}
    aliases = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    assert set(KL_ESTIMATORS) == expected.keys() | aliases.keys()
    for name in KL_ESTIMATORS:
        values = kl_estimate(policy, ref, np.ones((1, 2)), estimator=name)
        np.testing.assert_allclose(values[0], expected[aliases.get(name, name)], rtol=1e-5)


def test_k1_and_k3_are_unbiased_values_on_policy():
    for name in ("k1", "k3"):
        values = kl_estimate(log_probs(THETA), log_probs(REF), ONES, estimator=name)
        mean = jnp.sum(jnp.exp(log_probs(THETA)) * values)
        np.testing.assert_allclose(mean, reverse_kl(THETA), rtol=1e-5)


def test_k3_keeps_its_digits_where_the_policies_agree():
    x = np.linspace(-1e-3, 1e-3, 101)[None]
    values = kl_estimate(x, np.zeros_like(x), np.ones_like(x), estimator="k3")
    # The float32 of exp(-x) - 1 + x is off by up to 6e-8.
    np.testing.assert_allclose(values, np.expm1(-x) + x, atol=1e-9)


@pytest.mark.parametrize("kl_loss_type", list(KL_LOSSES))
def test_every_loss_has_a_finite_gradient_that_is_zero_only_where_masked(kl_loss_type):
    bad = jnp.array([[-1.0, -2.0, jnp.nan, -jnp.inf]])
    ref, behavior = jnp.array([[-1.5, -1.3, jnp.nan, 0.0]]), jnp.array([[-1.1, -2.2, 0.0, 0.0]])
    mask = jnp.array([[1, 1, 0, 0]])

    def total(policy):
        return jnp.sum(kl_loss(policy, ref, behavior, mask, kl_loss_type=kl_loss_type))

    value, gradient = jax.value_and_grad(total)(bad)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient)) and np.all(np.asarray(gradient)[0, :2] != 0.0)
    assert gradient[0, 2:].tolist() == [0.0, 0.0]


def test_the_penalty_of_a_sample_sums_its_own_tokens_only():
    behavior = np.array([[0.1, 5.0, 0.1], [0.3, np.nan, 0.0]])
    mask, ids = np.array([[1, 0, 1], [1, 0, 0]]), np.array([[0, 0, 0], [2, -1, -1]])
    penalty = kl_penalty_by_sample(behavior, np.zeros((2, 3)), mask, ids, num_samples=3)
    np.testing.assert_allclose(penalty, [0.2, 0.0, 0.3], rtol=1e-6)
    squared = kl_penalty_by_sample(
        behavior, np.zeros((2, 3)), mask, ids, num_samples=3, estimator="k2"
    )
    np.testing.assert_allclose(squared, [0.01, 0.0, 0.045], rtol=1e-5)


def test_shaping_the_reward_leaves_the_logged_kl_alone():
    behavior, ref, mask = np.array([[0.1, 0.2]]), np.zeros((1, 2)), np.ones((1, 2))
    kl = kl_estimate(behavior, ref, mask, estimator="k1")
    penalty = kl_penalty_by_sample(behavior, ref, mask, np.zeros((1, 2), int), num_samples=1)
    np.testing.assert_allclose(1.0 - 0.05 * np.asarray(penalty), [0.985], rtol=1e-6)
    np.testing.assert_allclose(kl.mean(), 0.15, rtol=1e-6)
    assert behavior.tolist() == [[0.1, 0.2]]


def test_a_fixed_controller_never_moves():
    controller = KLController(coef=0.05)
    assert controller.update(10.0, 512) is controller


def test_an_adaptive_controller_follows_its_formula():
    controller = KLController(coef=0.1, target=6.0, horizon=1000)
    assert controller.update(6.6, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(60.0, 100).coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert controller.update(0.0, 100).coef == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert controller.update(0.0, 10**9).coef == pytest.approx(0.08)


@pytest.mark.parametrize("kl", [float("nan"), float("inf")])
def test_a_kl_that_is_not_finite_leaves_the_coefficient_alone(kl):
    assert KLController(coef=0.1, target=6.0).update(kl, 8).coef == 0.1


def test_a_controller_survives_json():
    controller = KLController(coef=0.1, target=6.0).update(9.0, 64)
    state = json.loads(json.dumps(dataclasses.asdict(controller)))
    assert KLController(**state) == controller


@pytest.mark.parametrize(
    "bad",
    [
        {"coef": -1.0},
        {"coef": float("nan")},
        {"coef": 1.0, "target": 0.0},
        {"coef": 1.0, "horizon": 0},
    ],
)
def test_a_controller_that_cannot_work_raises(bad):
    with pytest.raises(ValueError, match="expected"):
        KLController(**bad)
