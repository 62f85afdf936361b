import json
import os

import pytest
from ml_collections import ConfigDict

from rlvr_jax.errors import ConfigError
from rlvr_jax.training.workdir import CONFIG_FILE, OURS, open_workdir

CONFIG = ConfigDict(
    {
        "num_steps": 3,
        "seed": 0,
        "domains": ("a", "b"),
        "mesh": {"data": 1},
        "eval": {"num_samples": 2},
        "rollout": {"max_rows": 8, "max_tokens": 4},
    }
)


def changed(**values):
    config = ConfigDict(CONFIG)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in values.items()})
    return config


def make_run(workdir):
    path = open_workdir(workdir, CONFIG, fresh=False)
    (path / "trajectories").mkdir()
    (path / "trajectories" / "step_0.0.parquet").touch()
    return path


def test_a_new_folder_is_made_and_holds_the_config(tmp_path):
    path = open_workdir(tmp_path / "a" / "b", CONFIG, fresh=False)
    assert path == (tmp_path / "a" / "b").resolve()
    assert os.listdir(path) == [CONFIG_FILE]
    assert json.loads((path / CONFIG_FILE).read_text()) == {
        **CONFIG.to_dict(),
        "domains": ["a", "b"],
    }


def test_the_same_settings_open_a_run_again(tmp_path):
    path = make_run(tmp_path)
    assert open_workdir(tmp_path, ConfigDict(CONFIG), fresh=False) == path


@pytest.mark.parametrize(
    "values", [{"num_steps": 9}, {"mesh__data": 2}, {"rollout__max_rows": 16}], ids=str
)
def test_how_long_and_on_what_a_run_goes_may_change(tmp_path, values):
    make_run(tmp_path)
    path = open_workdir(tmp_path, changed(**values), fresh=False)
    saved = json.loads((path / CONFIG_FILE).read_text())
    assert ConfigDict(saved).to_dict() == {**changed(**values).to_dict(), "domains": ["a", "b"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1}, r"seed \(0 -> 1\)"),
        ({"domains": ("a",)}, r"domains \(\['a', 'b'\] -> \['a'\]\)"),
        ({"eval__num_samples": 4}, r"eval.num_samples \(2 -> 4\)"),
        ({"rollout__max_tokens": 5, "seed": 2}, r"rollout.max_tokens \(4 -> 5\), seed \(0 -> 2\)"),
    ],
)
def test_what_changes_the_result_may_not_change(tmp_path, values, message):
    path = make_run(tmp_path)
    saved = (path / CONFIG_FILE).read_bytes()
    with pytest.raises(ConfigError, match=message + ".*--fresh to start over"):
        open_workdir(tmp_path, changed(**values), fresh=False)
    assert (path / CONFIG_FILE).read_bytes() == saved


def test_a_setting_that_came_or_went_is_a_change(tmp_path):
    make_run(tmp_path)
    config = ConfigDict(CONFIG)
    config.new = 1
    with pytest.raises(ConfigError, match=r"new \('absent' -> 1\)"):
        open_workdir(tmp_path, config, fresh=False)


def test_a_run_that_got_nowhere_takes_any_settings(tmp_path):
    path = open_workdir(tmp_path, CONFIG, fresh=False)
    (path / "trajectories").mkdir()
    (path / "checkpoints").mkdir()
    open_workdir(tmp_path, changed(seed=7), fresh=False)
    assert json.loads((path / CONFIG_FILE).read_text())["seed"] == 7


def test_fresh_removes_what_is_ours_and_nothing_else(tmp_path):
    path = make_run(tmp_path)
    for name in OURS:
        target = path / name
        if "." in name:
            target.write_text("{}")
        else:
            target.mkdir(exist_ok=True)
            (target / "file").touch()
    (path / "notes.txt").write_text("mine")
    (path / "thesis").mkdir()
    open_workdir(tmp_path, changed(seed=1), fresh=True)
    assert sorted(os.listdir(path)) == [CONFIG_FILE, "notes.txt", "thesis"]


def test_a_path_through_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"workdir .*file/run cannot be written.*--workdir"):
        open_workdir(tmp_path / "file" / "run", CONFIG, fresh=False)


def test_a_damaged_config_is_named(tmp_path):
    path = make_run(tmp_path)
    (path / CONFIG_FILE).write_text('{"seed": ')
    with pytest.raises(ConfigError, match=rf"{CONFIG_FILE} is damaged.*--fresh to start over"):
        open_workdir(tmp_path, CONFIG, fresh=False)
