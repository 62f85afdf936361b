"""Experts against a dense sum over all of them, their gradient, the load-balancing loss, replay, and a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import param_shardings
from rlvr_jax.models import moe
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, abstract_params, attend_rows, bind, init_params
from rlvr_jax.models.moe import Load, Routing, expert_load, load_balancing_loss

CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    mlp_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=5,
    experts_per_token=2,
)
ROWS, LENGTH = 8, 16


@pytest.fixture(scope="module")
def params() -> Any:
    params = init_params(CONFIG, jax.random.key(0))
    params["embed"]["embedding"] *= 20
    return params


def tokens_and_segments() -> tuple[jax.Array, jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(1), (ROWS, LENGTH), 0, CONFIG.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    return tokens, positions, jnp.ones((ROWS, LENGTH), jnp.int32)


@functools.partial(jax.jit, static_argnames="config")
def routed(params: Any, replayed: jax.Array | None = None, *, config: ModelConfig = CONFIG) -> Any:
    tokens, positions, segments = tokens_and_segments()
    attend = attend_rows(segments, 0 * segments)
    hidden, _, routing = bind(config, params).routed(
        tokens.reshape(-1), positions.reshape(-1), attend, replayed=replayed
    )
    return hidden, routing


def dense_experts(params: Any, x: jax.Array, config: ModelConfig) -> jax.Array:
    """Every expert on every token, weighted by what the router gives the chosen ones."""
    probs = jax.nn.softmax(x @ params["router"])
    least = jnp.sort(probs, axis=-1)[:, -config.experts_per_token, None]
    weights = jnp.where(probs >= least, probs, 0)
    if config.norm_expert_weights:
        weights /= weights.sum(-1, keepdims=True)
    gate = jax.nn.silu(jnp.einsum("nd,edf->enf", x, params["gate"]))
    up = jnp.einsum("nd,edf->enf", x, params["up"])
    return jnp.einsum("enf,efd,ne->nd", gate * up, params["down"], weights)


@pytest.mark.parametrize("normed", [True, False])
def test_experts_and_their_gradient_are_those_of_a_dense_sum(params: Any, normed: bool) -> None:
    config = dataclasses.replace(CONFIG, norm_expert_weights=normed)
    own = jax.tree.map(lambda leaf: leaf[0], params["layers"]["experts"])
    x = jax.random.normal(jax.random.key(2), (23, CONFIG.embed_dim))
    direction = jax.random.normal(jax.random.key(3), x.shape)

    def ours(own: Any, x: jax.Array) -> jax.Array:
        model = bind(config, params | {"layers": stacked_once(params, own)})
        return model.unstack(jnp.float32)[0].experts(x)[0]

    got, got_gradient = jax.jit(
        jax.value_and_grad(lambda *a: (ours(*a) * direction).sum(), (0, 1))
    )(own, x)
    expected, gradient = jax.value_and_grad(
        lambda own, x: (dense_experts(own, x, config) * direction).sum(), (0, 1)
    )(own, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    np.testing.assert_allclose(ours(own, x), dense_experts(own, x, config), atol=1e-5)
    for a, b in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient), strict=True):
        assert np.abs(b).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()))


def stacked_once(params: Any, own: Any) -> Any:
    """The layers' parameters with ``own`` as the experts of every layer."""
    experts = jax.tree.map(lambda leaf: jnp.stack([leaf] * CONFIG.num_layers), own)
    return params["layers"] | {"experts": experts}


def test_a_token_goes_to_the_experts_its_router_prefers(params: Any) -> None:
    _, routing = routed(params)
    assert routing.experts.shape == (2, ROWS * LENGTH, 2)
    assert routing.probs.shape == (2, ROWS * LENGTH, 5)
    np.testing.assert_allclose(routing.probs.sum(-1), 1, atol=1e-6)
    preferred = np.argsort(-np.asarray(routing.probs), axis=-1)[..., :2]
    np.testing.assert_array_equal(routing.experts, preferred)
    assert len(np.unique(routing.experts)) == 5


def test_replayed_experts_are_used_though_the_router_has_changed(params: Any) -> None:
    hidden, routing = routed(params)
    same, again = routed(params, routing.experts)
    np.testing.assert_array_equal(same, hidden)
    np.testing.assert_array_equal(again.experts, routing.experts)
    changed = jax.tree.map(lambda leaf: leaf, params)
    changed["layers"]["experts"] = dict(
        changed["layers"]["experts"], router=-params["layers"]["experts"]["router"]
    )
    _, own_choice = routed(changed)
    assert np.mean(np.asarray(own_choice.experts != routing.experts)) > 0.3
    # -1 leaves a token to its router.
    some = routing.experts.at[:, ::2].set(-1)
    _, mixed = routed(changed, some)
    np.testing.assert_array_equal(mixed.experts[:, 1::2], routing.experts[:, 1::2])
    np.testing.assert_array_equal(mixed.experts[0, ::2], own_choice.experts[0, ::2])
    replayed, kept = routed(changed, routing.experts)
    np.testing.assert_array_equal(kept.experts, routing.experts)
    assert np.abs(np.asarray(replayed - hidden)).max() > 1e-3  # the weights are the new router's


def loads(routing: Routing, counted: jax.Array) -> Load:
    """Of stacked layers."""
    return jax.vmap(functools.partial(expert_load, counted=counted))(routing)


def balance(routing: Routing, counted: jax.Array) -> jax.Array:
    return load_balancing_loss(loads(routing, counted), experts_per_token=routing.experts.shape[-1])


def test_the_load_balancing_loss_of_an_even_load_is_k() -> None:
    L, N, E, k = 2, 6, 3, 2
    experts = jnp.array([[n % E, (n + 1) % E] for n in range(N)])[None].repeat(L, 0)
    even = Routing(experts, jnp.full((L, N, E), 1 / E))
    assert balance(even, jnp.ones(N, bool)) == pytest.approx(k)
    probs = jnp.broadcast_to(jnp.array([0.6, 0.3, 0.1]), (L, N, E))
    uneven = Routing(jnp.broadcast_to(jnp.array([0, 1]), (L, N, k)), probs)
    assert balance(uneven, jnp.ones(N, bool)) == pytest.approx(3 * 0.9)
    # Padding does not count.
    counted = jnp.arange(N) < 3
    noisy = Routing(uneven.experts.at[:, 3:].set(2), uneven.probs.at[:, 3:].set(jnp.nan))
    assert balance(noisy, counted) == pytest.approx(3 * 0.9)
    assert balance(noisy, 0 * counted) == 0  # nothing to train on, no NaN


def test_the_load_balancing_losses_of_the_parts_of_a_batch_add_up_with_their_gradients() -> None:
    L, N, E, k = 2, 9, 4, 2
    counted = jnp.arange(N) != 4

    def load(logits: jax.Array, counted: jax.Array) -> Load:
        probs = jax.nn.softmax(logits)
        return loads(Routing(jax.lax.top_k(probs, k)[1], probs), counted)

    def in_parts(logits: jax.Array) -> jax.Array:
        whole = load(logits, counted)
        cuts = [load(logits[:, part], counted[part]) for part in (slice(0, 3), slice(3, N))]
        parts = [load_balancing_loss(cut, experts_per_token=k, whole=whole) for cut in cuts]
        return jnp.sum(jnp.stack(parts))

    logits = jax.random.normal(jax.random.key(0), (L, N, E))
    at_once = jax.value_and_grad(
        lambda logits: load_balancing_loss(load(logits, counted), experts_per_token=k)
    )
    for got, expected in zip(jax.value_and_grad(in_parts)(logits), at_once(logits), strict=True):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_the_load_balancing_loss_is_that_of_transformers() -> None:
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    pytest.importorskip("transformers", reason=reason)
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    L, B, T, E, k = 3, 2, 7, 5, 2
    logits = np.random.default_rng(0).normal(size=(L, B * T, E)).astype(np.float32)
    mask = (np.arange(T) < np.array([[7], [4]])).astype(np.int64)
    expected = load_balancing_loss_func(
        tuple(torch.tensor(layer) for layer in logits), E, k, torch.tensor(mask)
    )
    probs = jax.nn.softmax(jnp.asarray(logits))
    routing = Routing(jax.lax.top_k(probs, k)[1], probs)
    got = balance(routing, jnp.asarray(mask.reshape(-1) > 0))
    assert float(got) == pytest.approx(float(expected), rel=1e-5)


EIGHT = dataclasses.replace(CONFIG, num_experts=8)
# A layer without experts, then one with all that DeepSeek's and Qwen2's mixtures have.
DEEPSEEK = dataclasses.replace(
    EIGHT,
    router_scores="sigmoid",
    router_bias=True,
    routed_scale=2.5,
    expert_groups=4,
    groups_per_token=2,
    shared_mlp_dim=12,
    shared_gate=True,
    num_dense_layers=1,
    dense_mlp_dim=40,
)


@functools.cache
def on_one_device(config: ModelConfig) -> Any:
    """(parameters, the loss, its gradient, experts) without a mesh."""
    params = init_params(config, jax.random.key(0))
    params["embed"]["embedding"] *= 20
    if config.router_bias:
        bias = params["layers"]["experts"]["router_bias"]
        params["layers"]["experts"]["router_bias"] = 0.3 * jax.random.normal(
            jax.random.key(1), bias.shape
        )
    return params, *jax.jit(functools.partial(gradient_step, config))(params)


def gradient_step(config: ModelConfig, params: Any) -> Any:
    tokens, positions, segments = tokens_and_segments()

    def loss(params: Any) -> Any:
        model = bind(config, params)
        hidden, _, routing = model.routed(
            tokens.reshape(-1),
            positions.reshape(-1),
            attend_rows(segments, 0 * segments),
            remat="full",
        )
        return jnp.mean(jnp.square(model.logits(hidden))), routing.experts

    (value, experts), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    return value, gradient, experts


@pytest.mark.parametrize(
    ("axes", "at_once", "config"),
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, True, EIGHT, marks=pytest.mark.slow),
        ({"data": 1, "expert": 8}, True, EIGHT),
        ({"data": 2, "expert": 4}, False, EIGHT),
        ({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, True, EIGHT),
        ({"data": 1, "fsdp": 2, "expert": 2, "tensor": 2}, True, DEEPSEEK),
        pytest.param({"data": 1, "expert": 8}, False, EIGHT, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2, "tensor": 2}, False, EIGHT, marks=pytest.mark.slow),
        pytest.param({"data": 1, "fsdp": 4, "expert": 2}, True, EIGHT, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 4}, False, DEEPSEEK, marks=pytest.mark.slow),
    ],
    ids=lambda value: value.router_scores if isinstance(value, ModelConfig) else str(value),
)
def test_on_a_mesh_outputs_and_gradients_are_those_of_one_device(
    axes: Any, at_once: bool, config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not at_once:
        monkeypatch.setattr(moe, "TOKENS_AT_ONCE", 1)
    params, value, gradient, experts = on_one_device(config)
    mesh = make_mesh(**axes)
    placed = jax.device_put(params, param_shardings(mesh, params, PARAM_AXES))
    gate = placed["layers"]["experts"]["gate"]
    assert gate.sharding.shard_shape(gate.shape)[1] == 8 // axes.get("expert", 1)
    with jax.set_mesh(mesh):
        # A function of its own, since what is at once is no argument of it.
        step = jax.jit(lambda params: gradient_step(config, params))
        got, got_gradient, got_experts = step(placed)
    np.testing.assert_array_equal(got_experts, experts)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(float(np.abs(b).max()), 1e-3))


def test_a_bias_takes_part_in_choosing_within_the_best_groups_and_in_nothing_else() -> None:
    params, _, gradient, experts = on_one_device(DEEPSEEK)
    assert experts.shape == (1, ROWS * LENGTH, 2)  # of the one layer with experts
    own = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), params["layers"]["experts"])
    x = np.random.default_rng(0).normal(size=(23, CONFIG.embed_dim)).astype(np.float32)
    layer = bind(DEEPSEEK, params).unstack(jnp.float32)[1]
    got, routing = jax.jit(layer.experts)(x)
    for n, token in enumerate(x.astype(np.float64)):
        scores = 1 / (1 + np.exp(-token @ own["router"]))
        biased = scores + own["router_bias"]
        groups = np.argsort([-np.sort(biased[2 * g : 2 * g + 2]).sum() for g in range(4)])[:2]
        inside = [e for g in groups for e in (2 * g, 2 * g + 1)]
        chosen = sorted(inside, key=lambda e: -biased[e])[:2]
        assert routing.experts[n].tolist() == chosen
        expected = np.zeros(CONFIG.embed_dim)
        for e in chosen:
            gate, up = token @ own["gate"][e], token @ own["up"][e]
            weight = 2.5 * scores[e] / scores[chosen].sum()
            expected += weight * (gate / (1 + np.exp(-gate)) * up) @ own["down"][e]
        np.testing.assert_allclose(got[n], expected, atol=1e-5)
        np.testing.assert_allclose(routing.probs[n], scores / scores.sum(), atol=1e-6)
    assert not np.any(gradient["layers"]["experts"]["router_bias"])
    assert np.any(gradient["layers"]["experts"]["router"])


def test_all_tokens_of_a_batch_may_go_to_the_experts_of_one_device() -> None:
    """No capacity: what would be dropped under an uneven load is not."""
    params = init_params(EIGHT, jax.random.key(0))
    x = jax.random.normal(jax.random.key(2), (32, CONFIG.embed_dim))
    replayed = jnp.broadcast_to(jnp.array([6, 7]), (32, 2))

    def experts(x: jax.Array) -> jax.Array:
        layer = bind(EIGHT, params).unstack(jnp.float32)[0]
        return layer.experts(x, replayed)[0]

    expected = jax.jit(experts)(x)
    with jax.set_mesh(make_mesh(data=2, expert=4)):
        np.testing.assert_allclose(jax.jit(experts)(x), expected, atol=1e-5)


@pytest.mark.parametrize("count", [5, 12])
def test_experts_that_do_not_divide_over_their_axis_are_refused_with_the_numbers(
    count: int,
) -> None:
    params = abstract_params(dataclasses.replace(CONFIG, num_experts=count))
    expected = rf"axis 'experts' of size {count} must be divisible by mesh axis expert \(8\)"
    with pytest.raises(ValueError, match=expected):
        param_shardings(make_mesh(data=1, expert=8), params, PARAM_AXES)
