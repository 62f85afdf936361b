"""``rlvr sweep``: the grid, one process a run, what is finished stays finished, what fails costs itself only."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from rlvr_jax.cli import sweep
from rlvr_jax.cli.sweep import grid, load_sweep, main, run_name
from rlvr_jax.errors import ConfigError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "configs" / "rl_sweep_example.py"

CONFIG = """
from ml_collections import ConfigDict

def get_config(arg=""):
    return ConfigDict(dict(seed=0, num_steps=1, name="", optimizer=dict(learning_rate=1e-3, betas=(0.9, 0.95))))

def get_sweep(arg=""):
    return {sweep}
"""

# Stands for ``python -m rlvr_jax``: a run in a moment. It counts how often it was started.
FAKE = """
import json, pathlib, sys, time
from rlvr_jax.cli.flags import config_parser, parse_config_flags
config, workdir, args = parse_config_flags(sys.argv[2:], config_parser("fake", ""))
workdir.mkdir(parents=True, exist_ok=True)
with (workdir / "starts").open("a") as file:
    file.write("x")
print("training", config.name, flush=True)
if config.name == "hang":
    time.sleep(60)
if config.name == "bad":
    print("rlvr: error: no memory left", file=sys.stderr)
    raise SystemExit(2)
(workdir / "config.json").write_text(json.dumps(json.loads(config.to_json_best_effort())))
summary = {"mean_after": config.optimizer.learning_rate * config.num_steps, "seed": config.seed, "device": "cpu"}
(workdir / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Writes a config with a grid, and puts a program that takes no time in place of the trainer."""
    program = tmp_path / "fake_python"
    program.write_text(f"#!{sys.executable}\nimport sys\ndel sys.argv[1:3]\n{FAKE}")
    program.chmod(0o755)
    monkeypatch.setattr(sweep.sys, "executable", str(program))

    def write(runs) -> list[str]:
        path = tmp_path / "grid.py"
        path.write_text(CONFIG.format(sweep=runs))
        return ["--config", str(path), "--workdir", str(tmp_path / "out")]

    return write


def record(argv):
    return json.loads((pathlib.Path(argv[3]) / "sweep.json").read_text())


def starts(argv, name):
    return len((pathlib.Path(argv[3]) / name / "starts").read_text())


def test_a_dict_of_lists_is_every_combination_and_a_list_is_itself():
    assert grid({"a": [1, 2], "b.c": ["x"]}, "f") == [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "x"}]
    assert grid([{"a": 1}, {}], "f") == [{"a": 1}, {}]
    for wrong in ({}, [], {"a": []}, {"a": 1}, "ab", [1]):
        with pytest.raises(ConfigError, match="get_sweep of f"):
            grid(wrong, "f")
    with pytest.raises(ConfigError, match="twice"):
        grid({"a": [1, 1]}, "f")


def test_names_of_runs_are_folders_that_tell_them_apart():
    assert run_name({"optimizer.learning_rate": 1e-5, "seed": 0}) == "learning_rate=1e-05,seed=0"
    assert run_name({"a.x": 1, "b.x": 2}) == "a.x=1,b.x=2"
    assert run_name({}) == "base"
    odd, other = run_name({"model": "../a b"}), run_name({"model": "../a_b"})
    assert "/" not in odd and " " not in odd and odd != other
    long = [run_name({"x": "y" * 300 + str(i)}) for i in range(2)]
    assert len(long[0]) < 120 and long[0] != long[1]


def test_every_run_gets_its_settings_and_the_table_has_them_all(fake, capsys):
    argv = fake({"optimizer.learning_rate": [0.25, 0.5], "name": ["é", "b c"]})
    assert main([*argv, "--config.num_steps=3", "--seed", "4"]) == 0
    runs = record(argv)["runs"]
    assert [run["summary"]["mean_after"] for run in runs] == [0.75, 0.75, 1.5, 1.5]
    assert {run["status"] for run in runs} == {"done"}
    assert {run["summary"]["seed"] for run in runs} == {4}
    printed = capsys.readouterr().out
    assert "  training b c" in printed
    assert "optimizer.learning_rate" in printed and "mean_after" in printed and "1.5" in printed
    assert pathlib.Path(f"{runs[0]['workdir']}.log").read_text() == "training é\n"


def test_tuples_and_single_runs_work(fake):
    argv = fake([{"optimizer.betas": (0.5, 0.75)}, {}])
    assert main(argv) == 0
    first, base = record(argv)["runs"]
    saved = json.loads((pathlib.Path(first["workdir"]) / "config.json").read_text())
    assert saved["optimizer"]["betas"] == [0.5, 0.75]
    assert base["name"] == "base"


def test_a_run_that_fails_is_reported_and_the_others_are_done(fake, capsys):
    argv = fake({"name": ["bad", "good"]})
    assert main(argv) == 1
    bad, good = record(argv)["runs"]
    assert (bad["status"], bad["error"], bad["summary"]) == (
        "failed",
        "rlvr: error: no memory left",
        None,
    )
    assert good["status"] == "done"
    assert "name=bad failed: rlvr: error: no memory left (all of it: " in capsys.readouterr().out


def test_finished_runs_are_left_out_until_their_settings_change(fake, capsys):
    argv = fake({"name": ["bad", "good"]})
    main(argv)
    assert main(argv) == 1
    assert (starts(argv, "name=bad"), starts(argv, "name=good")) == (2, 1)
    assert "name=good: finished already" in capsys.readouterr().out
    main([*argv, "--config.num_steps=5"])
    assert starts(argv, "name=good") == 2
    main([*argv, "--config.num_steps=5", "--fresh"])
    assert starts(argv, "name=good") == 3


def test_modules_of_ones_own_are_imported_here_and_in_every_run(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counted.py").write_text("with open('imports', 'a') as file:\n    file.write('x')")
    assert main([*fake({"seed": [0, 1]}), "--import", "counted"]) == 0
    assert (tmp_path / "imports").read_text() == "xxx"
    sys.modules.pop("counted")


def test_a_wrong_setting_in_the_grid_shows_before_any_run(fake):
    argv = fake([{"name": "good"}, {"optimiser.learning_rate": 1.0}])
    with pytest.raises(ConfigError, match=r"unknown config key 'optimiser\.learning_rate'"):
        main(argv)
    assert not pathlib.Path(argv[3]).exists()
    with pytest.raises(ConfigError, match="Unknown command line flag 'frehs'"):
        main([*fake([{}]), "--frehs"])
    config = pathlib.Path(argv[1])
    config.write_text(config.read_text().replace("get_sweep", "get_grid"))
    with pytest.raises(ConfigError, match=r"has no get_sweep\(arg\)"):
        main(argv)


def test_an_interrupt_ends_the_run_in_hand_and_the_sweep(tmp_path):
    """``kill -INT`` of the sweep alone: the run must not be left behind."""
    program = tmp_path / "fake_python"
    program.write_text(f"#!{sys.executable}\nimport sys\ndel sys.argv[1:3]\n{FAKE}")
    program.chmod(0o755)
    config = tmp_path / "grid.py"
    config.write_text(CONFIG.format(sweep=[{"name": "hang"}]))
    code = f"import sys; sys.executable = {str(program)!r}; from rlvr_jax.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "sweep", f"--config={config}", f"--workdir={tmp_path}/o"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "training hang" not in process.stdout.readline():
        pass
    children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, "rlvr: interrupted\n")
    assert children
    deadline = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{child}") for child in children):
        assert time.monotonic() < deadline, "the run goes on after its sweep was interrupted"
        time.sleep(0.05)


def test_the_example_sweeps_the_quickstart(tmp_path, capsys):
    assert [run["seed"] for run in load_sweep(str(EXAMPLE))] == [0, 1] * 3
    argv = ["--config", str(EXAMPLE), "--workdir", str(tmp_path / "none"), "--dry-run"]
    assert main(argv) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_the_tiny_example_trains(tmp_path):
    argv = ["--config", f"{EXAMPLE}:tiny", "--workdir", str(tmp_path), "--config.num_steps=1"]
    assert main(argv) == 0
    runs = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [run["status"] for run in runs] == ["done", "done"]
    assert all(run["summary"]["steps"] == 1 for run in runs)
