"""``rlvr COMMAND ...``: finds the command's module, runs it, and turns our errors into one line.

A command is ``rlvr_jax/cli/<name>.py`` with ``main(argv) -> exit status``; it is imported only when it is asked for, so
``rlvr --help`` is quick.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from rlvr_jax.errors import (
    CheckpointError,
    ConfigError,
    MismatchError,
    MissingExtraError,
    Preempted,
    ProcessError,
    WeightsError,
)

COMMANDS = {
    "train": "reinforcement learning with verifiable rewards",
    "sft": "supervised fine-tuning on chat data",
    "eval": "score a checkpoint on domains: pass@1, pass@k, intervals",
    "sample": "print what a policy answers to a prompt",
    "tasks": "list domains, show tasks, score a response against one",
    "plan": "whether a run fits, and how fast it can be, before anything is rented",
    "sweep": "run a config over the grid it gives, with a table at the end",
    "doctor": "devices, versions, memory; what is missing and how to get it",
}
EXPECTED = (ConfigError, WeightsError, CheckpointError, MismatchError, MissingExtraError)
EXPECTED += (ProcessError, OSError)
PACKAGE = pathlib.Path(__file__).resolve().parent.parent


def is_expected(error: Exception) -> bool:
    """Whether the message is for the user: ours by type, misuse our code refused, or the system's (disk, path).

    A ValueError out of another library is a bug, and shows its traceback.
    """
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    return isinstance(error, EXPECTED) or (
        isinstance(error, ValueError) and PACKAGE in raised_in.parents
    )


def usage() -> str:
    commands = "\n".join(f"  {name:<7} {summary}" for name, summary in COMMANDS.items())
    return (
        f"usage: rlvr COMMAND [--help] ...\n\n{commands}\n\n"
        "RLVR_TRACEBACK=1 shows where an error came from."
    )


def deliver_again(unraisable: Any) -> None:
    """Hook for exceptions Python has to ignore: an interrupt among them is sent again, a moment later.

    Tracing collects garbage all the time, and an interrupt that comes inside JAX's callback for that would be lost.
    """
    if unraisable.exc_type is not KeyboardInterrupt:
        return sys.__unraisablehook__(unraisable)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: arguments after the program's name; the process's own when None.

    Returns:
      Exit status: the command's own, 2 for misuse or an error with a message for the user, 130 when interrupted; of a
      run that was told to make room and saved itself RLVR_PREEMPTED_STATUS (0), by which a scheduler may know it.
    """
    if argv is None:
        sys.unraisablehook = deliver_again
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    try:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ConfigError(f"unknown command {name!r}{hint} Known: {', '.join(COMMANDS)}")
        return importlib.import_module(f"rlvr_jax.cli.{name}").main(rest)
    except BrokenPipeError:  # the reader of our output has gone (| head): nothing more to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Preempted as notice:
        print(f"rlvr: {notice}", file=sys.stderr)
        return int(os.environ.get("RLVR_PREEMPTED_STATUS", 0))
    except Exception as error:
        if os.environ.get("RLVR_TRACEBACK") == "1" or not is_expected(error):
            raise
        print(f"rlvr: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("rlvr: interrupted", file=sys.stderr)
        if argv is None:
            # Everything was closed on the way here. A program the devices still run would crash the interpreter's exit.
            sys.stdout.flush()
            os._exit(130)
        return 130
