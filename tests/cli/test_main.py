import importlib
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from rlvr_jax.cli.main import COMMANDS, main
from rlvr_jax.errors import (
    CheckpointError,
    ConfigError,
    MissingExtraError,
    Preempted,
    ProcessError,
    WeightsError,
)


@pytest.fixture
def command(monkeypatch):
    """Replaces the body of ``rlvr train`` and returns what arguments it was called with."""
    calls: list[list[str]] = []

    def install(body):
        module = types.ModuleType("rlvr_jax.cli.train")
        module.main = lambda argv: calls.append(argv) or body()
        monkeypatch.setitem(sys.modules, "rlvr_jax.cli.train", module)
        return calls

    return install


def test_every_command_in_the_table_has_a_module_with_main():
    for name in COMMANDS:
        assert callable(importlib.import_module(f"rlvr_jax.cli.{name}").main), name


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command_and_succeeds(argv, capsys):
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and summary in printed for name, summary in COMMANDS.items())


def test_no_command_prints_the_usage_and_fails(capsys):
    assert main([]) == 2
    assert "usage: rlvr" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest_and_the_known(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == (
        f"rlvr: error: unknown command 'trian'; did you mean 'train'? Known: {', '.join(COMMANDS)}\n"
    )


def test_the_command_gets_the_rest_and_its_status_is_ours(command):
    calls = command(lambda: 3)
    assert main(["train", "--config", "x.py"]) == 3
    assert calls == [["--config", "x.py"]]


def raiser(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("batch_size is 6"),
        WeightsError("no weights"),
        CheckpointError("disk full"),
        MissingExtraError("gguf is not installed"),
        ProcessError("process 1 of 2 was lost"),
        PermissionError(13, "Permission denied", "/runs"),
    ],
)
def test_an_error_for_the_user_is_one_line_and_status_2(command, capsys, monkeypatch, error):
    monkeypatch.delenv("RLVR_TRACEBACK", raising=False)
    command(raiser(error))
    assert main(["train"]) == 2
    assert capsys.readouterr().err == f"rlvr: error: {error}\n"


def test_misuse_that_our_own_code_refuses_is_one_line(command, capsys):
    from rlvr_jax.types import SamplingParams

    command(lambda: SamplingParams(top_p=2.0))
    assert main(["train"]) == 2
    assert "SamplingParams.top_p is 2.0" in capsys.readouterr().err


def test_a_value_error_of_another_library_is_a_bug_and_propagates(command):
    command(lambda: np.zeros(3).reshape(2, 2))
    with pytest.raises(ValueError, match="reshape"):
        main(["train"])


def test_rlvr_traceback_lets_the_error_through(command, monkeypatch):
    monkeypatch.setenv("RLVR_TRACEBACK", "1")
    command(raiser(ConfigError("batch_size is 6")))
    with pytest.raises(ConfigError, match="batch_size is 6"):
        main(["train"])


def test_a_run_that_was_told_to_stop_and_saved_itself_has_not_failed(command, capsys, monkeypatch):
    monkeypatch.delenv("RLVR_PREEMPTED_STATUS", raising=False)
    command(raiser(Preempted("told to stop after step 3 of 9")))
    assert main(["train"]) == 0
    assert capsys.readouterr().err == "rlvr: told to stop after step 3 of 9\n"
    monkeypatch.setenv("RLVR_PREEMPTED_STATUS", "75")  # a scheduler that has to know
    assert main(["train"]) == 75


def test_an_interrupt_is_status_130(command, capsys):
    command(raiser(KeyboardInterrupt()))
    assert main(["train"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_python_dash_m_rlvr_jax_is_the_same_program_and_starts_without_jax():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rlvr_jax", "nonsense"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "rlvr: error: unknown command 'nonsense'" in done.stderr
    assert "jax._src" not in done.stderr, "rlvr imports jax before it knows the command"


def test_a_closed_pipe_ends_quietly():
    code = "from rlvr_jax.cli.main import main; raise SystemExit(main(['train']))"
    patch = (
        "import sys, types; m = types.ModuleType('rlvr_jax.cli.train');"
        "m.main = lambda a: [print('x' * 1000, flush=True) for _ in range(10000)] and 0;"
        "sys.modules['rlvr_jax.cli.train'] = m;"
    )
    with subprocess.Popen(
        [sys.executable, "-c", patch + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_the_installed_script_is_this_main():
    script = pathlib.Path(sys.executable).with_name("rlvr")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: rlvr")


INTERRUPTED = """
import os, signal, sys, time, types
from rlvr_jax.cli.main import main
def body(argv):
    {body}
    time.sleep(30)
module = types.ModuleType("rlvr_jax.cli.train")
module.main = body
sys.modules["rlvr_jax.cli.train"] = module
sys.argv = ["rlvr", "train"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    "body",
    [
        "os.kill(os.getpid(), signal.SIGINT)",
        # Python ignores what is raised inside a destructor; the interrupt must not be lost with it.
        "type('Late', (), {'__del__': lambda self: os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.1)})()",
        # The devices are at work when the interpreter ends.
        "import jax, jax.numpy as jnp; x = jnp.ones((2000, 2000));"
        " jax.jit(lambda x: jax.lax.fori_loop(0, 1000, lambda i, x: x @ x, x))(x);"
        " os.kill(os.getpid(), signal.SIGINT)",
    ],
)
def test_an_interrupt_ends_the_process_with_130_and_one_line(body):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(body=body)],
        capture_output=True,
        text=True,
        timeout=25,
    )
    assert (done.returncode, done.stderr) == (130, "rlvr: interrupted\n")
