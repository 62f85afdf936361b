"""The page about domains lists the domains and verifiers there are, and its commands work."""

import re
import shlex
from pathlib import Path

import pytest

from rlvr_jax.cli.main import main as rlvr
from rlvr_jax.rewards import VERIFIERS
from rlvr_jax.tasks.registry import GROUPS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "domains.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^rlvr .*$", PAGE, re.MULTILINE)


def test_listing_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlvr(["tasks", "list"]) == 0
    listed = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert listed == [capsys.readouterr().out], (
        "replace the block with what `rlvr tasks list` prints"
    )


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
