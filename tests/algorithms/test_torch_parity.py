"""Our advantages, loss and gradient beside TRL's formulas (GRPOTrainer), written out in PyTorch with its autograd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.advantages import group_advantages
from rlvr_jax.algorithms.aggregation import loss_weights
from rlvr_jax.algorithms.kl import kl_loss
from rlvr_jax.algorithms.policy_loss import ppo_clip_loss

torch = pytest.importorskip("torch")

B, T, BETA, LOW, HIGH, DELTA = 6, 20, 0.04, 0.2, 0.28, 3.0


def trl_advantages(rewards, num_generations, scale):
    grouped = rewards.view(-1, num_generations)
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    return advantages / (grouped.std(dim=1, keepdim=True) + 1e-4) if scale else advantages


def trl_loss(policy, old, ref, advantages, mask, loss_type):
    kl = torch.exp(ref - policy) - (ref - policy) - 1
    unclipped = torch.exp(policy - old)
    clipped = torch.clamp(unclipped, 1 - LOW, 1 + HIGH)
    unclipped = torch.clamp(unclipped, max=DELTA)
    advantages = advantages.unsqueeze(1)
    per_token = -torch.min(unclipped * advantages, clipped * advantages) + BETA * kl
    if loss_type == "grpo":
        return ((per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "dapo":
        return (per_token * mask).sum() / mask.sum().clamp(min=1.0)
    return (per_token * mask).sum() / (B * T)


@pytest.mark.parametrize(("estimator", "scale"), [("grpo", True), ("dr_grpo", False)])
def test_advantages_equal_trl(estimator, scale):
    rewards = np.random.default_rng(0).random((8, 4)).astype(np.float32)
    expected = trl_advantages(torch.tensor(rewards).flatten(), 4, scale)
    ours = group_advantages(rewards, np.ones((8, 4)), estimator=estimator, epsilon=1e-4)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss_type", "mode"),
    [
        ("grpo", "seq-mean-token-mean"),
        ("dapo", "token-mean"),
        ("dr_grpo", "seq-mean-token-sum-norm"),
    ],
)
def test_loss_and_gradient_equal_trl(loss_type, mode):
    rng = np.random.default_rng(1)
    policy, old, ref = rng.normal(-2, 0.6, (3, B, T)).astype(np.float32)
    advantages = rng.normal(size=B).astype(np.float32)
    mask = np.arange(T) < rng.integers(1, T + 1, (B, 1))

    leaf = torch.tensor(policy, requires_grad=True)
    rest = (torch.tensor(x) for x in (old, ref, advantages, mask.astype(np.float32)))
    expected = trl_loss(leaf, *rest, loss_type)
    expected.backward()

    ids = np.tile(np.arange(B)[:, None], (1, T))
    weights = loss_weights(mask, ids, mode=mode, num_samples=B, max_response_length=T)
    per_token = np.tile(advantages[:, None], (1, T))

    def ours(policy):
        ppo = ppo_clip_loss(
            policy,
            old,
            per_token,
            mask,
            clip_ratio_low=LOW,
            clip_ratio_high=HIGH,
            clip_ratio_c=DELTA,
        )
        kl = kl_loss(policy, ref, old, mask, kl_loss_type="k3")
        return jnp.sum(weights * (ppo.loss + BETA * kl))

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(policy))
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-4, atol=1e-6)
