"""Compiled programs are kept for the next run, where the user, JAX's own variable or the default says."""

import os
import subprocess
import sys

import pytest

from rlvr_jax.cli import compilation_cache
from rlvr_jax.cli.compilation_cache import keep_compiled

PROGRAM = """
from rlvr_jax.cli import compilation_cache

compilation_cache.MIN_COMPILE_S = 0.0  # of a program as small as this one
compilation_cache.keep_compiled()
import jax

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: (x @ x).sum())(jax.numpy.ones((8, 8)))
print(sum(event.endswith("/cache_hits") for event in events))
"""
VARIABLES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "XDG_CACHE_HOME")


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A home of one's own, and nothing set; this process's JAX is left as it is."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        compilation_cache, "_set", lambda name, value: monkeypatch.setenv(name, str(value))
    )
    return tmp_path


def test_the_second_process_finds_what_the_first_compiled(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    hits = [
        int(subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True))
        for _ in range(2)
    ]
    assert hits[0] == 0 < hits[1]
    assert any((tmp_path / "rlvr_jax" / "xla").iterdir())


def test_by_default_in_the_users_cache(home, monkeypatch):
    assert keep_compiled() == home / ".cache" / "rlvr_jax" / "xla"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(home / ".cache" / "rlvr_jax" / "xla")


def test_a_folder_on_the_command_line_comes_before_jaxs_variable(home, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(home / "jax"))
    assert keep_compiled() == home / "jax"
    assert keep_compiled("~/ours") == home / "ours"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(home / "ours")


def test_off_is_off(home):
    assert keep_compiled("off") is None
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "False"
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ
    assert keep_compiled() is None  # of a run that inherits it
