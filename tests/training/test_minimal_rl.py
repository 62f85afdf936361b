"""``minimal_rl`` is documentation that runs: it computes what ``rl`` computes, and it learns."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.envs.single_turn import make_trajectory
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.tasks.splits import draw
from rlvr_jax.training import minimal_rl, rl
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import StepConfig, make_learner
from rlvr_jax.types import Completion, Group, Reward
from tests.training.toys import REPOSITORY, get_config, override

P, G = 4, 4


@pytest.fixture(scope="module")
def samples():
    """Tiny-random weights, what they sampled, and scores; the third group has no signal."""
    pretrained = load_pretrained(TINY)
    params = jax.tree.map(jnp.asarray, pretrained.params)
    tasks = [draw("toy/even", 0, "train", 0, index) for index in range(P)]
    prompts = [pretrained.chat.render_ids(task.prompt) for task in tasks for _ in range(G)]
    batch = minimal_rl.sample(
        pretrained.config,
        params,
        prompts,
        pretrained.tokenizer.stop_token_ids,
        jax.random.key(1),
    )
    scores = np.random.default_rng(0).random((P, G))
    scores[2] = 0.5
    return pretrained, params, tasks, batch, scores


def test_what_is_sampled_follows_the_prompts_and_ends_at_a_stop(samples):
    pretrained, params, tasks, batch, _ = samples
    tokens, lengths, mask = batch["tokens"], batch["lengths"], batch["response_mask"]
    for row in range(P * G):
        prompt = pretrained.chat.render_ids(tasks[row // G].prompt)
        assert tokens[row, : len(prompt)].tolist() == list(prompt)
        assert np.flatnonzero(mask[row]).tolist() == list(range(len(prompt), lengths[row]))
        stops = np.isin(tokens[row], pretrained.tokenizer.stop_token_ids) & mask[row]
        assert not stops[: lengths[row] - 1].any()
        assert stops.any() or mask[row].sum() == minimal_rl.MAX_TOKENS
    # The recorded log-probabilities are those the trainer computes.
    logprobs = jax.jit(minimal_rl.token_logprobs, static_argnums=0)(
        pretrained.config, params, tokens, lengths
    )
    np.testing.assert_allclose(np.where(mask, logprobs, 0), batch["logprobs"], atol=1e-5)
    assert len(np.unique(tokens[mask])) > 20


def test_one_gradient_is_that_of_the_real_trainer(samples):
    pretrained, start, tasks, batch, scores = samples
    model = pretrained.config
    # The policy has moved on since it sampled: ratios are off 1, some past the clip.
    leaves, tree = jax.tree.flatten(start)
    noise = [
        0.02 * jax.random.normal(key, x.shape)
        for key, x in zip(jax.random.split(jax.random.key(2), len(leaves)), leaves, strict=True)
    ]
    params = jax.tree.unflatten(tree, [x + n for x, n in zip(leaves, noise, strict=True)])

    advantages = minimal_rl.group_advantages(scores)
    has_signal = np.array([True, True, False, True]).repeat(G)[:, None]
    minimal = batch | {
        "loss_mask": batch["response_mask"] & has_signal,
        "advantages": np.broadcast_to(advantages.reshape(-1, 1), batch["tokens"].shape),
    }
    (loss, kl), grads = minimal_rl.gradient(params, start, minimal, model)

    config = override(
        get_config(),
        tasks__tasks_per_step=P,
        rollout__group_size=G,
        rollout__max_tokens=minimal_rl.MAX_TOKENS,
        rollout__temperature=minimal_rl.TEMPERATURE,
        algorithm__clip_ratio_low=minimal_rl.CLIP_RATIO,
        algorithm__clip_ratio_high=minimal_rl.CLIP_RATIO,
        algorithm__clip_ratio_c=1e9,
        algorithm__kl_loss_type="k3+",
        algorithm__kl_loss_coef=minimal_rl.KL_LOSS_COEF,
    )
    groups = []
    for number, task in enumerate(tasks):
        trajectories = []
        for g in range(G):
            row = number * G + g
            mask = batch["response_mask"][row]
            completion = Completion(
                tokens=batch["tokens"][row, mask],
                logprobs=batch["logprobs"][row, mask],
                stop_reason="stop",
                policy_version=0,
            )
            prompt = batch["tokens"][row, : int(np.argmax(mask))].tolist()
            reward = Reward(name="toy", value=float(scores[number, g]))
            trajectories.append(
                make_trajectory(prompt, completion, rewards=(reward,), index=g, text="")
            )
        groups.append(Group(task=task, trajectories=tuple(trajectories), step=0))
    groups = rl.trainable(groups, config)
    assert len(groups) == 3

    mesh = make_mesh(devices=jax.devices()[:1])
    sgd = optax.sgd(1.0)  # the change of the params is the gradient
    sampling = rl.sampling_params(config, pretrained.tokenizer.stop_token_ids)
    learner = make_learner(
        model,
        sgd,
        mesh,
        state_shardings(model, sgd, mesh),
        StepConfig(objective=rl.objective_config(config), transform=LogitTransform.of(sampling)),
    )
    prepared = learner.prepare(
        rl.pack(
            groups,
            rl.step_advantages(groups, config),
            config,
            num_shards=1,
            num_column_shards=1,
            min_rows=learner.min_rows,
        ),
        learner.place(start),
        scores=rl.shaped_scores(groups, config),
        kl_coef=0.0,
    )
    state, metrics = learner.train_step(init_state(model, params, sgd, mesh, seed=0), prepared)
    assert 0.01 < float(metrics["clip_frac"]) < 0.9
    assert float(metrics["loss"]) == pytest.approx(float(loss), abs=1e-5)
    assert float(metrics["kl"]) == pytest.approx(float(kl), abs=1e-5)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads)) > 0.01
    jax.tree.map(
        lambda old, new, grad: np.testing.assert_allclose(old - new, grad, atol=1e-5),
        params,
        state.params,
        grads,
    )


def test_adam_is_that_of_the_real_trainer(samples):
    _, params, *_ = samples
    optimizer = make_optimizer(
        OptimizerConfig(
            learning_rate=1e-2,
            num_steps=3,
            b1=minimal_rl.B1,
            b2=minimal_rl.B2,
            eps=minimal_rl.EPSILON,
            grad_clip=minimal_rl.GRAD_CLIP,
        )
    )
    opt_state, expected = optimizer.init(params), params
    m = v = jax.tree.map(jnp.zeros_like, params)
    for count, scale in ((1, 1.0), (2, 1e-4)):  # clipped, and not
        keys = jax.random.split(jax.random.key(count), len(jax.tree.leaves(params)))
        grads = jax.tree.unflatten(
            jax.tree.structure(params),
            [
                scale * jax.random.normal(key, leaf.shape)
                for key, leaf in zip(keys, jax.tree.leaves(params), strict=True)
            ],
        )
        updates, opt_state = optimizer.update(grads, opt_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, m, v = minimal_rl.adam(params, m, v, grads, jnp.float32(count), 1e-2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)


def test_group_advantages_are_normalised_and_0_without_signal():
    advantages = minimal_rl.group_advantages(np.array([[0.0, 1.0], [0.3, 0.3], [0.2, 0.1]]))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(advantages, [[-half, half], [0, 0], [half, -half]], atol=1e-4)


def test_the_verifier_wants_the_number_alone():
    assert minimal_rl.score(12, " 12\n") == 1.0
    assert minimal_rl.score(12, "1234") == 0.2
    assert minimal_rl.score(12, "ab12") == 0.1
    assert minimal_rl.score(12, "") == 0.0


def test_it_runs_from_the_command_line_and_says_how_it_goes():
    done = subprocess.run(
        [sys.executable, "-m", "rlvr_jax.training.minimal_rl", "--steps", "2"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("step 1/2  reward 0.0")
    assert second.startswith("step 2/2  reward 0.0")


@pytest.mark.slow
def test_it_learns_that_numbers_are_wanted():
    means = minimal_rl.train(TINY, num_steps=40, learning_rate=3e-3, seed=1)
    assert np.mean(means[:5]) < 0.03
    assert np.mean(means[-5:]) > 0.1
