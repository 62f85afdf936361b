"""The train state and its optimizer: schedules in literal numbers, placement, and what a restore expects."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.models.decoder import PARAM_AXES, init_params
from rlvr_jax.models.layout import nest
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_state,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    state_shardings,
)


def rates(steps, **options):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=8.0, num_steps=10, **options))
    return [float(schedule(step)) for step in steps]


def test_schedules_in_numbers():
    assert rates([0, 5, 100]) == [8, 8, 8]
    assert rates([0, 5, 10, 100], schedule="linear", final_fraction=0.0) == [8, 4, 0, 0]
    assert rates([0, 5, 10, 100], schedule="cosine", final_fraction=0.5) == [8, 6, 4, 4]
    assert rates([10], schedule="linear") == [pytest.approx(0.8)]


def test_warm_up_moves_from_the_first_step_and_ends_at_the_peak():
    assert rates([0, 1, 2, 3, 4, 9], warmup_steps=3) == [2, 4, 6, 8, 8, 8]
    linear = rates([0, 3, 4, 10], schedule="linear", warmup_steps=3, final_fraction=0.0)
    np.testing.assert_allclose(linear, [2, 8, 8 * 6 / 7, 0], rtol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "step"}, "optimizer.schedule is 'step'; expected constant, linear or cosine"),
        ({"learning_rate": -1.0}, "optimizer.learning_rate is -1.0; expected >= 0"),
        ({"warmup_steps": -1}, "optimizer.warmup_steps is -1"),
        ({"weight_decay": -0.1}, "optimizer.weight_decay is -0.1"),
        ({"grad_clip": -1.0}, "optimizer.grad_clip is -1.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"learning_rate": 1.0, "num_steps": 1} | values)


PARAMS = {"layer": {"kernel": jnp.array([[2.0, -4.0]]), "scale": jnp.array([3.0])}}


def change(config, gradient):
    optimizer = make_optimizer(config)
    updates, _ = optimizer.update(gradient, optimizer.init(PARAMS), PARAMS)
    return jax.tree.map(
        lambda a, b: np.asarray(a - b), optax.apply_updates(PARAMS, updates), PARAMS
    )


def test_the_first_step_of_adam_is_the_rate_in_the_direction_of_the_gradient():
    gradient = {"layer": {"kernel": jnp.array([[1.0, -2.0]]), "scale": jnp.array([0.0])}}
    moved = change(OptimizerConfig(learning_rate=0.1, num_steps=1), gradient)
    np.testing.assert_allclose(moved["layer"]["kernel"], [[-0.1, 0.1]], rtol=1e-4)
    np.testing.assert_array_equal(moved["layer"]["scale"], [0.0])


def test_what_is_a_matrix_in_a_layer_decays_and_norms_and_biases_do_not():
    params = nest({path: jnp.ones((2,) * len(axes)) for path, axes in PARAM_AXES.items()})
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.5, num_steps=1, weight_decay=0.1))
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(params), params)
    for path, change in tree_paths(updates).items():
        rank = sum(axis != "layers" for axis in PARAM_AXES[path])
        np.testing.assert_allclose(change, -0.05 if rank > 1 else 0.0, rtol=1e-5, err_msg=path)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_the_gradient_is_clipped_by_its_global_norm_unless_turned_off(clip):
    """With eps as large as the gradient, Adam's step depends on its length: 5 / (5 + 5) or 1 / (1 + 5), 3-4-5."""
    config = OptimizerConfig(learning_rate=1.0, num_steps=1, eps=5.0, grad_clip=clip)
    gradient = {"layer": {"kernel": jnp.array([[3.0, 0.0]]), "scale": jnp.array([4.0])}}
    moved = change(config, gradient)
    length = 1.0 / 5 if clip else 1.0
    expected = [3 * length / (3 * length + 5), 4 * length / (4 * length + 5)]
    np.testing.assert_allclose(moved["layer"]["kernel"][0, 0], -expected[0], rtol=1e-4)
    np.testing.assert_allclose(moved["layer"]["scale"][0], -expected[1], rtol=1e-4)


OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-3, num_steps=10))


def test_moments_are_sharded_like_their_parameters(tiny_config):
    mesh = make_mesh(2, 2, 2)
    shardings = state_shardings(tiny_config, OPTIMIZER, mesh)
    assert shardings.step.is_fully_replicated and shardings.key.is_fully_replicated
    params = tree_paths(shardings.params)
    assert not params["layers/attn/q"].is_fully_replicated
    adam = shardings.opt_state[1][0]
    assert tree_paths(adam.mu) == tree_paths(adam.nu) == params
    assert adam.count.is_fully_replicated


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({}, (2, 1, 4), r"num_kv_heads \(2\) must be divisible by the tensor axis \(4\)"),
        (
            {"vocab_size": 129},
            (4, 1, 2),
            r"embed/embedding: axis 'vocab' of size 129 .* tensor \(2\)",
        ),
        ({"embed_dim": 20}, (1, 8, 1), r"axis 'embed' of size 20 must be divisible .* fsdp \(8\)"),
        ({"mlp_dim": 63}, (4, 1, 2), r"layers/mlp/down: axis 'mlp' of size 63 .* tensor \(2\)"),
    ],
)
def test_a_model_that_does_not_divide_over_the_mesh_is_refused_with_the_numbers(
    tiny_config, changes, sizes, message
):
    config = dataclasses.replace(tiny_config, **changes)
    with pytest.raises(ValueError, match=message + ".*change config.mesh"):
        state_shardings(config, OPTIMIZER, make_mesh(*sizes))


def test_a_state_is_what_its_description_says(tiny_config):
    mesh = make_mesh(2, 2, 2)
    params = jax.tree.map(np.asarray, init_params(tiny_config, jax.random.key(0)))
    state = init_state(tiny_config, params, OPTIMIZER, mesh, seed=7)
    expected = abstract_state(tiny_config, OPTIMIZER, mesh)

    def check(leaf, description):
        assert (leaf.shape, leaf.dtype) == (description.shape, description.dtype)
        assert leaf.sharding.is_equivalent_to(description.sharding, leaf.ndim)

    jax.tree.map(check, state, expected)
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert state.step == 0
    np.testing.assert_array_equal(state.key, jax.random.key_data(jax.random.key(7)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


def test_a_state_has_its_own_copy_of_the_parameters(tiny_config):
    """Donating the state must not delete the weights it was made of: the reference is one of them."""
    mesh = make_mesh(devices=jax.devices()[:1])
    params = jax.device_put(init_params(tiny_config, jax.random.key(0)), jax.devices()[0])
    state = init_state(tiny_config, params, OPTIMIZER, mesh, seed=0)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert not pointers & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.params)}
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))
