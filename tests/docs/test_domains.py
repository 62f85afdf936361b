"""The page about domains lists the domains and verifiers there are, and its commands work."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr_jax.cli.main import main as rlvr
from rlvr_jax.rewards import VERIFIERS
from rlvr_jax.tasks.registry import GROUPS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "domains.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^rlvr .*$", PAGE, re.MULTILINE)


def test_listing_is_what_the_command_prints() -> None:
    # In a process of its own: in this one, other tests may have registered domains.
    command = [sys.executable, "-m", "rlvr_jax", "tasks", "list"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    listed = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert listed == [printed], "replace the block with what `rlvr tasks list` prints"


def test_every_verifier_and_group_is_in_the_tables() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == {
        *VERIFIERS,
        *("ok", "failed", "timeout"),
    }
    assert all(f"`{group}`" in PAGE for group in GROUPS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "math" in command:
        pytest.importorskip("math_verify")
    assert rlvr(shlex.split(command, comments=True)[1:]) == 0
    printed = capsys.readouterr().out
    assert "score: 1" in printed if " score " in command else printed
