"""The fused schedule gives what the staged one gives, on any mesh, and no verifier can stop it."""

import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import row_sharding
from rlvr_jax.envs.single_turn import DomainJudge
from rlvr_jax.errors import ConfigError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.models.decoder import abstract_params, init_params
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.rollout import generate as rollout
from rlvr_jax.tasks.splits import draw
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.training import fused, rl
from rlvr_jax.training import step as step_module
from rlvr_jax.training.fused import (
    HostJudge,
    groups_with_signal,
    judge_on_host,
    make_fused_step,
    resize,
)
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import StepConfig, make_learner
from rlvr_jax.trajectories.store import ParquetStore
from rlvr_jax.types import Reward, Task, TrainState
from tests.training.toys import REPOSITORY, even, get_config, override

LETTERS = byte_level_tokenizer().encode("abcdefghijklmnopqrstuvwxyz")
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def one_device(**_):
    return make_mesh(devices=jax.devices()[:1])


def params_of(workdir):
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        restored = checkpointer.restore_params(abstract_params(load_pretrained(TINY).config))
    assert restored is not None
    return jax.tree.map(np.asarray, restored[1])


def assert_same_groups(these, those):
    for a, b in zip(these, those, strict=True):
        assert (a.task, a.step) == (b.task, b.step)
        for x, y in zip(a.trajectories, b.trajectories, strict=True):
            np.testing.assert_array_equal(x.tokens, y.tokens)
            assert (x.text, x.stop_reason) == (y.text, y.stop_reason)
            assert x.rewards == y.rewards
            assert (x.policy_version, x.sample_index) == (y.policy_version, y.sample_index)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


def assert_close(params, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, expected)


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """(groups, params, metrics) of three staged steps on one device: what all others are compared with."""
    workdir = tmp_path_factory.mktemp("staged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "make_mesh", one_device)
        rl.train(get_config(), workdir)
    return ParquetStore(workdir / "trajectories").read(), params_of(workdir), read_metrics(workdir)


def test_three_fused_steps_give_the_tokens_and_params_of_three_staged_ones(
    staged, tmp_path, monkeypatch
):
    monkeypatch.setattr(rl, "make_mesh", one_device)
    rl.train(override(get_config(), schedule="fused"), tmp_path)
    groups, params, metrics = staged
    assert_same_groups(ParquetStore(tmp_path / "trajectories").read(), groups)
    assert_close(params_of(tmp_path), params)
    for fused_record, record in zip(read_metrics(tmp_path), metrics, strict=True):
        assert fused_record["update_skipped"] == record["update_skipped"] == 0
        for name in ("loss", "kl", "grad_norm", "entropy", "reward/mean", "learning_rate"):
            assert fused_record[name] == pytest.approx(record[name], abs=1e-4), name
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, load_pretrained(TINY).params)
    assert min(jax.tree.leaves(moved)) > 1e-3  # so that being the same says something


@pytest.mark.slow
def test_few_samples_a_device_are_sampled_and_trained_on_alike(tmp_path, monkeypatch):
    """One prompt and two samples: fewer rows than XLA:CPU adds up in one order. Rows that only fill up are dropped."""
    monkeypatch.setattr(rl, "make_mesh", one_device)
    sampled, trained_on = [], []

    def generate(params, prompts, *args, **kwargs):
        sampled.append(len(prompts) * kwargs["num_samples"])
        return rollout.generate(params, prompts, *args, **kwargs)

    def update(state, batch, **kwargs):
        trained_on.append(len(batch.tokens))
        return step_module.update(state, batch, **kwargs)

    monkeypatch.setattr(fused, "generate", generate)
    monkeypatch.setattr(fused, "update", update)
    settings = {"tasks__tasks_per_step": 1, "rollout__group_size": 2, "num_steps": 2}
    rl.train(override(get_config(), schedule="fused", **settings), tmp_path)
    records = read_metrics(tmp_path)
    assert (sampled, trained_on) == ([40], [2])
    assert max(record["logprob_delta_max"] for record in records) < 1e-6
    assert [record["num_groups"] for record in records] == [1, 1]
    # The program was compiled once, and the engine's once for the held-out answers.
    assert [record["perf/compiles"] for record in records] == [2, 2]


def test_rows_of_each_shard_are_cut_or_filled_up():
    rows = np.arange(1, 9, dtype=np.int32).reshape(4, 2)
    more = resize({"x": rows}, rows=3, num_shards=2)["x"]
    np.testing.assert_array_equal(more, [[1, 2], [3, 4], [0, 0], [5, 6], [7, 8], [0, 0]])
    np.testing.assert_array_equal(resize(more, rows=1, num_shards=2), [[1, 2], [5, 6]])


class Program(NamedTuple):
    """A fused step whose judge can be exchanged without compiling it again."""

    state: TrainState
    reference: Any
    fused_step: Callable[..., Any]
    judge: list[Any]


def make_program(mesh, deadline_s=5.0, num_experts=0, eps=1e-8, **settings):
    config = override(get_config(), **settings)
    pretrained = load_pretrained(TINY)
    model, params = pretrained.config, pretrained.params
    if num_experts:
        model = dataclasses.replace(model, num_experts=num_experts, experts_per_token=2)
        params = init_params(model, jax.random.key(0))
    optimizer = make_optimizer(OptimizerConfig(num_steps=3, eps=eps, **config.optimizer))
    sampling = rl.sampling_params(config, pretrained.tokenizer.stop_token_ids)
    learner = make_learner(
        model,
        optimizer,
        mesh,
        state_shardings(model, optimizer, mesh),
        StepConfig(
            objective=rl.objective_config(config),
            transform=LogitTransform.of(sampling),
            adv_estimator=config.algorithm.adv_estimator,
        ),
    )
    judge = [in_process]
    fused_step = make_fused_step(
        learner,
        tokenizer=pretrained.tokenizer,
        chat=pretrained.chat,
        judge=lambda pairs: judge[0](pairs),
        params=sampling,
        group_size=config.rollout.group_size,
        overlong_buffer=config.algorithm.overlong_buffer,
        record_experts=False,
        mask_truncated=config.algorithm.mask_truncated,
        deadline_s=deadline_s,
    )
    state = init_state(model, params, optimizer, mesh, seed=0)
    return Program(state, learner.place(params), fused_step, judge)


def in_process(pairs):
    return [(Reward(name="even", value=even(task, text)),) for task, text in pairs]


def hang(pairs):
    time.sleep(3600)


def fail(pairs):
    raise KeyError("no such judge")


def lose_one(pairs):
    return in_process(pairs)[1:]


def statuses(groups):
    return {r.status for g in groups for t in g.trajectories for r in t.rewards}


def snapshot(state):
    """NumPy copies: the state itself is donated to the next step."""
    return jax.tree.map(lambda leaf: np.array(leaf), jax.device_get(state))


def assert_survives(program, state, step):
    """A judge that fails, hangs or answers nonsense costs its step the update, and nothing else."""
    tasks = [draw("toy/even", 0, "train", 0, index) for index in range(8)]
    for judge, status in ((fail, "failed"), (lose_one, "failed"), (hang, "timeout")):
        program.judge[0] = judge
        before = snapshot(state)
        began = time.monotonic()
        state, metrics, groups = program.fused_step(
            state, program.reference, tasks, step=step, kl_coef=0.0
        )
        assert time.monotonic() - began < 30
        assert statuses(groups) == {status}
        assert not any(t.scored for g in groups for t in g.trajectories)
        assert metrics["update_skipped"] == 1
        jax.tree.map(np.testing.assert_array_equal, before.params, snapshot(state).params)
    program.judge[0] = in_process
    before = snapshot(state)
    state, metrics, groups = program.fused_step(
        state, program.reference, tasks, step=step, kl_coef=0.0
    )
    assert metrics["update_skipped"] == 0
    assert statuses(groups) == {"ok"}
    assert not np.array_equal(
        before.params["embed"]["embedding"], snapshot(state).params["embed"]["embedding"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(CUBE, id="2x2x2"),
        pytest.param({"data": 1, "fsdp": 8}, id="fsdp8", marks=pytest.mark.slow),
        pytest.param({"data": 8}, id="data8", marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "context": 4, "data": 1}, id="cut", marks=pytest.mark.slow),
    ],
)
def test_on_eight_devices_fused_steps_give_the_same_and_survive_their_judge(staged, mesh):
    program = make_program(make_mesh(**mesh))
    state, (groups, params, _) = program.state, staged
    for step in range(3):
        expected = [group for group in groups if group.step == step]
        tasks = [group.task for group in expected]
        state, _, sampled = program.fused_step(
            state, program.reference, tasks, step=step, kl_coef=0.0
        )
        assert_same_groups(sampled, expected)
    assert_close(snapshot(state).params, params)
    assert_survives(program, state, step=3)


@pytest.mark.slow
def test_groups_and_answers_without_signal_are_left_out_as_in_the_staged_schedule(
    tmp_path, monkeypatch
):
    """Verdicts missing, groups all the same, truncated answers, penalties: the same update in both schedules."""
    monkeypatch.setattr(rl, "make_mesh", one_device)
    config = override(
        get_config(),
        tasks__domains=("toy/raises", "toy/constant"),
        algorithm__overlong_buffer=4,
        algorithm__mask_truncated=True,
        rollout__max_tokens=40,
        num_steps=2,
    )
    runs = []
    for schedule in ("staged", "fused"):
        workdir = tmp_path / schedule
        rl.train(override(config, schedule=schedule), workdir)
        runs.append(
            (
                ParquetStore(workdir / "trajectories").read(),
                params_of(workdir),
                read_metrics(workdir),
            )
        )
    assert_same_groups(runs[0][0], runs[1][0])
    assert_close(runs[0][1], runs[1][1])
    assert statuses(runs[0][0]) == {"ok", "failed"}
    reasons = {t.stop_reason for g in runs[0][0] for t in g.trajectories}
    assert reasons == {"stop", "length"}
    for name in ("dropped/zero_variance_groups", "reward/failed", "updates", "loss"):
        assert [r[name] for r in runs[0][2]] == pytest.approx([r[name] for r in runs[1][2]]), name
    assert runs[0][2][0]["dropped/zero_variance_groups"] >= 4


@pytest.mark.slow
def test_a_run_goes_on_though_verifiers_raise_and_hang(tmp_path):
    """Through the whole trainer, in worker processes, on eight devices."""
    config = override(
        get_config(),
        schedule="fused",
        tasks__domains=("toy/hangs",),
        verifiers__timeout_s=0.5,
        eval__tasks_per_domain=1,
        num_steps=2,
    )
    rl.train(config, tmp_path)
    records = read_metrics(tmp_path)
    assert records[1]["time/fused_s"] < 30  # the first step compiles
    assert all(record["update_skipped"] == 0 for record in records)
    assert sum(record["reward/failed"] for record in records) > 0
    assert sum(record["reward/timeout"] for record in records) > 0


def host_judge(mesh, judge, tasks, deadline_s=30.0):
    host = HostJudge(judge, byte_level_tokenizer(), mesh, deadline_s=deadline_s)
    host.begin(tasks)
    return host


def task(number):
    return Task(id=str(number), domain="toy/even", prompt=(), answer=None)


@pytest.mark.parametrize("mesh", [CUBE, {"data": 8}], ids=["2x2x2", "data8"])
def test_large_answers_reach_the_host_from_every_device_once(mesh):
    """JAX copies large callback arguments in threads that may all be waiting in callbacks; ours come in pieces."""
    mesh = make_mesh(**mesh)
    P, G, R = 8, 4, 12_000  # several pieces a shard, the last one not full
    judged = []
    lock = threading.Lock()

    def judge(pairs):
        with lock:
            judged.extend((task.id, len(text)) for task, text in pairs)
        return [(Reward(name="length", value=len(text) / 2**20),) for _, text in pairs]

    rng = np.random.default_rng(0)
    letters = np.array(LETTERS)
    tokens = letters[rng.integers(0, 26, (P, G, R))]
    lengths = rng.integers(1, R, (P, G)).astype(np.int32)
    host = host_judge(mesh, judge, [task(row) for row in range(P)])
    arrays = jax.device_put((np.arange(P, dtype=np.int32), tokens, lengths), row_sharding(mesh))
    program = jax.jit(lambda *arrays: judge_on_host(host, mesh, *arrays))
    with jax.set_mesh(mesh):
        scores, scored = jax.device_get(program(*arrays))
    np.testing.assert_allclose(scores, lengths / 2**20, rtol=1e-6)
    assert scored.all()
    assert sorted(judged) == sorted(
        (str(row), int(n)) for row in range(P) for n in lengths[row]
    )  # the tensor axis holds copies, and one of them is judged
    for row in range(P):
        for g in range(G):
            found = np.array([ord(letter) - ord("a") for letter in host.texts[row][g]])
            np.testing.assert_array_equal(letters[found], tokens[row, g, : lengths[row, g]])


@pytest.mark.slow
def test_a_shard_may_be_judged_for_longer_than_xla_lets_devices_wait_for_each_other():
    script = """
    import jax, jax.numpy as jnp, numpy as np, time
    from rlvr_jax.distributed.mesh import make_mesh
    from rlvr_jax.distributed.sharding import row_sharding
    from rlvr_jax.training.fused import judge_on_host
    from rlvr_jax.types import Reward
    from tests.training.test_fused import host_judge, task
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    def judge(pairs):
        if pairs[0][0].id == "0":
            time.sleep(70)
        return [(Reward(name="one", value=1.0),) for _ in pairs]
    host = host_judge(mesh, judge, [task(i) for i in range(4)], deadline_s=100.0)
    arrays = (np.arange(4, dtype=np.int32), np.ones((4, 2, 3), np.int32), np.ones((4, 2), np.int32))
    program = jax.jit(lambda *arrays: judge_on_host(host, mesh, *arrays)[0].sum())
    with jax.set_mesh(mesh):
        print(float(program(*jax.device_put(arrays, row_sharding(mesh)))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout == "8.0\n", done.stderr[-2000:]


def test_a_judge_that_hangs_does_not_keep_the_interpreter_from_exiting():
    script = """
    import time, numpy as np
    from rlvr_jax.distributed.mesh import make_mesh
    from tests.training.test_fused import hang, host_judge, one_device, task
    host = host_judge(one_device(), hang, [task(0)], deadline_s=0.2)
    host(0, np.zeros(1, int), np.ones((1, 1), int), np.ones(1, int))
    print(host.rewards[0][0][0].status)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "timeout\n"), done.stderr[-2000:]


def test_which_groups_have_signal_depends_on_the_baseline():
    scores = np.array([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [np.nan, 1.0]])
    scored = np.isfinite(scores)

    def signal(rows, estimator):
        found = groups_with_signal(scores[rows], scored[rows], adv_estimator=estimator)
        return np.asarray(found).tolist()

    assert signal([0, 1, 2, 3], "grpo") == [False, False, True, False]
    # The batch is the baseline: a group of equals is above or below it. Groups of one live from this.
    assert signal([0, 1, 3], "reinforce_plus_plus") == [True, True, True]
    assert signal([0, 3], "reinforce_plus_plus") == [False, False]


def test_verifiers_in_worker_processes_can_be_called_from_all_devices_at_once():
    mesh = make_mesh(data=8)
    tasks = [draw("toy/hangs", 0, "train", 0, index) for index in range(8)]
    with VerifierPool(2, timeout_s=0.5) as pool:
        host = HostJudge(DomainJudge(pool), byte_level_tokenizer(), mesh, deadline_s=60.0)
        host.begin(tasks)
        # Codes modulo 16: 4 hangs, 6 is even, 1 raises, 8 is even.
        tokens = np.tile(np.array([[LETTERS[i]] for i in (3, 5, 0, 7)], np.int32), (8, 1, 1))
        lengths = np.ones((8, 4), np.int32)
        arrays = jax.device_put((np.arange(8, dtype=np.int32), tokens, lengths), row_sharding(mesh))
        began = time.monotonic()
        with jax.set_mesh(mesh):
            program = jax.jit(lambda *arrays: judge_on_host(host, mesh, *arrays))
            scores, scored = jax.device_get(program(*arrays))
        assert time.monotonic() - began < 40
    np.testing.assert_array_equal(scored, [[False, True, False, True]] * 8)
    np.testing.assert_array_equal(scores, [[0, 1, 0, 1]] * 8)
    rewards = [[samples[0].status for samples in host.rewards[row]] for row in range(8)]
    assert rewards == [["timeout", "ok", "failed", "ok"]] * 8


def test_tasks_that_do_not_divide_over_the_mesh_are_refused_before_anything_is_done(tmp_path):
    config = override(get_config(), schedule="fused", tasks__tasks_per_step=6)
    with pytest.raises(ConfigError, match=r"tasks_per_step \(6\) must be divisible by .* \(8\)"):
        rl.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
