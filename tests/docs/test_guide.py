"""The guide does what it says: its Python runs, its configs and overrides exist, its commands work."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr_jax.cli.flags import apply_overrides, load_config
from rlvr_jax.cli.main import COMMANDS
from rlvr_jax.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = (REPOSITORY / "docs" / "guide.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The ``rlvr`` command lines of the guide, in order, without ``rlvr`` itself."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["rlvr"]]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the repository root, with the guide's own files (blocks that begin with ``# name.py``)."""
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    for block in blocks("python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / name[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # one device, as a newcomer has
    return tmp_path


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_python_of_the_guide_trains_on_its_own_domain(checkout: Path) -> None:
    scripts = [block for block in blocks("python") if not re.match(r"# \w+\.py\n", block)]
    tiny = "rl.train(load_config('configs/rl_quickstart.py:tiny'), 'runs/tiny')"
    header = f"import rlvr_jax as rl\nfrom rlvr_jax.cli.flags import load_config\n{tiny}\n"
    (checkout / "guide.py").write_text(header + "\n".join(scripts))
    printed = run("guide.py")
    assert "expects" in printed
    assert "'before': " in printed
    assert (checkout / "runs/tiny-model/model.safetensors").exists()
    # The verifier of its own gave verdicts that differ, and the policy was updated.
    records = read_metrics(checkout / "runs/kitchen-from-python")
    assert len(records) == 3
    assert all(record["reward/scored_frac"] == 1.0 for record in records)
    assert sum(record["updates"] for record in records) >= 1
    summary = json.loads((checkout / "runs/kitchen-from-python/summary.json").read_text())
    assert list(summary["domains"]) == ["kitchen/grams"]


def test_every_training_command_names_a_config_and_settings_that_exist(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(checkout)
    found = [line for line in commands() if line[0] in ("train", "sft", "sweep")]
    assert len(found) >= 8
    for line in found:
        spec = line[line.index("--config") + 1]
        overrides = [word for word in line if word.startswith("--config.")]
        apply_overrides(load_config(spec), overrides, source=spec)


def test_every_command_exists() -> None:
    assert {line[0] for line in commands()} <= COMMANDS.keys()
    assert {"train", "sft", "eval", "sample", "tasks", "sweep", "doctor"} <= {
        line[0] for line in commands()
    }


def test_links_within_the_guide_have_headings() -> None:
    headings = re.findall(r"^## (.*)$", GUIDE, re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([\w-]+)\)", GUIDE)) == anchors


RUN_COMMANDS = """
import json, sys
import rlvr_jax as rl
from rlvr_jax.cli.main import main

rl.load_policy("tiny-random").save("runs/tiny-model")  # the guide's Python saves one there
for line in json.loads(sys.argv[1]):
    print("$ rlvr", *line, flush=True)
    assert main(line) == 0, line
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_tiny_command_works(checkout: Path) -> None:
    lines = [line for line in commands() if line[0] == "tasks" or "tiny" in " ".join(line)]
    # One process for all: a process each would be mostly importing.
    printed = run("-c", RUN_COMMANDS, json.dumps(lines))
    assert printed.count("$ rlvr") == len(lines) >= 15
    assert {path.name for path in (checkout / "runs").iterdir()} >= {
        "tiny",
        "tiny-fused",
        "tiny-kitchen",
        "tiny-own",
        "tiny-sweep",
        "tiny-warm",
    }
