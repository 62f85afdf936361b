import pathlib
import sys

import pytest
from ml_collections import ConfigDict

from rlvr_jax.cli.flags import (
    apply_overrides,
    config_keys,
    config_parser,
    load_config,
    parse_config_flags,
)
from rlvr_jax.errors import ConfigError

SOURCE = """
from ml_collections import ConfigDict

def get_config(arg=""):
    return ConfigDict({
        "seed": 0,
        "name": arg or "plain",
        "save": True,
        "limit": None,
        "domains": ["arithmetic", "text"],
        "mesh": (1, 2),
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "rollout": {"sampling": {"temperature": 0.7}},
    })
"""


@pytest.fixture
def path(tmp_path) -> str:
    file = tmp_path / "config.py"
    file.write_text(SOURCE)
    return str(file)


def parse(*argv: str):
    return parse_config_flags(list(argv), config_parser("rlvr train", "trains"))


def test_without_overrides_the_config_is_the_files_own_and_locked(path):
    config, workdir, args = parse("--config", path, "--workdir", "runs/x")
    assert config.to_dict() == load_config(path).to_dict()
    assert config.is_locked
    assert workdir == pathlib.Path("runs/x")
    assert (args.fresh, args.seed) == (False, None)


def test_the_text_after_a_colon_is_get_configs_argument(path):
    assert parse(f"--config={path}:tiny", "--workdir=x").config.name == "tiny"


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("--config.seed=7", "seed", 7),
        ("--config.optimizer.learning_rate=2e-6", "optimizer.learning_rate", 2e-6),
        ("--config.optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("--config.rollout.sampling.temperature=0", "rollout.sampling.temperature", 0.0),
        ("--config.name=a=b", "name", "a=b"),
        ("--config.save=false", "save", False),
        ("--noconfig.save", "save", False),
        ("--config.domains=logic,rg/basic_arithmetic", "domains", ["logic", "rg/basic_arithmetic"]),
        ("--config.domains=logic", "domains", ["logic"]),
        ("--config.domains=['a, b', 'c']", "domains", ["a, b", "c"]),
        ("--config.domains=", "domains", []),
        ("--config.mesh=4,2", "mesh", (4, 2)),
        ("--config.mesh=(8,)", "mesh", (8,)),
        ("--config.limit=12", "limit", 12),
        ("--config.limit=soon", "limit", "soon"),
        ("--config.limit=none", "limit", None),
    ],
)
def test_an_override_sets_its_key_with_the_configs_type_and_nothing_else(
    path, override, key, value
):
    config = parse("--config", path, "--workdir", "x", override).config
    expected = load_config(path).unlock()
    holder = expected
    *groups, leaf = key.split(".")
    for group in groups:
        holder = holder[group]
    holder[leaf] = value
    assert config.to_dict() == expected.to_dict()


def test_a_value_may_follow_its_flag_as_the_next_argument(path):
    config = parse(
        "--config", path, "--workdir", "x", "--config.seed", "5", "--config.name", "-"
    ).config
    assert (config.seed, config.name) == (5, "-")


def test_the_last_of_two_overrides_wins_and_their_order_with_other_flags_is_free(path):
    config, workdir, args = parse(
        "--config.seed=1", "--fresh", "--config", path, "--config.seed=2", "--workdir", "x"
    )
    assert (config.seed, args.fresh, str(workdir)) == (2, True, "x")


def test_seed_is_config_seed(path):
    config, _, args = parse("--config", path, "--workdir", "x", "--config.seed=1", "--seed", "9")
    assert (config.seed, args.seed) == (9, 9)


def test_parsing_is_repeatable_and_reads_no_global_argv(path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--config.seed=99"])
    first = parse("--config", path, "--workdir", "x", "--config.seed=1").config
    second = parse("--config", path, "--workdir", "x", "--config.mesh=3").config
    assert (first.seed, first.mesh) == (1, (1, 2))
    assert (second.seed, second.mesh) == (0, (3,))


def test_modules_of_ones_own_are_imported_before_the_config(path, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    pathlib.Path("own_flags.py").write_text("VALUE = 7")
    file = pathlib.Path(path)
    file.write_text(f"import own_flags\n{SOURCE}".replace('"seed": 0', '"seed": own_flags.VALUE'))
    flags = ["--config", path, "--workdir", "x", "--import", "own_flags"]
    assert parse(*flags).config.seed == 7
    sys.modules.pop("own_flags")
    with pytest.raises(ConfigError, match="--import not_there: No module named 'not_there'"):
        parse(*flags, "--import", "not_there")


def test_a_command_may_add_flags_of_its_own(path):
    parser = config_parser("rlvr sweep", "sweeps")
    parser.add_argument("--dry-run", action="store_true")
    parsed = parse_config_flags(["--config", path, "--workdir", "x", "--dry-run"], parser)
    assert parsed.args.dry_run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "--config.optimizer.learning_rat=1",
            r"'optimizer.learning_rat'.*did you mean 'optimizer.learning_rate'\?",
        ),
        (
            "--config.optimizer.lr=1",
            r"'optimizer.lr'.*Known: optimizer.learning_rate, optimizer.warmup_steps",
        ),
        ("--config.learning_rate=1", r"did you mean 'optimizer.learning_rate'\?"),
        ("--config.sed=1", r"did you mean 'seed'\?.*Known: .*domains.*seed"),
        ("--config.nothing.like.it=1", r"unknown config key 'nothing.like.it'.*Known: "),
        ("--config.seed.x=1", r"unknown config key 'seed.x'"),
        ("--noconfig.sav", r"did you mean 'save'\?"),
        (
            "--config.optimizer={'learning_rate': 1}",
            r"is a group.*--config.optimizer.learning_rate=VALUE",
        ),
        ("--config.seed=many", r"config.seed=many"),
        ("--config.optimizer.learning_rate=high", r"learning_rate=high"),
        ("--config.save=perhaps", r"config.save=perhaps"),
        ("--noconfig.seed", r"noconfig.seed|Unknown command line flag"),
        ("--config.domains.0=x", r"unknown config key 'domains.0'"),
        ("--config.seed", r"seed"),
        ("--fresj", r"fresj"),
        ("stray", r"unexpected argument 'stray'"),
    ],
)
def test_a_bad_override_is_a_config_error_that_says_what_to_do(path, override, message):
    with pytest.raises(ConfigError, match=message):
        parse("--config", path, "--workdir", "x", override)


def test_seed_for_a_config_without_one_is_an_unknown_key(tmp_path):
    file = tmp_path / "bare.py"
    file.write_text(
        "from ml_collections import ConfigDict\ndef get_config():\n    return ConfigDict({'a': 1})\n"
    )
    with pytest.raises(ConfigError, match=r"unknown config key 'seed'.*Known: a"):
        parse("--config", str(file), "--workdir", "x", "--seed", "1")
    with pytest.raises(ConfigError, match="takes no argument, got 'tiny'"):
        load_config(f"{file}:tiny")


def test_a_missing_config_file_names_the_ones_beside_it(path):
    missing = str(pathlib.Path(path).with_name("confg.py"))
    with pytest.raises(ConfigError, match=r"confg.py' does not exist; there are: .*config.py"):
        load_config(missing)


@pytest.mark.parametrize(
    ("source", "message"),
    [("x = 1\n", "no get_config"), ("def get_config(arg=''):\n    return {}\n", "returned dict")],
)
def test_a_file_that_gives_no_config_dict_says_what_is_expected(tmp_path, source, message):
    file = tmp_path / "bad.py"
    file.write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_config(str(file))


def test_an_error_inside_a_config_file_is_not_disguised(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def get_config(arg=''):\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_config(str(file))


@pytest.mark.parametrize("argv", [["--config", "x.py"], ["--workdir", "x"]])
def test_config_and_workdir_are_required(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2
    assert "required" in capsys.readouterr().err


def test_config_keys_are_the_leaves():
    config = ConfigDict({"a": 1, "b": {"c": 2, "d": {"e": [3]}}})
    assert list(config_keys(config)) == ["a", "b.c", "b.d.e"]


def test_apply_overrides_serves_callers_that_have_a_config_already():
    config = apply_overrides(ConfigDict({"a": 1, "b": {"c": 2}}), ["--config.b.c=5"])
    assert config.to_dict() == {"a": 1, "b": {"c": 5}}
    with pytest.raises(ConfigError, match=r"unknown config key 'b.d'"):
        apply_overrides(ConfigDict({"a": 1, "b": {"c": 2}}), ["--config.b.d=5"])
