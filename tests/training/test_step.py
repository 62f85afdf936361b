"""The update: one gradient for any cut and any mesh, no update that does harm, one compile, no second copy."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import row_sharding
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.policy_head import LogitTransform, RowBounds, batch_logprobs
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_state,
    init_state,
    make_optimizer,
    state_shardings,
)
from rlvr_jax.training.step import (
    StepConfig,
    gradient_step,
    make_learner,
    merge_updates,
    row_bounds,
)
from rlvr_jax.types import TrainBatch, TrainState
from tests.groups import random_groups

SHAPES = ((5, (4, 7, 1)), (9, (3, 3, 3)), (2, (6, 9)), (11, (8, 2)), (3, (12,)), (20, (2, 2)))
GRADIENT = optax.sgd(1.0)  # the change of the parameters is minus the gradient
ADAM = make_optimizer(OptimizerConfig(learning_rate=1e-3, num_steps=100))
CONFIG = StepConfig(
    objective=ObjectiveConfig(kl_loss_coef=0.1, entropy_coef=0.01, loss_agg_mode="token-mean"),
    transform=LogitTransform(temperature=0.7),
)
NO_SCORES = np.zeros((6, 3))


@pytest.fixture(scope="module")
def params(tiny_config):
    params = init_params(tiny_config, jax.random.key(0))
    params["embed"]["embedding"] *= 20
    return params


@pytest.fixture(scope="module")
def reference(tiny_config):
    return init_params(tiny_config, jax.random.key(1))


def batch_of(config, *, seed=0, length=32, rows=8) -> TrainBatch:
    groups = random_groups(config.vocab_size, SHAPES, seed=seed)
    rng = np.random.default_rng(seed)
    advantages = [rng.normal(size=len(group.trajectories)) for group in groups]
    return pack_groups(groups, advantages, length=length, rows=rows)


class Run:
    """A learner with its state: ``run(batch)`` is one update."""

    def __init__(self, model, params, reference, *, optimizer, sizes=None, **changes):
        sizes = sizes or {"data": 1}
        mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
        shardings = state_shardings(model, optimizer, mesh)
        config = dataclasses.replace(CONFIG, **changes)
        self.learner = make_learner(model, optimizer, mesh, shardings, config)
        self.state = init_state(model, params, optimizer, mesh, seed=0)
        self.reference = self.learner.place(reference)

    def __call__(self, batch):
        minibatch = self.learner.prepare(batch, self.reference, scores=NO_SCORES, kl_coef=0.0)
        self.state, metrics = self.learner.train_step(self.state, minibatch)
        return jax.device_get(metrics)


@pytest.fixture(scope="module")
def whole(tiny_config, params, reference):
    """(parameters, metrics) after one update on all rows at once, on one device."""
    run = Run(tiny_config, params, reference, optimizer=GRADIENT)
    metrics = run(batch_of(tiny_config))
    return jax.device_get(run.state.params), metrics


@pytest.mark.parametrize(
    ("sizes", "micro_rows"),
    [
        ({"data": 1}, 2),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 4),
        pytest.param({"data": 1}, 1, marks=pytest.mark.slow),
        pytest.param({"data": 1}, 4, marks=pytest.mark.slow),
        pytest.param({"data": 4, "tensor": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_is_the_same_for_any_cut_and_any_mesh(
    tiny_config, params, reference, whole, sizes, micro_rows
):
    run = Run(
        tiny_config, params, reference, optimizer=GRADIENT, sizes=sizes, micro_rows=micro_rows
    )
    metrics = run(batch_of(tiny_config))
    expected_params, expected_metrics = whole
    assert metrics.keys() == expected_metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(
            value, expected_metrics[name], rtol=1e-5, atol=1e-5, err_msg=name
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        jax.device_get(run.state.params),
        expected_params,
    )
    changed = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected_params, params)
    assert min(jax.tree.leaves(changed)) > 1e-4  # every parameter has a gradient


def test_metrics_are_what_they_say(tiny_config, params, reference, whole):
    _, metrics = whole
    batch = batch_of(tiny_config)
    score = jax.jit(
        functools.partial(
            batch_logprobs, tiny_config, transform=CONFIG.transform, bounds=RowBounds(32)
        )
    )
    logprobs, entropy = map(np.asarray, score(params, batch))
    ref_logprobs = np.asarray(score(reference, batch)[0])
    trained = np.asarray(batch.loss_mask) > 0
    drift = (logprobs - batch.behavior_logprobs)[trained]
    assert metrics["entropy"] == pytest.approx(entropy[trained].mean(), abs=1e-5)
    assert metrics["logprob_delta_mean"] == pytest.approx(np.abs(drift).mean(), abs=1e-5)
    assert metrics["logprob_delta_max"] == pytest.approx(np.abs(drift).max(), abs=1e-5)
    to_ref = (ref_logprobs - logprobs)[trained]
    assert metrics["kl"] == pytest.approx(np.mean(np.exp(to_ref) - to_ref - 1), rel=1e-4)
    assert metrics["update_skipped"] == 0
    assert all(value.dtype == np.float32 and value.shape == () for value in metrics.values())


@pytest.fixture(scope="module")
def adam_run(tiny_config, params, reference):
    return Run(tiny_config, params, reference, optimizer=ADAM)


def test_updates_lower_the_loss_compile_once_and_reuse_the_buffers(tiny_config, adam_run):
    before = adam_run.learner.num_compiles
    batch = batch_of(tiny_config)
    pointers, donated = pointers_of(adam_run.state), adam_run.state
    losses = [adam_run(batch)["loss"] for _ in range(4)]
    assert losses[3] < losses[0] - 0.03
    adam_run(batch_of(tiny_config, seed=1))
    assert adam_run.state.step == 5
    assert adam_run.learner.num_compiles == before + 1
    # The state lives where it lived: donated buffers are reused, and the old ones cannot be read by mistake.
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert pointers_of(adam_run.state) == pointers


def pointers_of(state):
    """Where the arrays of parameters and moments are."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return {leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.size > 1}


@pytest.mark.parametrize("fault", ["nothing to train on", "nan advantage", "infinite advantage"])
def test_a_batch_that_teaches_nothing_or_breaks_changes_nothing_but_the_step_count(
    tiny_config, adam_run, fault
):
    adam_run(batch_of(tiny_config))  # moments are not zero
    before = jax.device_get(adam_run.state)
    batch = batch_of(tiny_config)
    first = np.argwhere(batch.loss_mask)[0]
    if fault == "nothing to train on":
        batch = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    elif fault == "nan advantage":
        batch.advantages[tuple(first)] = np.nan
    else:
        batch.advantages[tuple(first)] = np.inf
    # Shapes as before: a masked batch must not compile anew, so its bounds are those of the others.
    minibatch = adam_run.learner.prepare(batch, adam_run.reference, scores=NO_SCORES, kl_coef=0.0)
    minibatch = minibatch._replace(bounds=row_bounds(batch_of(tiny_config)))
    adam_run.state, metrics = adam_run.learner.train_step(adam_run.state, minibatch)
    after = jax.device_get(adam_run.state)
    assert metrics["update_skipped"] == 1
    assert after.step == before.step + 1
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.opt_state, after.key),
        (before.params, before.opt_state, before.key),
    )
    if fault == "nothing to train on":
        assert metrics["loss"] == metrics["grad_norm"] == 0
        assert all(np.isfinite(value) for value in metrics.values())
    adam_run(batch_of(tiny_config))
    assert not np.array_equal(
        adam_run.state.params["embed"]["embedding"], before.params["embed"]["embedding"]
    )


def test_with_a_rate_of_zero_nothing_moves_and_the_mismatch_is_flat(tiny_config, params):
    """And the KL to the policy itself stays zero, though the reference is scored by a program of its own."""
    still = make_optimizer(OptimizerConfig(learning_rate=0.0, num_steps=3, weight_decay=0.1))
    run = Run(tiny_config, params, params, optimizer=still)
    metrics = [run(batch_of(tiny_config)) for _ in range(3)]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(run.state.params), params)
    for name in ("mismatch_kl", "logprob_delta_mean", "loss", "grad_norm"):
        assert metrics[0][name] == metrics[1][name] == metrics[2][name], name
    assert metrics[0]["grad_norm"] > 0
    assert max(update["kl"] for update in metrics) < 1e-9


def test_an_update_moves_nothing_between_host_and_device(tiny_config, adam_run):
    on_host = batch_of(tiny_config)
    minibatch = adam_run.learner.prepare(on_host, adam_run.reference, scores=NO_SCORES, kl_coef=0.0)
    assert minibatch.num_samples == 18
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        adam_run.learner.train_step(adam_run.state, minibatch._replace(batch=on_host))
    adam_run.state, _ = adam_run.learner.train_step(adam_run.state, minibatch)


def test_the_kl_is_taken_off_the_reward_before_advantages(tiny_config, params, reference):
    """Advantages of score - coef * sum of log(behavior / reference); a sample without a verdict has none."""
    run = Run(
        tiny_config,
        params,
        reference,
        optimizer=ADAM,
        kl_in_reward=True,
        adv_estimator="dr_grpo",
        objective=ObjectiveConfig(),
    )
    groups = random_groups(tiny_config.vocab_size, ((3, (4, 4)), (5, (6, 2))))
    batch = pack_groups(groups, [np.zeros(2)] * 2, length=32, rows=2)
    scores = np.array([[1.0, 0.0], [1.0, np.nan]])
    logprobs, _ = batch_logprobs(
        tiny_config, reference, batch, transform=CONFIG.transform, bounds=RowBounds(32)
    )
    gap = np.where(batch.loss_mask > 0, batch.behavior_logprobs - logprobs, 0)
    gaps = [gap[batch.sample_ids == sample].sum() for sample in range(4)]
    for coef in (0.0, 0.5):
        found = run.learner.prepare(batch, run.reference, scores=scores, kl_coef=coef).batch
        net = [1 - coef * gaps[0], 0 - coef * gaps[1]]
        expected = [net[0] - np.mean(net), net[1] - np.mean(net), 0, 0]
        for sample, value in enumerate(expected):
            of_sample = np.asarray(found.advantages)[batch.sample_ids == sample]
            np.testing.assert_allclose(of_sample, value, atol=1e-5)
        assert not np.any(np.asarray(found.advantages)[batch.loss_mask == 0])


def test_memory_of_an_update_is_that_of_parameters_gradients_and_moments():
    """A model whose parameters dominate: at most 20 bytes a parameter and a quarter, a frozen reference (4) included.

    4 parameter + 8 moments + 4 gradient + 4 reference. What is not bytes per parameter, the activations of 2 x 32
    tokens (saved layer inputs, one layer's intermediates, one chunk of logits), is under 2 bytes a parameter here.
    """
    model = ModelConfig(
        vocab_size=2048,
        num_layers=6,
        embed_dim=256,
        mlp_dim=768,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )
    mesh = make_mesh(devices=jax.devices()[:1])
    learner = make_learner(model, ADAM, mesh, state_shardings(model, ADAM, mesh), CONFIG)
    groups = random_groups(model.vocab_size)
    batch = pack_groups(groups, [np.ones(len(g.trajectories)) for g in groups], length=32)
    with jax.set_mesh(mesh):
        memory = (
            learner._update.lower(  # pyright: ignore
                abstract_state(model, ADAM, mesh),
                jax.device_put(batch, row_sharding(mesh)),
                bounds=RowBounds(32),
                num_samples=6,
            )
            .compile()
            .memory_analysis()
        )
    state = memory.argument_size_in_bytes / model.num_params
    assert state == pytest.approx(12, abs=0.1)
    assert memory.alias_size_in_bytes == pytest.approx(memory.output_size_in_bytes, rel=1e-3)
    temporary = memory.temp_size_in_bytes / model.num_params
    assert temporary < 4 + 2  # the gradient, and activations
    assert state + temporary + 4 < 20 * 1.25


@pytest.mark.slow
def test_bfloat16_activations_are_kept_in_bfloat16(tiny_config):
    """Layers, each more of which keeps the activations it got: two bytes a number."""
    mesh = make_mesh(devices=jax.devices()[:1])
    config = dataclasses.replace(CONFIG, dtype="bfloat16", remat="full")
    batch = jax.device_put(batch_of(tiny_config), row_sharding(mesh))

    def temporary(num_layers: int) -> int:
        model = dataclasses.replace(tiny_config, num_layers=num_layers)
        learner = make_learner(model, ADAM, mesh, state_shardings(model, ADAM, mesh), config)
        with jax.set_mesh(mesh):
            update = learner._update.lower(  # pyright: ignore
                abstract_state(model, ADAM, mesh), batch, bounds=RowBounds(32), num_samples=12
            ).compile()
        gradients = 4 * (model.num_params - tiny_config.num_params)
        return update.memory_analysis().temp_size_in_bytes - gradients

    kept = (temporary(50) - temporary(10)) / (40 * batch.tokens.size * tiny_config.embed_dim)
    assert kept == pytest.approx(2, abs=0.2)


def test_the_gradient_step_adds_up_losses_it_knows_nothing_of():
    """0.5 * sum (x - p)^2 over pieces of one number each: the gradient is sum (p - x)."""

    def loss_fn(p, x):
        loss = 0.5 * (x - p) ** 2
        return loss, {"loss": loss, "distance_max": jnp.abs(x - p)}

    state = TrainState(
        step=jnp.int32(3), params=jnp.float32(1.0), opt_state=(), key=jnp.zeros(2, jnp.uint32)
    )
    sgd = optax.GradientTransformation(
        lambda params: (), lambda grads, state, params=None: (-0.5 * grads, state)
    )
    for pieces in ([2.0, 5.0], [5.0]):
        new, metrics = gradient_step(
            state,
            jnp.array(pieces),
            loss_fn=loss_fn,
            optimizer=sgd,
            trains=jnp.bool_(True),
        )
        total = sum(1.0 - x for x in pieces)
        assert float(new.params) == 1.0 - 0.5 * total
        assert int(new.step) == 4
        assert float(metrics["loss"]) == sum(0.5 * (x - 1) ** 2 for x in pieces)
        assert float(metrics["distance_max"]) == 4.0
        assert float(metrics["grad_norm"]) == abs(total)


@pytest.mark.parametrize(("most", "bound"), [(0, 21), (1, 21), (21, 21), (22, 41), (41, 41)])
def test_the_bound_of_targets_is_half_a_row_or_a_whole_one(tiny_config, most, bound):
    """No row has more; and two programs serve all batches."""
    batch = batch_of(tiny_config, length=41)
    mask = np.zeros_like(batch.loss_mask)
    mask[3, :most] = 1
    assert row_bounds(dataclasses.replace(batch, loss_mask=mask)).num_targets == bound


def test_metrics_of_several_updates_are_means_but_for_what_compares_with_the_sampler():
    updates = [
        {"loss": np.float32(1), "mismatch_kl": np.float32(0), "logprob_delta_max": np.float32(2)},
        {"loss": np.float32(3), "mismatch_kl": np.float32(9), "logprob_delta_max": np.float32(9)},
    ]
    assert merge_updates(updates) == {"loss": 2.0, "mismatch_kl": 0.0, "logprob_delta_max": 2.0}
    assert merge_updates([]) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remat": "half"}, "train.remat is 'half'; expected one of full, dots, offload, none"),
        ({"dtype": "float16"}, "dtype is 'float16'; expected float32 or bfloat16"),
        ({"transform": LogitTransform(temperature=0.0)}, "greedy samples have no gradient"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_micro_batches_that_do_not_divide_are_refused_with_the_numbers(
    tiny_config, params, reference
):
    with pytest.raises(ValueError, match=r"micro_rows \(3\) must be divisible by .* axes \(4\)"):
        Run(
            tiny_config,
            params,
            reference,
            optimizer=ADAM,
            sizes={"data": 2, "fsdp": 2, "tensor": 2},
            micro_rows=3,
        )
    run = Run(tiny_config, params, reference, optimizer=ADAM, micro_rows=3)
    with pytest.raises(ValueError, match=r"8 rows must be divisible by train.micro_rows \(3\)"):
        run(batch_of(tiny_config))


def test_on_a_cpu_every_device_gets_two_rows_unless_a_micro_batch_has_one(tiny_config):
    mesh = make_mesh(data=4, fsdp=2)
    for micro_rows, expected in ((0, 16), (8, 8)):
        config = dataclasses.replace(CONFIG, micro_rows=micro_rows)
        shardings = state_shardings(tiny_config, ADAM, mesh)
        learner = make_learner(tiny_config, ADAM, mesh, shardings, config)
        assert (learner.num_shards, learner.min_rows) == (8, expected)


def test_the_bound_of_prefixes_covers_every_token_that_another_segment_continues(tiny_config):
    groups = random_groups(tiny_config.vocab_size)
    advantages = [np.zeros(len(group.trajectories)) for group in groups]
    for length, share in ((48, True), (80, True), (336, True), (80, False)):
        batch = pack_groups(groups, advantages, length=length, share_prompt=share)
        width = row_bounds(batch).prefix_width
        assert width in ({16, 48, 80, 176, 336} if share else {0})
        last = [
            column
            for row, continued in zip(batch.segment_ids, batch.prefix_ids, strict=True)
            for column, segment in enumerate(row)
            if segment and segment in continued
        ]
        assert max(last, default=-1) < width
        assert length == 48 or width < length  # prompts come first, so it is a real bound
