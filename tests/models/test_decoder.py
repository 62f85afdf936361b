"""The decoder: scanned or unrolled, packed or plain, padded or not, on any mesh, it is the same function."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import (
    PARAM_AXES,
    REMAT_POLICIES,
    abstract_params,
    attend_rows,
    bind,
    init_params,
)
from rlvr_jax.models.policy_head import LogitTransform, RowBounds, batch_logprobs
from rlvr_jax.types import TrainBatch
from tests.groups import random_groups


@pytest.fixture(scope="module")
def params(tiny_config):
    params = init_params(tiny_config, jax.random.key(0))
    params["embed"]["embedding"] *= 20
    return params


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def hidden_of(params, tokens, positions, segment_ids, prefix_ids, *, config, dtype=jnp.float32):
    """[B, T, D]"""
    attend = attend_rows(segment_ids, prefix_ids)
    hidden, _ = bind(config, params)(tokens.reshape(-1), positions.reshape(-1), attend, dtype=dtype)
    return hidden.reshape(*tokens.shape, -1)


def packed(vocab_size, *, length=32, **options) -> TrainBatch:
    groups = random_groups(vocab_size)
    rng = np.random.default_rng(1)
    advantages = [rng.normal(size=len(group.trajectories)) for group in groups]
    return pack_groups(groups, advantages, length=length, **options)


def hidden_of_batch(params, config, batch, **options):
    return hidden_of(
        params,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        batch.prefix_ids,
        config=config,
        **options,
    )


@functools.partial(jax.jit, static_argnames=("config", "remat"))
def loss_and_gradient(params, batch, *, config, remat="none"):
    def loss(params):
        logprobs, entropy = batch_logprobs(
            config,
            params,
            batch,
            transform=LogitTransform(),
            bounds=RowBounds(batch.tokens.shape[1]),
            remat=remat,
        )
        by_sample = jax.ops.segment_sum(
            logprobs.ravel(), jnp.where(batch.sample_ids < 0, 6, batch.sample_ids).ravel(), 7
        )
        return jnp.sum(batch.advantages * logprobs + 0.1 * entropy), by_sample[:6]

    return jax.value_and_grad(loss, has_aux=True)(params)


def test_scanned_and_unrolled_layers_compute_the_same(tiny_config, params):
    batch = packed(tiny_config.vocab_size)

    @jax.jit
    def unrolled(params):
        model = bind(tiny_config, params)
        attend = attend_rows(batch.segment_ids, batch.prefix_ids)
        hidden, caches, routings = model.unrolled(
            model.unstack(jnp.float32),
            jnp.asarray(batch.tokens.reshape(-1)),
            jnp.asarray(batch.positions.reshape(-1)),
            attend,
            [None] * tiny_config.num_layers,
        )
        assert caches == routings == [None] * tiny_config.num_layers
        return hidden.reshape(*batch.tokens.shape, -1)

    scanned = hidden_of_batch(params, tiny_config, batch)
    np.testing.assert_allclose(unrolled(params), scanned, atol=1e-5)


def test_packed_trees_have_the_logprobs_and_gradients_of_plain_sequences(tiny_config, params):
    (loss, by_sample), gradient = loss_and_gradient(
        params, packed(tiny_config.vocab_size), config=tiny_config
    )
    assert np.all(by_sample < 0)
    # One sequence a row, from its start, no shared prompt.
    plain = packed(tiny_config.vocab_size, length=16, share_prompt=False)
    assert plain.tokens.shape == (6, 16)
    (plain_loss, plain_by_sample), plain_gradient = loss_and_gradient(
        params, plain, config=tiny_config
    )
    np.testing.assert_allclose(by_sample, plain_by_sample, atol=1e-4)
    np.testing.assert_allclose(loss, plain_loss, atol=1e-4)
    for name, leaf in tree_paths(gradient).items():
        other = tree_paths(plain_gradient)[name]
        scale = float(jnp.abs(other).max())
        assert scale > 1e-3, name
        np.testing.assert_allclose(leaf, other, atol=1e-5 * scale, err_msg=name)


def test_a_segment_sees_its_prompt_and_nothing_else_of_its_row(tiny_config, params):
    batch = packed(tiny_config.vocab_size)
    assert batch.tokens.shape == (2, 32)
    before = np.asarray(hidden_of_batch(params, tiny_config, batch))
    for row, segment in {(r, s) for r, ids in enumerate(batch.segment_ids) for s in ids if s}:
        inside = np.zeros(batch.tokens.shape, bool)
        inside[row] = batch.segment_ids[row] == segment
        tokens = np.where(inside, (batch.tokens + 1) % tiny_config.vocab_size, batch.tokens)
        after = np.asarray(
            hidden_of_batch(params, tiny_config, dataclasses.replace(batch, tokens=tokens))
        )
        reached = inside.copy()
        reached[row] |= batch.prefix_ids[row] == segment
        changed = np.any(after != before, axis=-1) & (batch.segment_ids > 0)
        np.testing.assert_array_equal(changed, reached)


def test_a_token_sees_no_later_one(tiny_config, params):
    tokens = np.random.default_rng(0).integers(0, tiny_config.vocab_size, (1, 16))
    positions, ones = np.arange(16)[None], np.ones((1, 16), np.int32)
    before = hidden_of(params, tokens, positions, ones, 0 * ones, config=tiny_config)
    tokens[0, 9] += 1
    after = hidden_of(params, tokens, positions, ones, 0 * ones, config=tiny_config)
    changed = np.any(np.asarray(after != before), axis=-1)[0]
    assert changed.tolist() == [False] * 9 + [True] * 7


def test_padding_changes_nothing(tiny_config, params):
    batch = packed(tiny_config.vocab_size)
    real = batch.segment_ids > 0
    assert not real.all()
    before = np.asarray(hidden_of_batch(params, tiny_config, batch))
    noisy = np.where(real, batch.tokens, 77)
    after = np.asarray(
        hidden_of_batch(params, tiny_config, dataclasses.replace(batch, tokens=noisy))
    )
    np.testing.assert_array_equal(after[real], before[real])
    (loss, _), gradient = loss_and_gradient(params, batch, config=tiny_config)
    (noisy_loss, _), noisy_gradient = loss_and_gradient(
        params, dataclasses.replace(batch, tokens=noisy), config=tiny_config
    )
    np.testing.assert_array_equal(noisy_loss, loss)
    jax.tree.map(np.testing.assert_array_equal, noisy_gradient, gradient)


def test_positions_count_from_the_start_of_a_sequence_only(tiny_config, params):
    """RoPE: moving a whole sequence by a constant changes nothing."""
    tokens = np.random.default_rng(0).integers(0, tiny_config.vocab_size, (1, 16))
    ones = np.ones((1, 16), np.int32)
    here, there = (
        hidden_of(params, tokens, np.arange(16)[None] + shift, ones, 0 * ones, config=tiny_config)
        for shift in (0, 50)
    )
    np.testing.assert_allclose(here, there, atol=1e-4)


@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dots", "offload"))]
)
def test_rematerialisation_changes_no_gradient(tiny_config, params, remat):
    assert REMAT_POLICIES.keys() == {"full", "dots", "offload", "none"}
    batch = packed(tiny_config.vocab_size)
    kept, recomputed = (
        loss_and_gradient(params, batch, config=tiny_config, remat=name)[1]
        for name in ("none", remat)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-5), recomputed, kept
    )


def test_the_program_of_a_gradient_does_not_grow_with_depth(tiny_config):
    def num_operations(num_layers):
        config = dataclasses.replace(tiny_config, num_layers=num_layers)
        batch = jax.tree.map(jnp.asarray, packed(config.vocab_size))
        lowered = loss_and_gradient.lower(
            abstract_params(config), batch, config=config, remat="full"
        )
        return lowered.as_text().count(" = ")

    assert num_operations(2) == num_operations(8) > 100


def test_in_bfloat16_activations_are_narrow_and_gradients_wide(tiny_config, params):
    batch = packed(tiny_config.vocab_size)
    hidden = hidden_of_batch(params, tiny_config, batch, dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    wide = hidden_of_batch(params, tiny_config, batch)
    assert wide.dtype == jnp.float32
    real = batch.segment_ids > 0
    difference = np.abs(np.asarray(hidden, np.float32) - wide)[real]
    assert 1e-4 < difference.mean() < 0.05
    logits = bind(tiny_config, params).logits(hidden.reshape(-1, tiny_config.embed_dim))
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_have_the_documented_layout(tiny_config, tied):
    config = dataclasses.replace(tiny_config, tie_embeddings=tied, num_layers=3)
    params = init_params(config, jax.random.key(0))
    paths = tree_paths(params)
    D, F, H = config.embed_dim, config.mlp_dim, config.head_dim
    N, K, V = config.num_heads, config.num_kv_heads, config.vocab_size
    expected = {
        "embed/embedding": (V, D),
        "layers/attn_norm/scale": (3, D),
        "layers/attn/q": (3, D, N * H),
        "layers/attn/k": (3, D, K * H),
        "layers/attn/v": (3, D, K * H),
        "layers/attn/o": (3, N * H, D),
        "layers/mlp_norm/scale": (3, D),
        "layers/mlp/gate": (3, D, F),
        "layers/mlp/up": (3, D, F),
        "layers/mlp/down": (3, F, D),
        "final_norm/scale": (D,),
    } | ({} if tied else {"head/kernel": (D, V)})
    assert {name: leaf.shape for name, leaf in paths.items()} == expected
    assert {leaf.dtype for leaf in paths.values()} == {jnp.dtype("float32")}
    assert sum(leaf.size for leaf in paths.values()) == config.num_params
    abstract = tree_paths(abstract_params(config))
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in abstract.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in paths.items()
    }
    assert set(paths) <= set(PARAM_AXES)
    assert all(len(PARAM_AXES[name]) == leaf.ndim for name, leaf in paths.items())
    # Scales of the initialisation; layers differ from one another.
    assert float(paths["layers/mlp/down"].std()) == pytest.approx(F**-0.5, rel=0.1)
    assert float(paths["embed/embedding"].std()) == pytest.approx(0.02, rel=0.1)
    assert not np.allclose(paths["layers/attn/q"][0], paths["layers/attn/q"][1])


def test_heads_that_do_not_share_keys_evenly_are_refused(tiny_config):
    with pytest.raises(
        ValueError, match=r"num_heads \(4\) must be a multiple of num_kv_heads \(3\)"
    ):
        dataclasses.replace(tiny_config, num_kv_heads=3)


def test_an_untied_head_is_used(tiny_config):
    config: ModelConfig = dataclasses.replace(tiny_config, tie_embeddings=False)
    params = init_params(config, jax.random.key(0))
    hidden = jax.random.normal(jax.random.key(1), (4, config.embed_dim))
    np.testing.assert_allclose(
        bind(config, params).logits(hidden), hidden @ params["head"]["kernel"], atol=1e-5
    )


def test_the_gradient_of_a_frequent_token_is_added_up_in_float32(tiny_config):
    tokens = jnp.zeros(1000, jnp.int32)

    def total(params):
        rows = bind(tiny_config, params)._embedded(tokens, jnp.bfloat16)
        return rows.astype(jnp.float32).sum()

    gradient = jax.grad(total)(init_params(tiny_config, jax.random.key(0)))
    np.testing.assert_array_equal(gradient["embed"]["embedding"][0], 1000.0)
