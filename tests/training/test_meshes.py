"""Every way to arrange eight devices computes what one device does: an update, log-probabilities, greedy tokens.

And what the axes are for: what a device holds, and what its programs exchange.
"""

import dataclasses
import functools
import itertools
import math
import pickle
from typing import Any

import jax
import numpy as np
import pytest

from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.columns import flat_tokens, take_columns, whole_rows
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.placement import fetch
from rlvr_jax.distributed.sharding import batch_sharding
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.policy_head import RowBounds
from rlvr_jax.planning.traffic import read_traffic
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.tasks.splits import draw
from rlvr_jax.training.state import abstract_state, state_shardings
from rlvr_jax.training.step import check_columns, make_learner
from rlvr_jax.types import SamplingParams
from tests.groups import random_groups
from tests.process_group import process_group
from tests.training.test_fused import assert_close, assert_same_groups, make_program, snapshot
from tests.training.test_step import ADAM, CONFIG, GRADIENT, Run, batch_of

AXES = ("data", "fsdp", "tensor", "expert", "context")
DENSE = ModelConfig(
    vocab_size=128,
    num_layers=2,
    embed_dim=32,
    mlp_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
MODELS = {
    "dense": DENSE,
    "moe": dataclasses.replace(DENSE, num_experts=8, experts_per_token=2),
    # Layers that differ: the positions of keys are looked at.
    "windows": dataclasses.replace(DENSE, sliding_window=6, local_layers=(1,)),
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(), seed=0)


def factorisations() -> list[Any]:
    """All meshes of eight devices that a model divides over; with experts, where there is an axis for them."""
    found = []
    for exponents in itertools.product(range(4), repeat=len(AXES)):
        sizes = dict(zip(AXES, (2**n for n in exponents), strict=True))
        if math.prod(sizes.values()) == 8 and sizes["tensor"] <= 2:
            model = "moe" if sizes["expert"] > 1 else "dense"
            name = "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
            marks = () if name == "tensor2-expert2-context2" else pytest.mark.slow
            found.append(pytest.param(model, sizes, id=f"{model}-{name}", marks=marks))
    return found


@functools.cache
def weights(name: str) -> tuple[Any, Any]:
    """(policy, reference)."""
    policy = init_params(MODELS[name], jax.random.key(0))
    policy["embed"]["embedding"] *= 20
    return policy, init_params(MODELS[name], jax.random.key(1))


def step(name: str, sizes: dict[str, int], **changes: Any) -> Any:
    """(parameters after one update of plain gradient descent, its metrics, greedy tokens before it) on a mesh."""
    model, (policy, reference) = MODELS[name], weights(name)
    run = Run(model, policy, reference, optimizer=GRADIENT, sizes=sizes, **changes)
    engine = Engine(model, run.state.params, mesh=run.learner.mesh)
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5], [100]]
    found = engine.sample(prompts, params=GREEDY, num_samples=2, request_ids=[1, 2, 3])
    tokens = [[list(sample.tokens) for sample in samples] for samples in found]
    batch = batch_of(model)
    if model.num_experts:  # half of the choices are replayed, half are the router's
        rng = np.random.default_rng(0)
        shape = (*batch.tokens.shape, model.num_layers, model.experts_per_token)
        experts = rng.integers(0, model.num_experts, shape)
        experts = np.where(rng.random(shape) < 0.5, -1, experts).astype(np.int16)
        batch = dataclasses.replace(batch, experts=experts)
    metrics = run(batch)
    return fetch(run.state.params), metrics, tokens


@functools.cache
def alone(name: str, **changes: Any) -> Any:
    return step(name, {"data": 1}, **changes)


def assert_is_that_of_one_device(name: str, found: Any, **changes: Any) -> None:
    params, metrics, tokens = found
    expected, expected_metrics, expected_tokens = alone(name, **changes)
    assert tokens == expected_tokens
    assert metrics.keys() == expected_metrics.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[key], rtol=1e-5, atol=1e-5, err_msg=key)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)


@pytest.mark.parametrize(("name", "sizes"), factorisations())
def test_an_update_and_greedy_tokens_are_those_of_one_device(name, sizes):
    assert_is_that_of_one_device(name, step(name, sizes))


@functools.cache
def fused_alone(name: str) -> Any:
    return fused_step(name, {"data": 1}, 1)


def fused_step(name: str, sizes: dict[str, int], num_devices: int) -> Any:
    """(groups, metrics, parameters) of one step of the fused schedule on a mesh."""
    mesh = make_mesh(**sizes, devices=jax.devices()[:num_devices])
    # Adam divides a gradient by itself: with its own epsilon it makes much of one that is rounding errors.
    program = make_program(mesh, num_experts=MODELS[name].num_experts, eps=1e-6)
    tasks = [draw("toy/even", 0, "train", 0, index) for index in range(8)]
    state, metrics, groups = program.fused_step(
        program.state, program.reference, tasks, step=0, kl_coef=0.0
    )
    return groups, jax.device_get(metrics), snapshot(state).params


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), factorisations())
def test_a_step_of_the_fused_schedule_is_that_of_one_device(name, sizes):
    (groups, metrics, params), expected = fused_step(name, sizes, 8), fused_alone(name)
    assert_same_groups(groups, expected[0])
    for key in ("loss", "kl", "grad_norm", "entropy", "update_skipped"):
        np.testing.assert_allclose(metrics[key], expected[1][key], atol=1e-4, err_msg=key)
    assert_close(params, expected[2])


TOGETHER = """
import pathlib, pickle, sys
from rlvr_jax.distributed import processes
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ConfigError
with processes.joined():
    from rlvr_jax.training.sft import _check_row_shards
    from tests.training.test_meshes import ACROSS, WITHIN, step
    found = [step("dense", sizes) for sizes in (WITHIN, ACROSS)]
    if processes.is_first():
        pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(found))
    # Fine-tuning, where a process reads its own rows, needs all columns of them.
    _check_row_shards(make_mesh(**WITHIN))
    try:
        _check_row_shards(make_mesh(**ACROSS))
    except ConfigError as error:
        assert "1 of 1 shards of a batch's rows; expected 1 / 2 processes" in str(error), error
    else:
        raise AssertionError("a process that has half of its rows was not refused")
"""
WITHIN, ACROSS = {"data": 2, "context": 4}, {"data": 1, "context": 8}  # two processes of four


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_devices_of_two_processes_may_share_rows(tmp_path):
    with process_group("-c", TOGETHER, tmp_path / "found", folder=tmp_path) as group:
        assert group.wait(600) == [0, 0], group.log(0)[-3000:] + group.log(1)[-3000:]
    for found in pickle.loads((tmp_path / "found").read_bytes()):
        assert_is_that_of_one_device("dense", found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "changes"),
    [
        ("windows", {"data": 2, "context": 4}, {"remat": "none"}),
        ("dense", {"data": 2, "context": 4}, {"micro_rows": 2}),
        (
            "moe",
            {"data": 1, "fsdp": 2, "context": 2, "expert": 2},
            {"micro_rows": 4, "router_aux_loss_coef": 0.1},
        ),
    ],
    ids=str,
)
def test_cut_rows_go_with_windows_micro_batches_remat_and_the_loss_of_routers(name, sizes, changes):
    assert_is_that_of_one_device(
        name, step(name, sizes, **changes), **{k: v for k, v in changes.items() if "coef" in k}
    )


@pytest.mark.parametrize("sizes", [{"data": 1, "context": 8}, {"data": 2, "context": 4}], ids=str)
def test_tokens_are_brought_to_where_they_are_asked_for(sizes):
    """And their gradients back: against indexing on the host."""
    rng = np.random.default_rng(0)
    B, T, D, M = 4, 16, 3, 8
    x = rng.normal(size=(B, T, D)).astype(np.float32)
    columns = rng.integers(0, T, (B, M)).astype(np.int32)
    direction = rng.normal(size=(B, M, D)).astype(np.float32)
    mesh = make_mesh(**sizes)
    shards = sizes["context"]

    @jax.jit
    def both(x, columns, direction):
        flat = flat_tokens(x)
        taken, back = jax.vjp(lambda flat: take_columns(flat, columns), flat)
        return flat, whole_rows(flat, B), taken, back(direction)[0]

    with jax.set_mesh(mesh):
        flat, whole, taken, gradient = both(
            *jax.device_put((x, columns, direction), batch_sharding(mesh))
        )
    np.testing.assert_array_equal(taken, np.take_along_axis(x, columns[:, :, None], 1))
    expected = np.zeros_like(x)
    for row, column, value in zip(
        np.repeat(np.arange(B), M), columns.reshape(-1), direction.reshape(-1, D), strict=True
    ):
        expected[row, column] += value
    rows = B // sizes["data"]
    cut = expected.reshape(sizes["data"], rows, shards, T // shards, D).swapaxes(1, 2)
    np.testing.assert_allclose(gradient, cut.reshape(B * T, D), atol=1e-6)
    assert flat.sharding.shard_shape(flat.shape) == (B * T // 8, D)
    for shard in flat.addressable_shards:  # a stretch of each device's own columns
        data, column = divmod(shard.device.id, shards)
        own = x[data * rows : (data + 1) * rows, column * T // shards :][:, : T // shards]
        np.testing.assert_array_equal(shard.data, own.reshape(-1, D))
    for shard in whole.addressable_shards:
        data = shard.device.id // shards
        np.testing.assert_array_equal(shard.data, x[data * rows : (data + 1) * rows])


def compiled_update(model, sizes, *, rows, length, dtype="bfloat16", **changes):
    """The update's program for a batch [rows, length] half of which is trained on."""
    mesh = make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    config = dataclasses.replace(CONFIG, dtype=dtype, **changes)
    learner = make_learner(model, ADAM, mesh, state_shardings(model, ADAM, mesh), config)
    groups = random_groups(model.vocab_size)
    batch = pack_groups(
        groups, [np.ones(len(g.trajectories)) for g in groups], length=length, rows=rows
    )
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(mesh)), batch
    )
    with jax.set_mesh(mesh):
        return learner._update.lower(  # pyright: ignore
            abstract_state(model, ADAM, mesh),
            structs,
            bounds=RowBounds(length // 2, length // 4),
            num_samples=16,
        ).compile()


@pytest.mark.slow
def test_activations_of_a_device_fall_with_the_context_axis(monkeypatch):
    """One sequence of 2048 tokens: what a device needs beside parameters is a quarter with four times as many of them;
    with it the scores of its attention, [T / 8, T] for each head."""
    monkeypatch.setenv("NPROC", "64")  # so that both programs are in the same order
    model = dataclasses.replace(DENSE, num_layers=4, embed_dim=64, num_heads=4)
    length, temporary = 2048, {}
    for shards in (2, 8):
        program = compiled_update(model, {"data": 1, "context": shards}, rows=1, length=length)
        temporary[shards] = program.memory_analysis().temp_size_in_bytes
    scores = model.num_heads * length * length * 4
    assert temporary[2] > scores  # half of them, twice: attention is what counts
    assert temporary[8] < 0.27 * temporary[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("moe", {"data": 1, "fsdp": 2, "expert": 2, "context": 2}),
        ("moe", {"data": 1, "expert": 2, "context": 2, "tensor": 2}),
        ("moe", {"data": 1, "expert": 8}),
        ("dense", {"data": 1, "context": 8}),
        ("dense", {"data": 1, "fsdp": 4, "context": 2}),
    ],
    ids=str,
)
def test_weights_are_gathered_a_kernel_at_a_time(name, sizes):
    """No collective of the update moves all layers of a parameter, nor all parameters together."""
    model = dataclasses.replace(MODELS[name], num_layers=6, vocab_size=64)
    rows, length = 8, 32
    program = compiled_update(model, sizes, rows=rows, length=length, dtype="float32")
    policy = jax.eval_shape(functools.partial(init_params, model), jax.random.key(0))
    kernels = [leaf.size * 4 for leaf in jax.tree.leaves(policy["layers"])]
    one = max(kernels) // model.num_layers
    gathers = [c for c in read_traffic(program.as_text()).collectives if c.kind == "all-gather"]
    assert any(gather.count >= model.num_layers for gather in gathers), "the weights are sharded"
    # Tokens are gathered too: keys and values of the rows, and what the devices of the expert axis show one another.
    shards = sizes.get("fsdp", 1) * sizes.get("expert", 1) * sizes["data"]
    tokens = rows * length // shards * sizes.get("expert", 1) * model.embed_dim * 4
    embedding = model.vocab_size * model.embed_dim * 4
    for gather in gathers:
        assert gather.bytes <= max(one, tokens, embedding), gather
    assert max(one, tokens, embedding) < sum(kernels) / 4, "so that this says something"


def test_lengths_that_do_not_divide_are_refused_with_the_numbers_or_filled_up():
    mesh = make_mesh(data=1, context=8)
    check_columns(48, mesh)
    message = r"rows of 36 tokens .* must be divisible by the context axis \(8\); change config.train.row_length"
    with pytest.raises(ValueError, match=message):
        check_columns(36, mesh)
    run = Run(DENSE, *weights("dense"), optimizer=GRADIENT, sizes={"data": 1, "context": 8})
    with pytest.raises(ValueError, match=message):
        run(batch_of(DENSE, length=36))
    for length in (1, 17, 100, 240, 1000):
        for divisor in (
            1,
            2,
            4,
            8,
            16,
        ):  # the lengths that keep the bits of a CPU divide over these anyway
            assert key_bucket(length, divisor) == key_bucket(length)
        assert key_bucket(length, 64) % 64 == 0
        assert key_bucket(length, 64) - key_bucket(length) < 64
