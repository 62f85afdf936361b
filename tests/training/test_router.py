"""Mixtures of experts in training: the same on any mesh, for any cut; balanced; routed as while sampling."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.envs.single_turn import make_trajectory
from rlvr_jax.errors import ConfigError
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import attend_rows, bind, init_params
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.rollout.generate import generate
from rlvr_jax.training import sft
from rlvr_jax.training.fused import lay_out
from rlvr_jax.training.router import check_router
from rlvr_jax.training.state import init_state, state_shardings
from rlvr_jax.training.step import StepConfig, make_learner
from rlvr_jax.types import Completion, Group, Reward, SamplingParams, Task, TrainBatch

MODEL = ModelConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    mlp_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    experts_per_token=2,
)
PROMPTS = [[5, 9, 2], [7, 7, 1, 3, 40], [30, 2], [1, 2, 3, 4, 5, 6], [8], [9, 8], [1, 1, 2], [60]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
SAMPLING = SamplingParams(temperature=0.8, max_tokens=6, seed=1)
GRADIENT = optax.sgd(1.0)  # the change of the parameters is minus the gradient
MESHES = [
    pytest.param({"data": 1, "expert": 8}, marks=pytest.mark.slow),
    {"data": 1, "fsdp": 2, "expert": 2, "tensor": 2},
    pytest.param({"data": 2, "expert": 4}, marks=pytest.mark.slow),
    pytest.param({"data": 2, "fsdp": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 1, "expert": 4, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 1, "fsdp": 8}, marks=pytest.mark.slow),
]


def one_device() -> jax.sharding.Mesh:
    return make_mesh(devices=jax.devices()[:1])


@functools.cache
def params() -> Any:
    params = init_params(MODEL, jax.random.key(0))
    params["embed"]["embedding"] *= 20
    return params


def sample(
    mesh: jax.sharding.Mesh,
    sampling: SamplingParams,
    *,
    dtype: str = "float32",
    start: Any = None,
) -> list[list[Completion]]:
    shardings = state_shardings(MODEL, GRADIENT, mesh)
    placed = jax.device_put(params() if start is None else start, shardings.params)
    engine = Engine(MODEL, placed, mesh=mesh, dtype=dtype, record_experts=True)
    return engine.sample(PROMPTS, params=sampling, num_samples=2, request_ids=range(len(PROMPTS)))


@functools.cache
def sampled_on_one_device(sampling: SamplingParams, dtype: str = "float32") -> Any:
    return sample(one_device(), sampling, dtype=dtype)


def batch_of(samples: list[list[Completion]], **options: Any) -> TrainBatch:
    groups = [
        Group(
            task=Task(id=str(index), domain="test", prompt=(), answer=""),
            trajectories=tuple(
                make_trajectory(
                    prompt, one, rewards=(Reward(name="none", value=0.0),), index=g, text=""
                )
                for g, one in enumerate(completions)
            ),
            step=0,
        )
        for index, (prompt, completions) in enumerate(zip(PROMPTS, samples, strict=True))
    ]
    advantages = [np.array([1.0, -0.5])] * len(groups)
    return pack_groups(groups, advantages, length=key_bucket(18), rows=8, **options)


def update(
    mesh: jax.sharding.Mesh, batch: TrainBatch, start: Any = None, **options: Any
) -> tuple[Any, dict[str, np.ndarray]]:
    """(parameters, metrics) after one update from ``start``."""
    shardings = state_shardings(MODEL, GRADIENT, mesh)
    config = StepConfig(
        objective=ObjectiveConfig(loss_agg_mode="token-mean"),
        transform=LogitTransform.of(SAMPLING),
        use_reference=False,
        **options,
    )
    learner = make_learner(MODEL, GRADIENT, mesh, shardings, config)
    state = init_state(MODEL, params() if start is None else start, GRADIENT, mesh, seed=0)
    minibatch = learner.prepare(batch, None, scores=np.zeros((8, 2)), kl_coef=0.0)
    state, metrics = learner.train_step(state, minibatch)
    return jax.device_get(state.params), jax.device_get(metrics)


@functools.cache
def updated_on_one_device() -> Any:
    batch = batch_of(sampled_on_one_device(SAMPLING))
    return update(one_device(), batch, router_aux_loss_coef=0.3)


def assert_same_update(found: Any, expected: Any) -> None:
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0], expected[0])


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_samples_and_an_update_on_a_mesh_are_those_of_one_device(axes: Any) -> None:
    mesh = make_mesh(**axes)
    expected = sampled_on_one_device(GREEDY)
    for found, known in zip(sample(mesh, GREEDY), expected, strict=True):
        for one, other in zip(found, known, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.experts, other.experts)
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    batch = batch_of(sampled_on_one_device(SAMPLING))
    found = update(mesh, batch, router_aux_loss_coef=0.3)
    assert_same_update(found, updated_on_one_device())


@pytest.mark.parametrize("micro_rows", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_balancing_gradient_is_the_same_for_any_cut(micro_rows: int) -> None:
    """Though the loss is a product of two means over the batch."""
    batch = batch_of(sampled_on_one_device(SAMPLING))
    found = update(one_device(), batch, router_aux_loss_coef=0.3, micro_rows=micro_rows)
    assert_same_update(found, updated_on_one_device())


def test_a_batch_packed_otherwise_has_the_same_balancing_loss() -> None:
    batch = batch_of(sampled_on_one_device(SAMPLING), share_prompt=False)
    assert_same_update(
        update(one_device(), batch, router_aux_loss_coef=0.3), updated_on_one_device()
    )


@pytest.mark.slow
def test_descending_the_balancing_loss_evens_out_the_load() -> None:
    batch = batch_of(sampled_on_one_device(SAMPLING))
    batch = dataclasses.replace(batch, advantages=0 * batch.advantages)  # nothing else to learn
    batch = dataclasses.replace(batch, experts=None)
    now, found = params(), []
    for _ in range(4):
        now, metrics = update(one_device(), batch, now, router_aux_loss_coef=0.1)
        found.append(metrics)
    assert found[0]["router/aux_loss"] - 0.02 > found[-1]["router/aux_loss"] >= 1.99  # k when even
    assert 1 / 8 <= found[0]["router/max_share"] <= 1 / 2
    # The coefficient is what moves them: without it nothing does.
    same, metrics = update(one_device(), batch, router_aux_loss_coef=0.0)
    assert metrics["router/aux_loss"] == pytest.approx(found[0]["router/aux_loss"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), same, params())


def test_the_engine_records_where_every_token_went_that_the_model_saw() -> None:
    """As a forward pass over the whole sequence says; nowhere for the last token, which nothing was predicted from."""

    @jax.jit
    def routed(tokens: jax.Array) -> jax.Array:
        segments = jnp.ones((1, len(tokens)), jnp.int32)
        attend = attend_rows(segments, 0 * segments)
        routing = bind(MODEL, params()).routed(tokens, jnp.arange(len(tokens)), attend)[2]
        return jnp.moveaxis(routing.experts, 0, 1)

    samples = sampled_on_one_device(SAMPLING)
    for prompt, completions in list(zip(PROMPTS, samples, strict=True))[:2]:
        for one in completions:
            assert one.experts.shape == (len(prompt) + len(one.tokens), 2, 2)
            np.testing.assert_array_equal(one.experts[-1], -1)
            expected = routed(jnp.array([*prompt, *one.tokens]))
            np.testing.assert_array_equal(one.experts[:-1], expected[:-1])


def with_router(router: jax.Array) -> Any:
    layers = params()["layers"]
    experts = layers["experts"] | {"router": router}
    return params() | {"layers": layers | {"experts": experts}}


@pytest.mark.slow
def test_replay_makes_the_trainer_choose_the_samplers_experts() -> None:
    """Experts that are all about as good: a rounding decides which are taken, and log-probabilities jump with it."""
    router = 1e-3 * params()["layers"]["experts"]["router"]
    batch = batch_of(sample(one_device(), SAMPLING, start=with_router(router)))
    assert batch.experts is not None
    known = np.asarray(batch.experts)[..., 0, 0] >= 0
    inside = np.asarray(batch.segment_ids) > 0
    in_prompt = inside & (np.asarray(batch.loss_mask) == 0)
    assert known[in_prompt].all() and not known[~inside].any()

    changed = with_router(router + 2e-4 * jax.random.normal(jax.random.key(5), router.shape))

    def delta(batch: TrainBatch) -> float:
        return float(update(one_device(), batch, changed)[1]["logprob_delta_max"])

    replayed, free = delta(batch), delta(dataclasses.replace(batch, experts=None))
    experts = np.where(in_prompt[..., None, None], -1, np.asarray(batch.experts)).astype(np.int16)
    without_prompts = delta(dataclasses.replace(batch, experts=experts))
    assert replayed < 0.01
    assert free > 0.3 and without_prompts > 0.1


def test_the_fused_schedule_lays_out_the_same_experts() -> None:
    tokens = np.zeros((len(PROMPTS), key_bucket(6)), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)
    program = functools.partial(
        generate,
        config=MODEL,
        num_samples=2,
        max_tokens=6,
        transform=LogitTransform.of(SAMPLING),
        stop_token_ids=(),
        record_experts=True,
    )
    ids = np.arange(len(PROMPTS), dtype=np.uint32)
    rollout = jax.jit(program)(params(), tokens, lengths, ids, np.uint32(SAMPLING.seed))
    batch = jax.device_get(lay_out(jnp.asarray(tokens), jnp.asarray(lengths), rollout))
    for row, completions in enumerate(sampled_on_one_device(SAMPLING)):
        for g, one in enumerate(completions):
            branch = batch.sample_ids[row] == 2 * row + g
            columns = (batch.segment_ids[row] == 1) | branch
            np.testing.assert_array_equal(batch.tokens[row][branch], one.tokens)
            np.testing.assert_array_equal(batch.experts[row][columns], one.experts)


@pytest.mark.slow
def test_fine_tuning_balances_the_load_the_same_way_for_any_cut() -> None:
    batch = dataclasses.replace(batch_of(sampled_on_one_device(SAMPLING)), experts=None)
    loss = functools.partial(
        sft.negative_log_likelihood, model=MODEL, dtype="float32", remat="full"
    )
    # Rows of fine-tuning continue nothing: each response is a conversation of its own.
    batch = dataclasses.replace(batch, prefix_ids=0 * batch.prefix_ids)

    def step(num_pieces: int, coef: float) -> Any:
        with jax.set_mesh(one_device()):
            state = init_state(MODEL, params(), GRADIENT, one_device(), seed=0)
            pieces = sft.place_batch(batch, mesh=one_device(), num_pieces=num_pieces)
            program = functools.partial(
                sft.update,
                loss=loss,
                optimizer=GRADIENT,
                router_aux_loss_coef=coef,
                experts_per_token=2,
            )
            state, metrics = jax.jit(program)(state, pieces)
            return jax.device_get((state.params, metrics))

    whole = step(1, 0.3)
    assert_same_update(step(4, 0.3), whole)
    without = step(1, 0.0)
    assert without[1]["loss"] == pytest.approx(whole[1]["loss"])
    assert without[1]["router/aux_loss"] == pytest.approx(whole[1]["router/aux_loss"])
    router = [found[0]["layers"]["experts"]["router"] for found in (without, whole)]
    assert np.abs(router[0] - router[1]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_replay_sampler_and_trainer_agree(dtype: str) -> None:
    batch = batch_of(sampled_on_one_device(SAMPLING, dtype))
    _, metrics = update(one_device(), batch, dtype=dtype)
    assert metrics["logprob_delta_max"] <= 1e-4
    assert metrics["entropy"] > 0.3


def test_settings_of_routers_are_refused_without_routers() -> None:
    dense = dataclasses.replace(MODEL, num_experts=0, experts_per_token=0)
    check_router(dense, "rollout.router_replay", False)
    check_router(MODEL, "rollout.router_replay", True)
    with pytest.raises(ConfigError, match=r"router_replay is True .* set config.* to False"):
        check_router(dense, "rollout.router_replay", True)
    with pytest.raises(ValueError, match=r"expert axis of the mesh is 8 .* no experts"):
        state_shardings(dense, GRADIENT, make_mesh(1, expert=8))
    with pytest.raises(ValueError, match="record_experts is on and the model has no experts"):
        Engine(dense, {}, mesh=one_device(), record_experts=True)
