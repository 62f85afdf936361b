"""``rlvr eval``: a run's own figures again, a model's, and what it refuses."""

import json
import pathlib

import numpy as np
import pytest

from rlvr_jax.cli.eval import main
from rlvr_jax.cli.flags import load_config
from rlvr_jax.errors import ConfigError
from rlvr_jax.training.rl import train
from rlvr_jax.trajectories.store import ParquetStore

CONFIG = pathlib.Path(__file__).resolve().parents[2] / "configs" / "rl_quickstart.py"
MODEL = ["--model", "tiny-random", "--max-tokens", "8", "--num-samples", "4", "--num-workers", "1"]


def run_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    config = load_config(f"{CONFIG}:tiny").unlock()
    config.num_steps = 1
    config.optimizer.learning_rate = 0.05  # far enough for other answers
    workdir = tmp_path_factory.mktemp("run")
    return workdir, train(config, workdir)


def test_a_run_is_measured_as_it_measured_itself(finished_run, capsys, tmp_path):
    workdir, summary = finished_run
    after = run_json(capsys, "--workdir", str(workdir), "--save", str(tmp_path / "after"))
    assert (after["step"], after["model"]) == (1, str(workdir))
    for name, row in summary["domains"].items():
        assert after["domains"][name]["pass@1"]["value"] == row["after"]
        assert after["domains"][name]["num_samples"] == row["n"]
    own = ParquetStore(workdir / "held_out").read(1)
    again = ParquetStore(tmp_path / "after").read()
    assert [g.key for g in again] == [g.key for g in own]
    for mine, theirs in zip(again, own, strict=True):
        for a, b in zip(mine.trajectories, theirs.trajectories, strict=True):
            assert np.array_equal(a.tokens, b.tokens)


def test_with_model_only_the_settings_are_the_runs(finished_run, capsys, tmp_path):
    workdir, _ = finished_run
    argv = ["--workdir", str(workdir), "--model", "tiny-random", "--save", str(tmp_path / "before")]
    before = run_json(capsys, *argv)
    assert (before["step"], before["model"]) == (0, "tiny-random")
    own = ParquetStore(workdir / "held_out").read(0)
    again = ParquetStore(tmp_path / "before").read()
    assert [[t.text for t in g.trajectories] for g in again] == [
        [t.text for t in g.trajectories] for g in own
    ]


def test_flags_come_before_the_runs_settings(finished_run, capsys):
    workdir, _ = finished_run
    argv = ["--workdir", str(workdir), "--num-tasks", "2", "--levels", "1", "--seed", "5"]
    found = run_json(capsys, *argv, "--k", "1,2")
    assert found["sampling"]["seed"] == 5
    assert found["sampling"]["max_tokens"] == 8
    [result] = found["domains"].values()
    assert result["num_tasks"] == 2
    assert [key for key in result if key.startswith("pass@")] == ["pass@1", "pass@2"]


def test_a_model_on_several_domains_as_a_table_and_in_a_file(capsys, tmp_path):
    argv = [*MODEL, "--domains", "arithmetic/add,arithmetic/sub", "--num-tasks", "4"]
    assert main([*argv, "--out", str(tmp_path / "deep" / "eval.json")]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "deep" / "eval.json").read_text())
    assert list(record["domains"]) == ["arithmetic/add", "arithmetic/sub"]
    assert record["num_samples"] == 4 and record["sampling"]["max_tokens"] == 8
    assert all(name in printed for name in [*record["domains"], "mean", "pass@1", "pass@4"])


def test_domains_of_ones_own_are_imported(capsys, tmp_path, monkeypatch):
    from rlvr_jax.tasks.registry import DOMAINS

    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_eval_domains.py").write_text(
        "import rlvr_jax as rl\n"
        "@rl.domain('own/any', description='anything', num_levels=1, max_response_tokens=4,\n"
        "           verifiers=(rl.VerifierUse(name='regex', params={'pattern': '', 'mode': 'search'}),))\n"
        "def any_answer(level, rng):\n"
        "    question = f'What is {rng.integers(10, 99)} + 3?'\n"
        "    return rl.Draft(prompt=rl.ask(question, system='Answer with the number only.'), answer='')\n"
    )
    argv = [*MODEL, "--domains", "own", "--num-tasks", "2", "--import", "my_eval_domains"]
    assert run_json(capsys, *argv)["domains"]["own/any"]["pass@1"]["value"] == 1.0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "tiny-random"], "no domains; give --domains"),
        (["--domains", "text/copy"], "no model; give --model"),
        (["--domains", "text/copy", "--workdir", "/nowhere"], "not the folder of a run"),
    ],
)
def test_what_is_missing_is_said(argv, message):
    with pytest.raises(ConfigError, match=message):
        main(argv)


def test_answers_are_never_mixed_with_others(finished_run, tmp_path):
    workdir, _ = finished_run
    ParquetStore(tmp_path).append(ParquetStore(workdir / "held_out").read(0))
    with pytest.raises(ConfigError, match="holds answers already"):
        main([*MODEL, "--domains", "text/copy", "--save", str(tmp_path)])


def test_a_k_past_the_samples_is_refused_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr("rlvr_jax.training.policy.load_policy", None)
    with pytest.raises(ValueError, match="k is 1, 8 with num_samples=4"):
        main([*MODEL, "--domains", "text/copy", "--k", "1,8"])


def test_a_file_that_cannot_be_written_is_found_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("rlvr_jax.training.policy.load_policy", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        main([*MODEL, "--domains", "text/copy", "--out", str(tmp_path / "file" / "eval.json")])


def test_help_gives_examples_and_defaults(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert "rlvr eval --workdir runs/quickstart" in printed and "(0.7)" in printed
