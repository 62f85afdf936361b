"""The import table of docs/architecture.md, held by import-linter: the contracts say it exactly, and they bite."""

import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "rlvr_jax"
BASE = {"errors", "metrics", "registry", "types"}

# What each unit may import, beside the base modules.
MAY_IMPORT: dict[str, set[str]] = {
    "algorithms": set(),
    "distributed": set(),
    "kernels": set(),
    "sandbox": set(),
    "scheduling": set(),
    "text": set(),
    "trajectories": set(),
    "models": {"distributed", "kernels"},
    "checkpoint": {"distributed"},
    "rollout": {"models", "distributed", "kernels"},
    "rewards": {"text", "sandbox"},
    "tasks": {"text"},
    "data": {"text"},
    "envs": {"text", "tasks", "rewards", "sandbox", "scheduling"},
    "evaluation": {"tasks", "envs", "trajectories"},
    "dashboard": {"trajectories", "evaluation"},
}
MAY_IMPORT["training"] = set(MAY_IMPORT) - {"dashboard"}
MAY_IMPORT["planning"] = set(MAY_IMPORT) - {"dashboard"}

UNITS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
BASE_HERE = {path.stem for path in PACKAGE.glob("*.py")} & BASE
ALLOWED = {(unit, other) for unit in UNITS - {"cli"} for other in MAY_IMPORT[unit] & UNITS}
FORBIDDEN = {
    (unit, other)
    for unit in (UNITS - {"cli"}) | BASE_HERE
    for other in UNITS | BASE_HERE
    if unit != other and (unit, other) not in ALLOWED and (unit in BASE or other not in BASE)
}


def lint(root: pathlib.Path, imports: set[tuple[str, str]]) -> subprocess.CompletedProcess[str]:
    """Runs this repository's contracts on an empty copy of the package whose units make ``imports``."""
    package = root / "rlvr_jax"
    package.mkdir()
    (package / "__init__.py").touch()
    for unit in UNITS:
        (package / unit).mkdir()
        (package / unit / "__init__.py").touch()
    for module in BASE_HERE:
        (package / f"{module}.py").touch()
    for unit, other in imports:
        module = package / f"{unit}.py" if unit in BASE else package / unit / "inner.py"
        with module.open("a") as file:  # inside a function: a late import counts as well
            file.write(
                f"def use_{other}():\n    import rlvr_jax.{other}\n"
                if other
                else "import rlvr_jax\n"
            )
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    program = pathlib.Path(sys.executable).with_name("lint-imports")
    return subprocess.run(
        [program, "--no-cache", "--no-logo"], cwd=root, capture_output=True, text=True, timeout=60
    )


def test_every_unit_is_in_the_table_and_has_a_contract():
    assert UNITS - {"cli"} <= set(MAY_IMPORT)
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"]
    covered = {
        source.removeprefix("rlvr_jax.")
        for contract in settings["contracts"]
        if contract["type"] == "forbidden"
        for source in contract["source_modules"]
    }
    assert (UNITS - {"cli"}) | BASE_HERE <= covered


def test_everything_the_table_allows_passes(tmp_path):
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    open_to_all = {(unit, base) for unit in UNITS for base in BASE_HERE}
    from_cli = {("cli", unit) for unit in UNITS - {"cli"}}
    done = lint(tmp_path, ALLOWED | open_to_all | from_cli)
    assert done.returncode == 0, done.stdout


def test_everything_else_is_caught(tmp_path):
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    done = lint(tmp_path, FORBIDDEN)
    assert done.returncode == 1
    report = " ".join(done.stdout.split())
    missed = [
        (unit, other)
        for unit, other in FORBIDDEN
        if f"rlvr_jax.{unit} is not allowed to import rlvr_jax.{other}:" not in report
        and f"rlvr_jax.{unit} -> rlvr_jax.{other} (" not in report
    ]
    assert not missed


def test_importing_the_public_face_from_inside_is_caught(tmp_path):
    pytest.importorskip("importlinter", reason="import-linter is in the dev extra")
    done = lint(tmp_path, {("text", "")})
    assert done.returncode == 1
    assert "rlvr_jax.text.inner is not allowed to import rlvr_jax:" in done.stdout
