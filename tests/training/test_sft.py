"""Supervised fine-tuning: it learns, its gradient has the right denominator, and a killed run ends as if it was not."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from rlvr_jax.cli.flags import load_config
from rlvr_jax.cli.main import main as rlvr
from rlvr_jax.data.loader import chat_dataset
from rlvr_jax.data.sources import open_source
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import ConfigError, WeightsError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.training import sft
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.sft import negative_log_likelihood, place_batch, sum_and_count, train, update
from rlvr_jax.types import TrainState

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "configs" / "sft_chat.py"


@pytest.fixture
def config() -> ConfigDict:
    # With a constant rate the program is the same for every num_steps: one entry in the compilation cache.
    return override(load_config(f"{CONFIG}:tiny"), optimizer__schedule="constant")


def override(config: ConfigDict, **values) -> ConfigDict:
    config = ConfigDict(config).unlock()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in values.items()})
    return config.lock()


def weights_of(workdir: Path) -> bytes:
    return (workdir / "model" / "model.safetensors").read_bytes()


def test_the_loss_falls_and_what_is_left_loads_as_a_policy(config, tmp_path, monkeypatch):
    # Every step and every evaluation has the same shapes: each program is traced once.
    monkeypatch.setattr(sft, "update", chex.assert_max_traces(update, n=1))
    monkeypatch.setattr(sft, "sum_and_count", chex.assert_max_traces(sum_and_count, n=1))
    summary = train(config, tmp_path)
    assert summary["eval_loss_before"] == pytest.approx(np.log(320), rel=0.1)
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.5
    assert summary["steps"] == config.num_steps
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["data"]["dropped"] == 0

    records = read_metrics(tmp_path)
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == config.num_steps
    assert losses[-1] < losses[0] - 0.5
    held_out = {r["step"]: r["eval/loss"] for r in records if "eval/loss" in r}
    assert list(held_out) == [3, 7]
    assert held_out[7] == summary["eval_loss_after"]
    assert all(record["update_skipped"] == 0 for record in records if "loss" in record)

    policy = load_pretrained(tmp_path / "model")
    before = load_pretrained(TINY)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), policy.params, before.params)
    assert all(jax.tree.leaves(changed))
    question = [{"role": "user", "content": "é?"}]
    assert policy.chat.render_ids(question) == load_pretrained(config.model).chat.render_ids(
        question
    )


def test_a_run_that_was_killed_ends_bitwise_like_one_that_was_not(config, tmp_path):
    config = override(config, checkpoint__every=2)
    train(config, tmp_path / "whole")
    # A process of its own, killed without warning when it has passed a checkpoint and is on its way to the next.
    flags = [
        f"--config={CONFIG}:tiny",
        "--config.optimizer.schedule=constant",
        "--config.checkpoint.every=2",
    ]
    flags += [f"--workdir={tmp_path / 'killed'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rlvr_jax", "sft", *flags],
        cwd=REPOSITORY,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    manifest = tmp_path / "killed" / "checkpoints" / "step_2" / "manifest.json"
    while not manifest.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert not (tmp_path / "killed" / "summary.json").exists()

    summary = train(config, tmp_path / "killed")
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")
    whole, killed = (
        [(r["step"], r["loss"]) for r in read_metrics(tmp_path / name) if "loss" in r]
        for name in ("whole", "killed")
    )
    assert killed == whole
    assert summary["steps"] == config.num_steps


PROCESS = """
import sys, jax
config, workdir, address, process = sys.argv[1:]
jax.distributed.initialize(address, num_processes=2, process_id=int(process))
from rlvr_jax.cli.flags import apply_overrides, load_config
from rlvr_jax.training.sft import train
overrides = ["--config.num_steps=3", "--config.optimizer.schedule=constant", "--config.train.micro_rows=4"]
train(apply_overrides(load_config(config), overrides), workdir)
"""


@pytest.mark.slow
def test_two_processes_train_like_one(config, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    arguments = [sys.executable, "-c", PROCESS, f"{CONFIG}:tiny", str(tmp_path / "two"), address]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen([*arguments, str(i)], cwd=REPOSITORY, env=environment) for i in range(2)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0, 0]
    train(override(config, num_steps=3), tmp_path / "one")
    one, two = (load_pretrained(tmp_path / name / "model").params for name in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), two, one)


def test_running_a_finished_run_again_changes_nothing(config, tmp_path):
    config = override(config, num_steps=2)
    first = train(config, tmp_path)
    before = weights_of(tmp_path)
    again = train(config, tmp_path)
    assert weights_of(tmp_path) == before
    assert again["steps"] == 2
    assert again | {"seconds": 0} == first | {"seconds": 0}
    assert again["seconds"] == pytest.approx(first["seconds"], abs=1)  # not counted twice
    num_records = len(read_metrics(tmp_path))
    more = train(override(config, num_steps=3), tmp_path)
    assert more["steps"] == 3
    assert len(read_metrics(tmp_path)) == num_records + 2
    assert weights_of(tmp_path) != before


def test_a_run_of_whole_epochs_trains_on_all_conversations_and_stops(config, tmp_path):
    config = override(
        config,
        num_steps=100,
        data__num_epochs=1,
        data__held_out=0.0,
        data__sources=(f"{config.data.sources[0]}@[:40]",),
    )
    summary = train(config, tmp_path)
    assert summary["data"] == {"read": 40, "truncated": 0, "dropped": 0}
    assert 1 <= summary["steps"] < 10
    assert summary["eval_loss_after"] is None


@pytest.fixture(scope="module")
def step_inputs():
    pretrained = load_pretrained(TINY)
    data = chat_dataset(
        [open_source(str(CONFIG.with_name("sft_example.jsonl")))],
        pretrained.chat.render_with_mask,
        length=128,
        batch_size=8,
        seed=0,
    )

    def loss(params, batch):
        return negative_log_likelihood(
            params, batch, model=pretrained.config, dtype="float32", remat="none"
        )

    return jax.tree.map(jnp.asarray, pretrained.params), next(data), loss


def one_step(params, batch, loss, *, num_pieces, mesh):
    """An update by plain gradient descent with rate 1: the change of the params is the gradient."""
    optimizer = optax.sgd(1.0)
    with jax.set_mesh(mesh):
        state = TrainState(
            step=jnp.int32(0),
            params=jax.tree.map(jnp.asarray, params),
            opt_state=optimizer.init(params),
            key=jnp.zeros(2, jnp.uint32),
        )
        pieces = place_batch(batch, mesh=mesh, num_pieces=num_pieces)
        step = jax.jit(lambda s, p: update(s, p, loss=loss, optimizer=optimizer))
        return jax.device_get(step(state, pieces))


@pytest.mark.slow
def test_the_gradient_is_the_same_for_any_number_of_pieces_and_any_mesh(step_inputs):
    params, batch, loss = step_inputs
    whole, whole_metrics = one_step(
        params, batch, loss, num_pieces=1, mesh=make_mesh(devices=jax.devices()[:1])
    )
    # The definition: the sum over all trained tokens of all rows by their number.
    pieces = jax.tree.map(lambda rows: jnp.asarray(rows)[None], batch)
    total, count = jax.jit(functools.partial(sum_and_count, loss=loss))(params, pieces)
    assert count == np.sum(batch.loss_mask)
    np.testing.assert_allclose(whole_metrics["loss"], total / count, rtol=1e-5)
    for num_pieces, mesh in (
        (4, make_mesh(devices=jax.devices()[:1])),
        (2, make_mesh(data=1, fsdp=2, context=2, tensor=2)),
    ):
        split, metrics = one_step(params, batch, loss, num_pieces=num_pieces, mesh=mesh)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), split.params, whole.params
        )
        np.testing.assert_allclose(metrics["grad_norm"], whole_metrics["grad_norm"], rtol=1e-4)


def test_padding_and_masked_tokens_change_nothing(step_inputs):
    params, batch, loss = step_inputs
    pieces = jax.tree.map(lambda rows: jnp.asarray(rows)[None], batch)
    evaluate = jax.jit(functools.partial(sum_and_count, loss=loss))
    expected = evaluate(params, pieces)
    noisy = np.where(np.asarray(batch.segment_ids) == 0, 77, batch.tokens)
    assert np.any(noisy != batch.tokens)
    changed = vars(pieces) | {"tokens": jnp.asarray(noisy)[None]}
    np.testing.assert_array_equal(evaluate(params, type(batch)(**changed)), expected)


@pytest.mark.parametrize("fault", ["masked", "nan"])
def test_a_batch_that_teaches_nothing_or_breaks_changes_no_parameter(step_inputs, fault):
    params, batch, loss = step_inputs
    values = dict(vars(batch))
    if fault == "masked":
        values["loss_mask"] = np.zeros_like(batch.loss_mask)
    else:
        scale = params["final_norm"]["scale"].at[0].set(jnp.nan)
        params = params | {"final_norm": {"scale": scale}}
    state, metrics = one_step(
        params, type(batch)(**values), loss, num_pieces=1, mesh=make_mesh(devices=jax.devices()[:1])
    )
    assert metrics["update_skipped"] == 1
    assert state.step == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    if fault == "masked":
        assert metrics["loss"] == 0


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"train__batch_rows": 6}, ConfigError, r"micro_rows \(6.*axes of the mesh \(8\)"),
        ({"train__micro_rows": 3}, ConfigError, r"batch_rows \(8\) must be a positive multiple"),
        ({"train__row_length": 4096}, ConfigError, r"row_length \(4096\) is more than the context"),
        (
            {"train__row_length": 100, "mesh__fsdp": 1, "mesh__context": 8},
            ValueError,
            r"rows of 100 tokens .* must be divisible by the context axis \(8\)",
        ),
        ({"train__remat": "half"}, ConfigError, "train.remat is 'half'; expected one of"),
        ({"dtype": "float16"}, ConfigError, "dtype is 'float16'"),
        ({"num_steps": 0}, ConfigError, "num_steps is 0"),
        ({"checkpoint__keep": 0}, ConfigError, "checkpoint.keep is 0"),
        ({"data__sources": ("gone.jsonl",)}, ConfigError, "no file matches 'gone.jsonl'"),
        ({"data__sources": ()}, ConfigError, "no data sources"),
        ({"data__held_out": 1.5}, ConfigError, "cannot hold out 1.5"),
        ({"data__weights": (1.0, 2.0)}, ConfigError, "for 1 sources"),
        ({"optimizer__schedule": "step"}, ValueError, "optimizer.schedule is 'step'"),
        ({"mesh__data": 3}, ValueError, "change config.mesh"),
        ({"model": "no-such-model"}, WeightsError, "no model 'no-such-model'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_computed(
    config, tmp_path, values, error, message
):
    with pytest.raises(error, match=message):
        train(override(config, **values), tmp_path)
    # Nothing is left that the corrected settings would be compared with.
    assert not list(tmp_path.iterdir())


def test_a_bad_conversation_is_named_by_file_and_line(config, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "no answer"}]}\n' * 3)
    with pytest.raises(ConfigError, match=r"bad\.jsonl:\d: .*role 'assistant'"):
        train(override(config, data__sources=(str(bad),)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_prints_the_loss_and_reports_misuse_in_one_line(config, tmp_path, capsys):
    flags = ["sft", f"--config={CONFIG}:tiny"]
    flags += [
        "--config.num_steps=1",
        "--config.checkpoint.every=0",
        f"--workdir={tmp_path / 'run'}",
    ]
    assert rlvr(flags) == 0
    output = capsys.readouterr().out
    assert "held-out loss" in output
    assert str(tmp_path / "run" / "model") in output
    assert rlvr([*flags, "--config.data.source=x"]) == 2
    assert "unknown config key 'data.source'" in capsys.readouterr().err
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert rlvr([*flags, f"--workdir={blocked / 'run'}"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step_1"]
