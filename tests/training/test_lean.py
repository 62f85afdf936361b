"""Parameters in bfloat16, moments in 8 bits, state on the host: what each costs, keeps, and gives up."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import row_sharding
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.training.adam8bit import Blocks, block_size, decode, encode
from rlvr_jax.training.lean import WithMaster, check_host_memory, stochastic_round
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_state,
    init_state,
    make_optimizer,
    state_shardings,
)
from rlvr_jax.training.step import gradient_step
from rlvr_jax.types import TrainState

ROUNDED = {"param_dtype": "bfloat16", "master_weights": False, "stochastic_rounding": True}


def test_stochastic_rounding_has_the_right_mean_and_takes_one_of_two_neighbours():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=256) * 10.0 ** rng.uniform(-6, 6, size=256)).astype(np.float32)
    below = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    above = (
        ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(1 << 16)).view(np.float32)
    ).astype(np.float64)
    N = 20_000
    keys = jax.random.split(jax.random.key(0), N)
    drawn = np.asarray(jax.jit(jax.vmap(lambda key: stochastic_round(jnp.asarray(x), key)))(keys))
    drawn = drawn.astype(np.float64)
    assert np.all((drawn == below) | (drawn == above))
    chance = (x.astype(np.float64) - below) / (above - below)
    error = (drawn.mean(0) - x.astype(np.float64)) / np.abs(above - below)
    deviation = np.sqrt(chance * (1 - chance) / N)
    assert np.abs(error / deviation).max() < 4.5  # one of 256 beyond it: 0.2 % of the seeds
    assert np.abs(np.mean(error / deviation)) < 4.5 / 16  # nor do all lean to one side
    toward_zero = np.sign(x) * error / deviation
    assert np.abs(toward_zero.mean()) < 4.5 / 16


def test_stochastic_rounding_leaves_what_needs_none_alone_and_is_the_same_on_any_mesh():
    key = jax.random.key(3)
    exact = jnp.array([0.0, -0.0, 1.0, -1.5, 2.0**-130, jnp.inf, -jnp.inf], jnp.float32)
    np.testing.assert_array_equal(stochastic_round(exact, key), exact.astype(jnp.bfloat16))
    assert np.isnan(stochastic_round(jnp.array([jnp.nan]), key)).all()
    x = jax.random.normal(key, (16, 32))
    expected = np.asarray(jax.jit(stochastic_round)(x, key))
    assert not np.array_equal(expected, stochastic_round(x, jax.random.key(4)))
    spread = jax.device_put(x, row_sharding(make_mesh(2, 2, 2)))
    np.testing.assert_array_equal(jax.jit(stochastic_round)(spread, key), expected)


def published_values(signed):
    """The 256 values of dynamic quantisation as the paper's library makes them (its create_dynamic_map)."""
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else ())]
    return np.sort(values)


@pytest.mark.parametrize("signed", [True, False])
def test_a_moment_in_8_bits_is_the_nearest_of_the_published_values_times_its_blocks_scale(signed):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(8, 512)) * 10.0 ** rng.uniform(-9, 0, size=(8, 512))).astype(np.float32)
    x = x if signed else np.abs(x)
    x[0, :256] = 0.0
    blocks = jax.jit(functools.partial(encode, block=256, signed=signed))(x)
    assert blocks.codes.dtype == np.uint8 and blocks.codes.shape == x.shape
    scales = np.abs(x.reshape(8, 2, 256)).max(-1)
    np.testing.assert_array_equal(blocks.scales, scales)
    share = x.reshape(8, 2, 256).astype(np.float64) / np.maximum(scales, 1e-30)[..., None]
    values = published_values(signed)
    distance = np.abs(share[..., None] - values)
    chosen = values[np.asarray(blocks.codes).reshape(share.shape)]
    np.testing.assert_allclose(np.abs(share - chosen), distance.min(-1), atol=1e-7)
    expected = (chosen * scales[..., None]).reshape(x.shape)
    np.testing.assert_allclose(decode(blocks), expected, rtol=1e-6, atol=1e-12)


MODEL = ModelConfig(
    vocab_size=128,
    num_layers=2,
    embed_dim=64,
    mlp_dim=192,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 8.0, 8.01),
        ({"name": "adamw_8bit"}, 2.0, 2.3),  # blocks of 64 here: two scales are 2 * 4 / 64
        ({"param_dtype": "bfloat16"}, 12.0, 12.01),
        (ROUNDED, 8.0, 8.01),
        ({**ROUNDED, "name": "adamw_8bit"}, 2.0, 2.3),
    ],
)
def test_optimizer_state_takes_the_bytes_a_parameter_that_are_said(options, least, most):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, num_steps=1, **options))
    mesh = make_mesh(2, 2, 2)
    params = init_params(MODEL, jax.random.key(0))
    state = init_state(MODEL, params, optimizer, mesh, seed=0)
    layers = state.params["layers"]
    size = 2 if options.get("param_dtype") else 4
    assert bytes_of(state.params) == size * sum(leaf.size for leaf in jax.tree.leaves(params))
    # Of the layers' kernels: embeddings and norms keep float32 moments.
    kernels = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim == 3)
    of_kernels = sum(
        leaf.size * leaf.dtype.itemsize
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if leaf.ndim == 3
    )
    assert least <= of_kernels / kernels <= most
    expected = abstract_state(MODEL, optimizer, mesh)
    described = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(expected)]
    assert described == [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]


def test_codes_and_scales_are_sharded_like_their_parameters():
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1e-3, num_steps=1, name="adamw_8bit", grad_clip=0.0)
    )
    shardings = state_shardings(MODEL, optimizer, make_mesh(1, 4, 2))
    mu = shardings.opt_state[0].mu["layers"]
    assert isinstance(mu["mlp"]["gate"], Blocks)
    assert block_size("layers/mlp/gate", (2, 64, 192)) == 64
    assert mu["mlp"]["gate"].codes == shardings.params["layers"]["mlp"]["gate"]
    # 192 / 64 scales do not divide over tensor=2: rows are spread, blocks are not.
    assert mu["mlp"]["gate"].scales.spec[1] and len(mu["mlp"]["gate"].scales.spec) == 2
    assert mu["attn"]["o"].scales.spec == PartitionSpec(None, "tensor")


def regression(optimizer, steps, *, seed=0):
    """Parameters and losses of a two-layer network that learns to fit another, by ``gradient_step``."""
    rng = np.random.default_rng(7)
    hidden, teacher, first, last, inputs = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((64, 128), (128,), (64, 128), (128, 32), (steps, 64, 64))
    )
    targets = np.tanh(inputs @ hidden / 8) @ teacher / 8
    params = {"first": {"kernel": first / 8}, "last": {"kernel": last / 11}}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), params)

    def loss(params, piece):
        x, y = piece
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)
        out = jnp.tanh(x @ wide["first"]["kernel"]) @ wide["last"]["kernel"]
        error = jnp.mean((out.sum(-1) - y) ** 2)
        return error, {"loss": error}

    dtype = getattr(optimizer, "param_dtype", "float32")
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=jax.jit(optimizer.init)(params),
        key=jax.random.key_data(jax.random.key(seed)),
    )

    @jax.jit
    def train(state):
        def one(state, piece):
            pieces = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), piece)
            state, metrics = gradient_step(
                state, pieces, loss_fn=loss, optimizer=optimizer, trains=jnp.bool_(True)
            )
            return state, metrics["loss"]

        return jax.lax.scan(one, state, (inputs, targets))

    state, losses = train(state)
    return state, np.asarray(losses, np.float64)


def optimizer_of(rate, **options):
    return make_optimizer(OptimizerConfig(learning_rate=rate, num_steps=1, **options))


def test_8_bit_moments_train_as_float32_ones_do():
    _, losses = regression(optimizer_of(1e-2), 300)
    short, losses_8bit = regression(optimizer_of(1e-2, name="adamw_8bit"), 300)
    assert isinstance(short.opt_state[1][0].mu["first"]["kernel"], Blocks)
    fell, fell_8bit = (np.mean(of[:5]) - np.mean(of[-50:]) for of in (losses, losses_8bit))
    assert fell > 0.8 * np.mean(losses[:5])
    assert fell_8bit == pytest.approx(fell, rel=0.05)
    np.testing.assert_allclose(losses_8bit[:10], losses[:10], rtol=0.05)


def test_small_updates_arrive_with_a_float32_copy_or_random_rounding_and_are_lost_without():
    """Adam moves every parameter by the rate a step, here 1/10,000 of a typical one: less than bfloat16 can say."""
    steps, rate = 200, 1e-5
    exact, losses = regression(optimizer_of(rate), steps)
    found = {
        name: regression(optimizer_of(rate, param_dtype="bfloat16", **options), steps)
        for name, options in {
            "master": {},
            "rounding": {"master_weights": False, "stochastic_rounding": True},
            "neither": {"master_weights": False},
        }.items()
    }
    start, _ = regression(optimizer_of(0.0), 1)

    def moved(state):
        ours = jax.tree.map(
            lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64),
            state.params,
            start.params,
        )
        return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(ours)])

    target = moved(exact)

    def share(state):
        """How much of the float32 run's way was gone: 1 is all of it."""
        return moved(state) @ target / (target @ target)

    master = found["master"][0]
    assert isinstance(master.opt_state, WithMaster)
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(p, m.astype(jnp.bfloat16)),
        master.params,
        master.opt_state.master,
    )
    # The copy is where the float32 run is, but for what gradients at rounded parameters change.
    away = jax.tree.map(lambda m, p: np.abs(m - p).mean(), master.opt_state.master, exact.params)
    assert max(jax.tree.leaves(away)) < 0.1 * np.abs(target).mean()
    assert share(master) == pytest.approx(1, abs=0.03)
    assert share(found["rounding"][0]) == pytest.approx(1, abs=0.03)
    assert share(found["neither"][0]) < 0.1
    # Losses are those of rounded parameters, which lag behind the copy by up to half a step of bfloat16.
    np.testing.assert_allclose(found["master"][1], losses, rtol=0.05)


def test_random_rounding_is_keyed_by_seed_and_step():
    optimizer = optimizer_of(1e-3, **ROUNDED)
    a, b, c = (regression(optimizer, 5, seed=seed)[0].params for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert not np.array_equal(a["first"]["kernel"], c["first"]["kernel"])


def test_state_on_the_host_gives_the_same_numbers_from_another_memory(tmp_path):
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    params = init_params(MODEL, jax.random.key(0))
    found = []
    for offload in (False, True):
        optimizer = optimizer_of(
            1e-2, name="adamw_8bit", param_dtype="bfloat16", host_offload=offload
        )
        shardings = state_shardings(MODEL, optimizer, mesh)
        state = init_state(MODEL, params, optimizer, mesh, seed=0)

        def loss(params, piece):
            parts = [jnp.sum(jnp.sin(leaf * piece)) for leaf in jax.tree.leaves(params)]
            return jnp.sum(jnp.stack(parts)), {}

        step = jax.jit(
            functools.partial(gradient_step, loss_fn=loss, optimizer=optimizer),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        for trains in (True, True, False):
            old = state
            state, _ = step(state, jnp.ones((1,)), trains=jnp.bool_(trains))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.opt_state))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state)}
        assert kinds == ({"pinned_host"} if offload else {"device"})
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.params)} == {"device"}
        found.append(state)
    jax.tree.map(np.testing.assert_array_equal, *found)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, found[1], {})
        checkpointer.wait()
        restored = checkpointer.restore(abstract_state(MODEL, optimizer, mesh))
    assert restored is not None
    jax.tree.map(np.testing.assert_array_equal, restored.state, found[1])
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored.state, found[1])
    assert all(jax.tree.leaves(same))


def test_a_backend_without_host_memory_is_named_with_what_it_has():
    class Memory:
        kind = "unpinned_host"

    class Device:
        platform = "toaster"

        def addressable_memories(self):
            return [Memory()]

    mesh: Any = types.SimpleNamespace(devices=np.array([Device()]))
    with pytest.raises(
        ValueError,
        match=r"optimizer.host_offload .* expects devices with pinned_host memory; got backend "
        "'toaster' with unpinned_host: change config.optimizer.host_offload",
    ):
        check_host_memory(mesh, "optimizer.host_offload")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adam"}, "optimizer.name is 'adam'; expected adamw or adamw_8bit"),
        ({"param_dtype": "float16"}, "param_dtype is 'float16'; expected float32 or bfloat16"),
        ({"stochastic_rounding": True}, "what is trained is float32, which is not rounded"),
        (
            {"param_dtype": "bfloat16", "stochastic_rounding": True},
            "stochastic_rounding and optimizer.master_weights are both on",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(learning_rate=1.0, num_steps=1, **options)
