"""The trainer: it learns, leaves out what teaches nothing, counts what it loses, and refuses what cannot work."""

import json

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from rlvr_jax.algorithms.advantages import ESTIMATORS
from rlvr_jax.algorithms.aggregation import LOSS_AGG_MODES
from rlvr_jax.algorithms.kl import KL_LOSSES
from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.cli.flags import config_keys, load_config
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import MismatchError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.training import rl
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.training.step import StepConfig, with_advantages
from rlvr_jax.trajectories.store import ParquetStore
from rlvr_jax.types import Group, Reward, Trajectory
from tests.training.toys import REPOSITORY, get_config, override

QUICKSTART = f"{REPOSITORY / 'configs' / 'rl_quickstart.py'}"


@pytest.fixture(scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
        yield


def pack(groups, config):
    return rl.pack(
        groups,
        rl.step_advantages(groups, config),
        config,
        num_shards=1,
        num_column_shards=1,
        min_rows=1,
    )


def params_of(workdir):
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        restored = checkpointer.restore_params(abstract_params(load_pretrained(TINY).config))
    assert restored is not None
    return jax.tree.map(np.asarray, restored[1])


def assert_untouched(workdir):
    jax.tree.map(np.testing.assert_array_equal, params_of(workdir), load_pretrained(TINY).params)


def run(workdir, **settings):
    summary = rl.train(override(get_config(), **settings), workdir)
    return summary, read_metrics(workdir)


@pytest.fixture(scope="module")
def learning(tmp_path_factory, one_device):
    """A run that is long enough to learn something."""
    workdir = tmp_path_factory.mktemp("learning")
    return workdir, *run(
        workdir, num_steps=25, optimizer__learning_rate=3e-3, rollout__group_size=8
    )


def test_reward_rises(learning):
    _, _, records = learning
    rewards = [record["reward/mean"] for record in records]
    assert np.mean(rewards[:3]) < 0.6
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2
    assert records[-1]["kl"] > records[0]["kl"]


def test_sampler_and_trainer_agree_at_every_step(learning):
    _, _, records = learning
    assert max(record["logprob_delta_max"] for record in records) < 1e-4
    assert max(record["logprob_delta_mean"] for record in records) < 1e-6


def test_programs_are_compiled_once_a_shape(learning):
    _, _, records = learning
    compiles = [record["perf/compiles"] for record in records]
    assert compiles[-1] == compiles[1] <= 4


def test_what_is_held_out_is_never_trained_on(learning):
    workdir, _, _ = learning
    trained = ParquetStore(workdir / "trajectories").read()
    held_out = ParquetStore(workdir / "held_out").read()
    assert len(trained) == 25 * 8
    assert {group.key for group in held_out}.isdisjoint(group.key for group in trained)
    assert {group.task.prompt for group in held_out}.isdisjoint(g.task.prompt for g in trained)
    before, after = ([g.key for g in held_out if g.step == step] for step in (0, 25))
    assert before == after


def test_the_run_leaves_what_the_manual_says(learning):
    workdir, summary, records = learning
    assert json.loads((workdir / "summary.json").read_text()) == summary
    assert summary["domains"]["toy/even"]["n"] == 6
    assert summary["steps"] == 25 == len(records)
    assert (workdir / "curve.png").stat().st_size > 1000
    assert ParquetStore(workdir / "trajectories").steps() == list(range(25))
    assert all(np.isfinite(record["loss"]) for record in records)


def test_groups_that_all_score_the_same_are_counted_and_change_nothing(tmp_path, one_device):
    _, records = run(tmp_path, tasks__domains=("toy/constant",), tasks__max_refills=2, num_steps=2)
    for record in records:
        assert record["update_skipped"] == 1
        assert record["updates"] == 0
        assert record["zero_std_frac"] == 1
        assert record["num_groups"] == 3 * 8  # the first draw and two more
        assert record["dropped/zero_variance_groups"] == 3 * 8
    assert_untouched(tmp_path)


@pytest.mark.slow
def test_answers_without_a_verdict_are_counted_and_not_trained_on(tmp_path, one_device):
    _, [record] = run(tmp_path, tasks__domains=("toy/raises",), num_steps=1)
    groups = ParquetStore(tmp_path / "trajectories").read()
    trajectories = [t for group in groups for t in group.trajectories]
    failed = [t for t in trajectories if not t.scored]
    assert 0 < len(failed) < len(trajectories)
    assert record["reward/failed"] == len(failed)
    assert record["reward/scored_frac"] == 1 - len(failed) / len(trajectories)
    assert record["reward/mean"] == pytest.approx(
        np.mean([t.score for t in trajectories if t.scored])
    )
    # By verifier: what was not judged is neither a pass nor absent.
    assert record["reward/moody/failed"] == len(failed)
    assert record["reward/moody/mean_effective"] == pytest.approx(record["reward/mean"])
    assert record["reward/moody/mean_all"] == pytest.approx(
        record["reward/mean"] * record["reward/scored_frac"]
    )
    assert record["update_skipped"] == 0
    batch = pack(groups, get_config())
    trained = set(np.unique(batch.sample_ids[np.asarray(batch.loss_mask) > 0]).tolist())
    assert trained == {index for index, t in enumerate(trajectories) if t.scored}


def test_with_a_learning_rate_of_zero_nothing_moves_and_ratios_are_one(tmp_path, one_device):
    _, records = run(tmp_path, optimizer__learning_rate=0.0, num_steps=2)
    assert_untouched(tmp_path)
    for record in records:
        assert record["updates"] == 1
        assert record["grad_norm"] > 0
        assert record["ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert record["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert record["clip_frac"] == 0
        assert record["kl"] == pytest.approx(0.0, abs=1e-6)
        assert record["mismatch_kl"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.slow
def test_every_epoch_of_a_step_compares_with_what_sampled(tmp_path, one_device):
    """The old log-probabilities of PPO are those of the sampler, in every epoch and minibatch."""
    _, [record] = run(
        tmp_path,
        train__num_epochs=2,
        train__num_minibatches=2,
        optimizer__learning_rate=0.0,
        num_steps=1,
    )
    assert record["updates"] == 4
    assert record["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert record["clip_frac"] == 0


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_a_baseline_of_the_batch_is_that_of_the_step_and_not_of_a_minibatch(kl_in_reward):
    config = override(
        get_config(), algorithm__adv_estimator="reinforce_plus_plus", train__num_minibatches=2
    )
    groups = [group(1.0, 0.75), group(0.25, 0.0)]  # apart, both halves would look the same
    found = np.concatenate(rl.step_advantages(groups, config))
    expected = (np.array([1, 0.75, 0.25, 0]) - 0.5) / np.std([1, 0.75, 0.25, 0], ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    parts = [rl.shaped_scores(part, config) for part in rl.split(groups, 2)]
    batches = [
        rl.pack(part, [np.zeros(2)], config, num_shards=1, num_column_shards=1, min_rows=1)
        for part in rl.split(groups, 2)
    ]
    step_config = StepConfig(
        objective=rl.objective_config(config),
        transform=LogitTransform(),
        adv_estimator="reinforce_plus_plus",
        kl_in_reward=kl_in_reward,
    )
    # All log-probabilities are 0 here, of the reference too: the KL is, and the scores stay what they are.
    batches = with_advantages(
        batches,
        [np.nan_to_num(scores) for scores in parts],
        [np.isfinite(scores) for scores in parts],
        np.float32(1.0),
        config=step_config,
    )
    for batch, values in zip(batches, (expected[:2], expected[2:]), strict=True):
        for sample, value in enumerate(values):
            of_sample = np.asarray(batch.advantages)[batch.sample_ids == sample]
            np.testing.assert_allclose(of_sample[of_sample != 0], value, rtol=1e-4)
            assert np.any(of_sample != 0)


def test_epochs_and_minibatches_are_that_many_updates(tmp_path, one_device):
    _, records = run(
        tmp_path,
        train__num_epochs=2,
        train__num_minibatches=2,
        num_steps=2,
        optimizer__schedule="linear",
    )
    assert [record["updates"] for record in records] == [4, 4]
    # The schedule counts updates, and ends with the run: 1e-3 down to 1e-4 in 8.
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx([1e-3, 1e-3 - 4 / 8 * 9e-4])
    # After the first update the policy is another than the one that sampled; the comparison is made before it.
    assert records[0]["ratio_max"] > 1.001
    assert records[0]["logprob_delta_max"] < 1e-4


@pytest.mark.slow
def test_a_group_of_one_learns_from_the_baseline_of_the_batch(tmp_path, one_device):
    _, [record] = run(
        tmp_path,
        rollout__group_size=1,
        algorithm__adv_estimator="reinforce_plus_plus",
        num_steps=1,
    )
    assert record["updates"] == 1
    assert record["grad_norm"] > 0
    assert record["dropped/zero_variance_groups"] == 0


# Every option once, in as few programs as that takes.
OPTIONS = [
    (
        [*ESTIMATORS][index % len([*ESTIMATORS])],
        [*KL_LOSSES][index],
        LOSS_AGG_MODES[index % len(LOSS_AGG_MODES)],
        ("off", "token", "sequence")[index % 3],
        bool(index % 2),
        pytest.mark.slow if index else (),
    )
    for index in range(len([*KL_LOSSES]))
]


@pytest.mark.parametrize(
    ("adv_estimator", "kl_loss_type", "loss_agg_mode", "rollout_is", "kl_in_reward"),
    [pytest.param(*options, marks=mark, id="-".join(options[:4])) for *options, mark in OPTIONS],
)
def test_every_option_runs_a_step_that_moves_the_weights(
    tmp_path, one_device, adv_estimator, kl_loss_type, loss_agg_mode, rollout_is, kl_in_reward
):
    _, records = run(
        tmp_path,
        num_steps=2,
        algorithm__adv_estimator=adv_estimator,
        algorithm__kl_loss_type=kl_loss_type,
        algorithm__loss_agg_mode=loss_agg_mode,
        algorithm__rollout_is=rollout_is,
        algorithm__use_kl_in_reward=kl_in_reward,
        algorithm__kl_coef=0.1 if kl_in_reward else 0.0,
        algorithm__entropy_coef=0.001,
        rollout__top_p=0.9,
        train__micro_rows=2,
    )
    assert [record["updates"] for record in records] == [1, 1]
    assert records[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert records[1]["kl"] > 1e-6
    assert max(record["logprob_delta_max"] for record in records) < 1e-4
    assert all(np.isfinite(record["loss"]) for record in records)


def test_a_run_stops_when_sampler_and_trainer_disagree(tmp_path, one_device):
    config = override(get_config(), max_mismatch=-1.0)
    with pytest.raises(MismatchError, match=r"step 0: .*differ by .*max_mismatch=-1\.0"):
        rl.train(config, tmp_path)


def test_every_key_of_the_config_is_read(tmp_path, one_device, monkeypatch):
    """A setting that is accepted and does nothing is worse than one that is refused."""
    config = override(get_config(), num_steps=1)
    assert set(config_keys(config)) == set(config_keys(load_config(QUICKSTART)))
    read = set()
    plain = ConfigDict.__getitem__

    def recorded(self, key):
        read.add((id(self), key))
        return plain(self, key)

    def open_workdir(workdir, config, *, fresh):  # it saves all of the config
        workdir.mkdir()
        return workdir

    monkeypatch.setattr(rl, "open_workdir", open_workdir)
    monkeypatch.setattr(ConfigDict, "__getitem__", recorded)
    rl.train(config, tmp_path / "run")
    monkeypatch.undo()
    names = set()
    for key in config_keys(config):
        *groups, name = key.split(".")
        owner = config[groups[0]] if groups else config
        if (id(owner), name) in read:
            names.add(key)
    assert set(config_keys(config)) - names == set()


def test_the_quickstart_config_is_locked_and_takes_no_other_argument():
    for argument in ("", ":tiny"):
        config = load_config(f"{QUICKSTART}{argument}")
        with pytest.raises(AttributeError):
            config.optimizer.learning_rat = 1.0
        rl.check_settings(config, num_shards=1)
    with pytest.raises(ValueError, match="takes no argument 'huge'"):
        load_config(f"{QUICKSTART}:huge")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "async"}, "schedule is 'async'; expected 'staged' or 'fused'"),
        ({"num_steps": 0}, "num_steps is 0; expected at least 1"),
        ({"checkpoint__every": 0}, "checkpoint.every is 0"),
        ({"train__num_minibatches": 0}, "train.num_minibatches is 0"),
        ({"train__num_epochs": 0}, "train.num_epochs is 0"),
        ({"tasks__tasks_per_step": 0}, "tasks.tasks_per_step is 0"),
        ({"eval__num_samples": 0}, "eval.num_samples is 0"),
        ({"checkpoint__keep": 0}, "checkpoint.keep is 0"),
        ({"rollout__max_rows": 0}, "rollout.max_rows is 0"),
        ({"verifiers__num_workers": 0}, "verifiers.num_workers is 0"),
        ({"verifiers__timeout_s": 0.0}, r"verifiers.timeout_s is 0\.0; expected a finite number"),
        ({"tasks__max_refills": -1}, "max_refills is -1; expected at least 0"),
        ({"train__row_length": -1}, "row_length is -1; expected at least 0"),
        ({"train__micro_rows": -8}, "micro_rows is -8; expected at least 0"),
        ({"algorithm__overlong_buffer": 7}, r"buffer_length is 7; expected 1 to .*\(6\)"),
        ({"eval__tasks_per_domain": 0}, "eval.tasks_per_domain is 0"),
        ({"rollout__group_size": 1}, r"a group of 1 has no baseline.*raise group_size"),
        ({"algorithm__adv_estimator": "gae"}, "unknown adv_estimator 'gae'"),
        ({"algorithm__kl_coef": 0.1}, "kl_coef is 0.1 and use_kl_in_reward is False"),
        ({"algorithm__use_kl_in_reward": True}, "kl_coef is 0.0 and use_kl_in_reward is True"),
        ({"algorithm__kl_target": 0.1}, "kl_target is 0.1; it steers kl_coef"),
        ({"algorithm__kl_loss_type": "k1"}, "which as a loss has an expected gradient of zero"),
        ({"algorithm__loss_agg_mode": "mean"}, "loss_agg_mode is 'mean'; expected one of"),
        ({"algorithm__clip_ratio_low": 2.0}, r"clip_ratio_low is 2.0; expected in \(0, 1\]"),
        ({"rollout__temperature": 0.0}, "temperature is 0: greedy samples have no gradient"),
        (
            {"rollout__max_tokens": 4096},
            r"max_tokens=4096 that is past the model's context of 2048",
        ),
        ({"tasks__domains": ("toy/long",)}, r"a prompt has \d+ tokens.*context of 2048"),
        ({"tasks__domains": ()}, "the set of domains is empty"),
        ({"tasks__domains": ("toy/evn",)}, "did you mean 'toy/even'"),
        (
            {"tasks__domains": ("toy/few",), "eval__tasks_per_domain": 12},
            "too few distinct held-out tasks",
        ),
        (
            {"tasks__domains": ("toy/few",), "tasks__tasks_per_step": 24},
            "too few distinct tasks",
        ),
        ({"train__micro_rows": 3}, r"micro_rows \(3\) must be divisible by .*\(8\)"),
        ({"mesh__data": 3, "mesh__fsdp": 1}, r"needs 3 devices; there are 8"),
        ({"mesh__tensor": 8}, r"num_kv_heads \(2\) must be divisible by the tensor axis \(8\)"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"train__remat": "half"}, "train.remat is 'half'"),
        ({"optimizer__b2": 1.0}, r"optimizer.b2 is 1\.0; expected in \[0, 1\)"),
        ({"tasks__difficulty": "hard"}, "difficulty is 'hard'; expected 'adaptive', 'uniform' or"),
        ({"tasks__difficulty": "9"}, "no level 9; expected 0 to 2"),
        ({"tasks__difficulty": "2", "tasks__max_levels": 2}, "max_levels=2 leaves it out"),
        ({"optimizer__schedule": "step"}, "optimizer.schedule is 'step'"),
        ({"schedule": "fused", "train__num_epochs": 2}, "num_epochs is 2; the fused schedule is"),
        ({"schedule": "fused", "tasks__max_refills": 1}, "max_refills is 1; the fused schedule is"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_written(
    tmp_path, monkeypatch, settings, message
):
    monkeypatch.setattr(rl, "make_mesh", make_mesh)
    with pytest.raises(ValueError, match=message):
        rl.train(override(get_config(), **settings), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def group(*scores):
    trajectories = tuple(
        Trajectory(
            tokens=np.arange(4, dtype=np.int32),
            response_mask=np.array([False, True, True, True]),
            logprobs=np.zeros(4, np.float32),
            turn_starts=(1,),
            rewards=()
            if score is None
            else (Reward(name="a", value=score), Reward(name="b", value=1.0, weight=0.0)),
            stop_reason="stop",
            policy_version=(0, 0),
            sample_index=index,
        )
        for index, score in enumerate(scores)
    )
    [task] = rl.held_out_tasks("toy/even", 1, 0)
    return Group(task=task, trajectories=trajectories, step=0)


def test_scores_are_padded_to_whole_steps_with_what_is_no_score():
    config = override(get_config(), tasks__tasks_per_step=4)
    scores = rl.shaped_scores([group(1.0, 0.0), group(None, 0.5)], config)
    np.testing.assert_array_equal(scores, [[1, 0], [np.nan, 0.5], [np.nan] * 2, [np.nan] * 2])
    assert rl.shaped_scores([group(1.0, 0.0)] * 5, config).shape == (8, 2)


def test_the_penalty_on_long_answers_makes_no_group_informative():
    config = override(get_config(), algorithm__overlong_buffer=4, rollout__max_tokens=6)
    same, other = group(0.5, 0.5), group(0.0, 1.0)
    assert [id(kept) for kept in rl.trainable([same, other], config)] == [id(other)]
    np.testing.assert_allclose(rl.shaped_scores([same], config)[0], [0.25, 0.25])


def test_minibatches_are_whole_groups_and_none_is_lost():
    groups = [group(0.0, 1.0) for _ in range(5)]
    for parts in (1, 2, 3, 5, 7):
        found = rl.split(groups, parts)
        assert [id(g) for part in found for g in part] == [id(g) for g in groups]
        assert len(found) == min(parts, 5)
        assert max(map(len, found)) - min(map(len, found)) <= 1
    assert rl.split([], 2) == []
