"""The objective on a toy policy whose context is what TrainBatch says: a mistake in packing shows in gradients."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.aggregation import LOSS_AGG_MODES
from rlvr_jax.algorithms.kl import KL_LOSSES
from rlvr_jax.algorithms.objective import (
    ObjectiveConfig,
    batch_weights,
    merge_metrics,
    rl_objective,
)
from rlvr_jax.data.packing import pack_groups
from rlvr_jax.types import Group, Reward, Task, TrainBatch, Trajectory

P, G, VOCAB, WIDTH = 4, 3, 16, 8
NUM_SAMPLES = P * G


def make_groups(seed=0):
    rng = np.random.default_rng(seed)
    groups = []
    for p in range(P):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 6))
        members = []
        for g in range(G):
            response = rng.integers(0, VOCAB, rng.integers(1, 9))
            mask = np.r_[np.zeros(len(prompt), bool), rng.random(len(response)) < 0.8]
            mask[len(prompt)] = True
            members.append(
                Trajectory(
                    tokens=np.r_[prompt, response].astype(np.int32),
                    response_mask=mask,
                    logprobs=np.where(mask, rng.normal(-2.8, 0.4, len(mask)), 0).astype(np.float32),
                    turn_starts=(len(prompt),),
                    rewards=(Reward(name="exact", value=float(g == 0)),),
                    stop_reason="stop",
                    policy_version=(0, 0),
                )
            )
        task = Task(id=str(p), domain="toy", prompt=(), answer="")
        groups.append(Group(task=task, trajectories=tuple(members), step=0))
    advantages = list(rng.normal(size=(P, G)).astype(np.float32))
    return groups, advantages


def with_reference(batch: TrainBatch) -> TrainBatch:
    """Fills ref_logprobs with something that depends on the token and its place in the sequence alone."""
    ref = np.where(batch.loss_mask > 0, -2.5 - 0.1 * (batch.tokens % 5) - 0.02 * batch.positions, 0)
    return dataclasses.replace(batch, ref_logprobs=ref.astype(np.float32))


PARAMS = {
    name: jnp.asarray(0.3 * np.random.default_rng(i).normal(size=shape), jnp.float32)
    for i, (name, shape) in enumerate(
        {"embed": (VOCAB, WIDTH), "place": (32, WIDTH), "head": (WIDTH, VOCAB)}.items()
    )
}


def toy_policy(params, batch):
    """Log-probabilities and entropies [B, T]: a token depends on all tokens before it in its own sequence."""
    segment, prefix, position = batch.segment_ids, batch.prefix_ids, batch.positions
    own = segment[:, :, None] == segment[:, None, :]
    prompt = (prefix[:, :, None] == segment[:, None, :]) & (prefix[:, :, None] > 0)
    visible = (own | prompt) & (position[:, None, :] <= position[:, :, None])
    inputs = params["embed"][batch.tokens] + params["place"][position]
    hidden = jnp.tanh(jnp.einsum("btj,bjd->btd", visible.astype(jnp.float32), inputs))
    parents = jnp.maximum(batch.parents, 0)
    hidden = jnp.take_along_axis(hidden, parents[:, :, None], axis=1)
    logprobs = jax.nn.log_softmax(hidden @ params["head"])
    chosen = jnp.take_along_axis(logprobs, batch.tokens[:, :, None], axis=2)[:, :, 0]
    return chosen, -jnp.sum(jnp.exp(logprobs) * logprobs, axis=2)


@functools.partial(jax.jit, static_argnames=("config", "has_reference"))
def micro_step(params, batch, weights, token_weights, config, has_reference=True):
    def loss_fn(params):
        logprobs, entropy = toy_policy(params, batch)
        return rl_objective(
            logprobs, entropy, batch, weights, token_weights, config, has_reference=has_reference
        )

    (_, metrics), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return gradient, metrics


def step(batch: TrainBatch, config: ObjectiveConfig, num_micro_batches=1, **kwargs):
    """What a trainer does: weights of the whole batch, then micro-batches whose gradients and metrics add up."""
    weights, token_weights = batch_weights(batch, config, num_samples=NUM_SAMPLES)
    totals = None
    rows = batch.tokens.shape[0] // num_micro_batches
    for k in range(num_micro_batches):
        part = slice(k * rows, (k + 1) * rows)
        micro = jax.tree.map(lambda x, part=part: x[part], batch)
        out = micro_step(PARAMS, micro, weights[part], token_weights[part], config, **kwargs)
        if totals is None:
            totals = out
        else:
            gradient = jax.tree.map(jnp.add, totals[0], out[0])
            totals = gradient, merge_metrics(totals[1], out[1])
    return totals


def assert_same(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def everything_on(mode="token-mean", **changes):
    return ObjectiveConfig(
        loss_agg_mode=mode,
        max_response_length=8,
        kl_loss_coef=0.1,
        entropy_coef=0.01,
        **changes,
    )


def packed(rows=8, length=24, **kwargs):
    groups, advantages = make_groups()
    return with_reference(pack_groups(groups, advantages, length=length, rows=rows, **kwargs))


def one_sequence_a_row():
    """The batch as a stack without packing would make it."""
    groups, advantages = make_groups()
    rows = [
        pack_groups([dataclasses.replace(g, trajectories=(t,))], [a[i : i + 1]], length=15, rows=1)
        for g, a in zip(groups, advantages, strict=True)
        for i, t in enumerate(g.trajectories)
    ]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    ids = np.where(batch.sample_ids >= 0, np.arange(NUM_SAMPLES, dtype=np.int32)[:, None], -1)
    return with_reference(dataclasses.replace(batch, sample_ids=ids))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_gradient_and_metrics_are_the_same_for_any_number_of_micro_batches(mode, num_micro_batches):
    config = everything_on(mode)
    assert_same(step(packed(), config), step(packed(), config, num_micro_batches))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_and_metrics_are_the_same_packed_shared_or_one_a_row(mode):
    config = everything_on(mode)
    shared = step(packed(rows=8), config)
    assert_same(shared, step(packed(rows=8, share_prompt=False), config))
    assert_same(shared, step(one_sequence_a_row(), config))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gradient_and_metrics_are_the_same_on_one_device_and_spread_over_eight(mode):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    spread = jax.device_put(packed(rows=8), rows)
    weights, token_weights = batch_weights(spread, everything_on(mode), num_samples=NUM_SAMPLES)
    assert_same(
        micro_step(PARAMS, spread, weights, token_weights, everything_on(mode)),
        step(packed(rows=8), everything_on(mode)),
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_are_the_same_packed_or_cut(level):
    config = everything_on(rollout_is=level, rollout_is_threshold=1.5)
    whole = step(packed(), config)
    assert_same(whole, step(packed(), config, 4))
    assert_same(whole, step(packed(share_prompt=False), config, 2))
    assert 0 < whole[1]["rollout_is_mean"] < 1.5 and whole[1]["rollout_is_max"] == 1.5


def test_rows_of_padding_change_nothing():
    assert_same(step(packed(rows=4), everything_on()), step(packed(rows=8), everything_on()))


def test_what_is_at_masked_tokens_changes_nothing():
    batch, config = packed(), everything_on()
    dead = batch.loss_mask == 0
    poisoned = dataclasses.replace(
        batch,
        **{
            name: np.where(dead, bad, getattr(batch, name)).astype(np.float32)
            for name, bad in [
                ("advantages", np.nan),
                ("behavior_logprobs", -np.inf),
                ("ref_logprobs", np.nan),
            ]
        },
    )
    assert_same(step(batch, config), step(poisoned, config))
    padded = dataclasses.replace(batch, tokens=np.where(batch.segment_ids == 0, 7, batch.tokens))
    assert_same(step(batch, config), step(padded, config))


def test_masked_policy_logprobs_that_are_not_finite_leave_gradients_finite():
    batch, config = packed(), everything_on(rollout_is="sequence")
    weights = batch_weights(batch, config, num_samples=NUM_SAMPLES)
    live = jnp.asarray(batch.loss_mask) > 0

    def loss(logprobs, entropy):
        return rl_objective(logprobs, entropy, batch, *weights, config)[0]

    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        inputs = jnp.where(live, -2.0, bad), jnp.where(live, 1.0, bad)
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(*inputs)
        assert np.isfinite(value)
        for gradient in gradients:
            assert np.all(np.isfinite(gradient))
            assert np.all(np.asarray(gradient)[~np.asarray(live)] == 0.0)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_fully_masked_batch_gives_loss_zero_and_gradient_zero(mode):
    batch = packed()
    batch = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    gradient, metrics = step(batch, everything_on(mode))
    assert all(np.all(np.asarray(x) == 0.0) for x in jax.tree.leaves((gradient, metrics)))


def test_a_batch_whose_samples_were_all_truncated_changes_no_parameter():
    groups, advantages = make_groups()
    groups = [
        dataclasses.replace(
            g,
            trajectories=tuple(
                dataclasses.replace(t, stop_reason="length") for t in g.trajectories
            ),
        )
        for g in groups
    ]
    batch = pack_groups(groups, advantages, length=24, rows=8, mask_truncated=True)
    gradient, metrics = step(with_reference(batch), everything_on())
    assert metrics["loss"] == 0.0
    assert all(np.all(np.asarray(x) == 0.0) for x in jax.tree.leaves(gradient))


def test_a_batch_without_signal_has_no_policy_gradient():
    batch = packed()
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    gradient, metrics = step(batch, ObjectiveConfig())
    assert metrics["loss"] == 0.0
    assert all(np.all(np.asarray(x) == 0.0) for x in jax.tree.leaves(gradient))


def test_the_kl_loss_has_a_gradient():
    batch = packed()
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    gradient, metrics = step(batch, ObjectiveConfig(kl_loss_coef=0.1))
    assert metrics["kl_loss"] > 0
    assert all(np.abs(x).max() > 1e-5 for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("kl_loss_type", "rollout_is"),
    [*itertools.product(KL_LOSSES, ["off"]), ("k3+", "token"), ("k3+", "sequence")],
)
def test_every_advertised_name_runs_a_step(kl_loss_type, rollout_is):
    gradient, metrics = step(
        packed(), everything_on(kl_loss_type=kl_loss_type, rollout_is=rollout_is)
    )
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves((gradient, metrics)))
    assert np.abs(gradient["head"]).max() > 0


def tiny_batch(mask, advantages, behavior, ref):
    """One sequence a row, rows of equal length; only what the objective reads is meaningful."""
    mask, zeros = np.asarray(mask, np.float32), np.zeros(np.shape(mask), np.int32)
    ids = np.where(mask > 0, np.arange(len(mask))[:, None], -1)
    fields = {"tokens": zeros, "positions": zeros, "prefix_ids": zeros, "parents": zeros}
    return TrainBatch(
        **fields,
        segment_ids=zeros + 1,
        sample_ids=ids,
        loss_mask=mask,
        advantages=np.asarray(advantages, np.float32),
        behavior_logprobs=np.asarray(behavior, np.float32),
        ref_logprobs=np.asarray(ref, np.float32),
    )


def objective(policy, batch, config, entropy=None, **kwargs):
    weights = batch_weights(batch, config, num_samples=len(batch.tokens))
    entropy = jnp.zeros(batch.tokens.shape) if entropy is None else entropy
    return rl_objective(
        jnp.asarray(policy, jnp.float32), entropy, batch, *weights, config, **kwargs
    )


def test_loss_and_metrics_match_their_definitions():
    rng = np.random.default_rng(0)
    policy, behavior, ref = rng.normal(-2, 0.5, (3, 5, 40))
    advantages, entropy = rng.normal(size=(5, 40)), rng.random((5, 40))
    mask = rng.random((5, 40)) < 0.7
    config = everything_on("seq-mean-token-mean", clip_ratio_high=0.28)
    batch = tiny_batch(mask, advantages, behavior, ref)
    loss, metrics = objective(policy, batch, config, jnp.asarray(entropy, jnp.float32))

    ratio, x = np.exp(policy - behavior), policy - ref
    ppo = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    ppo = np.where(advantages < 0, np.minimum(ppo, -advantages * 3.0), ppo)
    k3 = np.exp(-x) - 1 + x
    sequence_mean = lambda v: np.mean([v[i][mask[i]].mean() for i in range(5)])  # noqa: E731
    low, high = (advantages < 0) & (ratio < 0.8), (advantages > 0) & (ratio > 1.28)
    expected = {
        "policy_loss": sequence_mean(ppo),
        "kl_loss": sequence_mean(ratio * k3),
        "kl": k3[mask].mean(),
        "entropy": entropy[mask].mean(),
        "clip_frac": (low | high)[mask].mean(),
        "clip_frac_low": low[mask].mean(),
        "clip_frac_high": high[mask].mean(),
        "clip_frac_dual": ((advantages < 0) & (ratio > 3))[mask].mean(),
        "ratio_mean": ratio[mask].mean(),
        "ratio_max": ratio[mask].max(),
        "mismatch_kl": (ratio - 1 - np.log(ratio))[mask].mean(),
        "logprob_delta_mean": np.abs(policy - behavior)[mask].mean(),
        "logprob_delta_max": np.abs(policy - behavior)[mask].max(),
    }
    expected["loss"] = (
        expected["policy_loss"] + 0.1 * expected["kl_loss"] - 0.01 * sequence_mean(entropy)
    )
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    assert loss == metrics["loss"]


def test_the_dual_clip_constant_of_the_config_reaches_the_loss():
    batch = tiny_batch([[1]], [[-1.0]], [[np.log(0.05)]], [[0.0]])
    for c, expected in [(3.0, 3.0), (5.0, 5.0), (None, 10.0)]:
        loss, _ = objective([[np.log(0.5)]], batch, ObjectiveConfig(clip_ratio_c=c))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_advantages_of_masked_tokens_leak_into_no_sequence_mean():
    config = ObjectiveConfig(loss_agg_mode="seq-mean-token-mean")
    losses = [
        objective(
            np.zeros((1, 4)),
            tiny_batch([[1, 1, 0, 0]], [adv], np.zeros((1, 4)), np.zeros((1, 4))),
            config,
        )[0]
        for adv in ([1, 1, 10, 10], [1, 1, 0, 0])
    ]
    assert losses == [-1.0, -1.0]


def test_ratio_mean_shows_a_sampler_that_renormalised_over_a_truncated_vocabulary():
    # top_p keeps three of five tokens, 0.895 of the mass; the sampler divides by it. A trainer that does not sees
    # ratios of 0.895; one that applies the same truncation sees 1.
    kept = np.log(np.array([[0.5, 0.25, 0.145]]))
    behavior, mass = kept - np.log(0.895), 0.895
    batch = tiny_batch([[1, 1, 1]], np.zeros((1, 3)), behavior, behavior)
    _, whole = objective(kept, batch, ObjectiveConfig())
    _, truncated = objective(behavior, batch, ObjectiveConfig())
    np.testing.assert_allclose(whole["ratio_mean"], mass, rtol=1e-5)
    np.testing.assert_allclose(truncated["ratio_mean"], 1.0, rtol=1e-6)
    np.testing.assert_allclose(whole["logprob_delta_max"], -np.log(mass), rtol=1e-5)
    assert truncated["mismatch_kl"] == 0.0


def test_a_separate_old_policy_moves_the_trust_region():
    batch = tiny_batch([[1]], [[1.0]], [[np.log(0.1)]], [[0.0]])
    policy = [[np.log(0.4)]]
    around_behavior, _ = objective(policy, batch, ObjectiveConfig())
    around_old, metrics = objective(
        policy, batch, ObjectiveConfig(), old_logprobs=jnp.log(jnp.array([[0.4]]))
    )
    np.testing.assert_allclose(around_behavior, -1.2, rtol=1e-5)  # ratio 4, clipped
    np.testing.assert_allclose(around_old, -1.0, rtol=1e-5)
    np.testing.assert_allclose(metrics["logprob_delta_max"], np.log(4), rtol=1e-5)


def test_rollout_correction_gives_the_truncated_off_policy_gradient():
    # With no old policy given the update starts at the policy itself: ratio 1, times min(policy / behavior, threshold).
    batch = tiny_batch([[1, 1]], [[1.0, 1.0]], np.log([[0.1, 0.4]]), np.zeros((1, 2)))
    config = ObjectiveConfig(rollout_is="token", rollout_is_threshold=2.0)
    policy = jnp.log(jnp.array([[0.4, 0.2]]))
    loss, gradient = jax.value_and_grad(lambda p: objective(p, batch, config)[0])(policy)
    np.testing.assert_allclose(loss, -(2.0 + 0.5) / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient, [[-2.0 / 2, -0.5 / 2]], rtol=1e-5)


def test_without_a_reference_there_is_no_kl_metric_and_no_kl_loss():
    batch = packed()
    _, metrics = step(batch, ObjectiveConfig(), has_reference=False)
    assert "kl" not in metrics and "kl_loss" not in metrics
    with pytest.raises(
        ValueError, match=r"kl_loss_coef is 0.1 but .* no reference .*give a reference"
    ):
        step(batch, ObjectiveConfig(kl_loss_coef=0.1), has_reference=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"clip_ratio_low": 0.0},
            r"clip_ratio_low is 0.0; expected in \(0, 1\]; change config.clip",
        ),
        ({"clip_ratio_high": -0.1}, r"clip_ratio_high is -0.1; expected a finite number > 0"),
        (
            {"clip_ratio_c": 1.0},
            r"clip_ratio_c is 1.0; expected None \(off\), or a finite number > 1",
        ),
        ({"kl_loss_coef": -0.1}, r"kl_loss_coef is -0.1; expected a finite number >= 0"),
        ({"entropy_coef": float("nan")}, r"entropy_coef is nan; expected a finite number"),
        ({"rollout_is": "tokens"}, r"rollout_is is 'tokens'; expected one of \('off', 'token'"),
        ({"rollout_is_threshold": 0.0}, r"rollout_is_threshold is 0.0; expected a number > 0"),
        ({"loss_agg_mode": "mean"}, r"loss_agg_mode is 'mean'; expected one of token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, r"max_response_length is None"),
        (
            {"kl_loss_type": "k1"},
            r"kl_loss_type is 'k1', which as a loss has an expected gradient of",
        ),
        ({"kl_loss_type": "k9"}, r"unknown kl_loss_type 'k9'"),
    ],
)
def test_a_setting_that_cannot_work_raises(changes, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**changes)
