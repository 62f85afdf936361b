"""Sharding rules: every parameter has one, optimizer states follow, sizes that do not divide are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import (
    RULES,
    batch_sharding,
    constrain,
    param_shardings,
    replicated,
    row_sharding,
    sampler_sharding,
    shardings_like,
    spec,
    tree_paths,
)

AXES = {"a/kernel": ("embed", "mlp"), "b/scale": (None,)}
PARAMS = {"a": {"kernel": jnp.zeros((4, 6))}, "b": {"scale": jnp.zeros((5,))}}


def test_logical_axes_become_mesh_axes():
    assert spec("rows", None, "heads") == P(("data", "fsdp", "expert"), None, "tensor")
    with pytest.raises(KeyError):
        spec("no such axis")
    mesh = make_mesh(2, 2, 2)
    assert row_sharding(mesh).spec == P(("data", "fsdp", "expert"))
    assert batch_sharding(mesh).spec == P(("data", "fsdp", "expert"), "context")
    assert sampler_sharding(mesh).spec == P(("data", "fsdp", "expert", "context"))
    assert replicated(mesh).is_fully_replicated
    used = {axis for axes in RULES.values() if axes for axis in np.atleast_1d(axes)}
    assert used == set(mesh.axis_names)


def test_parameters_are_cut_by_their_axes():
    shardings = param_shardings(make_mesh(2, 2, 2), PARAMS, AXES)
    assert tree_paths(shardings).keys() == AXES.keys()
    assert shardings["a"]["kernel"].spec == P(("fsdp", "expert", "context"), "tensor")
    assert shardings["a"]["kernel"].shard_shape((4, 6)) == (2, 3)
    on_context = param_shardings(make_mesh(2, 1, 1, 1, 4), PARAMS, AXES)["a"]["kernel"]
    assert on_context.shard_shape((4, 6)) == (1, 6)
    assert shardings["b"]["scale"].is_fully_replicated


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 8, 1), r"a/kernel: axis 'embed' of size 4 must be divisible by mesh axis fsdp \(8\)"),
        ((1, 2, 1, 4), r"a/kernel: axis 'embed' of size 4 must be .* axis fsdpxexpert \(8\)"),
        ((1, 2, 1, 1, 4), r"a/kernel: axis 'embed' of size 4 must be .* axis fsdpxcontext \(8\)"),
        ((2, 1, 4), r"a/kernel: axis 'mlp' of size 6 must be divisible by mesh axis tensor \(4\)"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(sizes, message):
    with pytest.raises(ValueError, match=message + "; change config.mesh"):
        param_shardings(make_mesh(*sizes), PARAMS, AXES)


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(KeyError, match="c/kernel"):
        param_shardings(make_mesh(), {"c": {"kernel": jnp.zeros((8,))}}, AXES)


def test_moments_are_cut_like_their_parameters_and_the_rest_is_replicated():
    mesh = make_mesh(2, 2, 2)
    shardings = param_shardings(mesh, PARAMS, AXES)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    state = optimizer.init(PARAMS)
    paths = tree_paths_of(shardings_like(mesh, state, PARAMS, shardings))
    moments = {path: sharding for path, sharding in paths.items() if "kernel" in path}
    assert {path.split("/")[-3] for path in moments} == {"mu", "nu"}
    for path, sharding in paths.items():
        if path in moments:
            assert sharding == shardings["a"]["kernel"], path
        else:
            assert sharding.is_fully_replicated, path


def test_a_leaf_of_the_same_name_and_another_shape_is_replicated():
    mesh = make_mesh(2, 2, 2)
    shardings = param_shardings(mesh, PARAMS, AXES)
    other = {"a": {"kernel": jnp.zeros((6,))}, "x": {"a": {"kernel": jnp.zeros((4, 6))}}}
    found = shardings_like(mesh, other, PARAMS, shardings)
    assert found["a"]["kernel"].is_fully_replicated
    assert found["x"]["a"]["kernel"] == shardings["a"]["kernel"]


def tree_paths_of(tree):
    return {
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_activations_are_pinned_on_a_mesh_and_left_alone_without_one():
    x = jnp.arange(16.0).reshape(8, 2)
    pin = jax.jit(lambda x: constrain(x + 1, "rows", None))
    np.testing.assert_array_equal(pin(x), x + 1)
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: constrain(x + 1, "rows", None))(
            jax.device_put(x, replicated(mesh))
        )
    assert pinned.sharding.shard_shape(x.shape) == (2, 2)
    np.testing.assert_array_equal(pinned, x + 1)
