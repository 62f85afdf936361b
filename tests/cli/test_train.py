"""``rlvr train``: the quickstart's tiny run, and one clear line for whatever cannot work, with nothing lost."""

import json
import os
import subprocess
import sys

import jax
import pytest

from rlvr_jax.cli.main import main as rlvr
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.errors import MissingExtraError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.models.weights import save_weights
from rlvr_jax.rewards import json_schema
from rlvr_jax.training import rl
from rlvr_jax.training.policy import TINY, load_pretrained
from rlvr_jax.trajectories.store import ParquetStore
from tests.training.toys import REPOSITORY

QUICKSTART = f"--config={REPOSITORY / 'configs' / 'rl_quickstart.py'}"
TOY = f"--config={REPOSITORY / 'tests' / 'training' / 'toy_config.py'}"


@pytest.fixture(scope="module")
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, one_device):
    """The workdir of a run of two steps, to be left as it is."""
    workdir = tmp_path_factory.mktemp("finished")
    flags = [TOY, "--config.num_steps=2", "--config.checkpoint.every=1"]
    assert rlvr(["train", *flags, f"--workdir={workdir}"]) == 0
    return workdir


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): path.read_bytes() for path in files}


def refusal(capsys, *flags):
    """The one line that the command gives up with."""
    capsys.readouterr()
    assert rlvr(["train", *map(str, flags)]) == 2
    output = capsys.readouterr()
    assert "Traceback" not in output.err
    [line] = output.err.splitlines()
    assert line.startswith("rlvr: error: ")
    return line


def test_the_tiny_quickstart_runs_and_shows_what_it_came_to(tmp_path, capsys, one_device):
    assert rlvr(["train", f"{QUICKSTART}:tiny", f"--workdir={tmp_path}", "--seed", "3"]) == 0
    output = capsys.readouterr().out
    assert "step 4/4" in output
    assert "held-out pass rate" in output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) >= {"domains", "mean_before", "mean_after", "seconds", "steps", "seed"}
    assert (summary["seed"], summary["steps"]) == (3, 4)
    assert all(record["updates"] == 1 for record in read_metrics(tmp_path))
    for row in summary["domains"].values():
        assert set(row) == {"before", "after", "n"}
    assert summary["device"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.optimizer.learning_rat=1", "did you mean 'optimizer.learning_rate'? Known:"),
        ("--config.model=no-such-model", "no model 'no-such-model'"),
        ("--config.tasks.domains=", "the set of domains is empty; expected at least one"),
        ("--config.rollout.group_size=1", "a group of 1 has no baseline"),
        ("--config.rollout.max_tokens=3000", "past the model's context of 2048: lower"),
        ("--config.mesh.data=3", "change config.mesh"),
        (
            "--config.train.micro_rows=3",
            "(3) must be divisible by the data, fsdp and expert axes (8)",
        ),
        ("--config.num_steps=many", "num_steps"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_and_costs_nothing(
    capsys, finished, monkeypatch, flag, message
):
    monkeypatch.setattr(rl, "make_mesh", make_mesh)
    before = contents(finished)
    for more in ([], ["--fresh"]):
        line = refusal(capsys, TOY, flag, f"--workdir={finished}", *more)
        assert message in line
    assert contents(finished) == before


def test_a_verifier_whose_extra_is_missing_costs_nothing(capsys, finished, monkeypatch, one_device):
    def absent(module, extra):
        raise MissingExtraError(f"{module} is not installed")

    monkeypatch.setattr(json_schema, "require_extra", absent)
    before = contents(finished)
    flags = [TOY, f"--workdir={finished}", "--config.tasks.domains=toy/json"]
    for more in ([], ["--fresh"]):
        assert "jsonschema is not installed" in refusal(capsys, *flags, *more)
    assert contents(finished) == before


def test_tasks_that_do_not_divide_over_the_mesh_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(rl, "make_mesh", make_mesh)
    flags = [TOY, f"--workdir={tmp_path}", "--config.tasks.tasks_per_step=6"]
    line = refusal(capsys, *flags, "--config.schedule=fused")
    assert "tasks.tasks_per_step (6) must be divisible by the data, fsdp and expert axes" in line
    assert "change config.tasks.tasks_per_step or config.mesh" in line


def test_a_tokenizer_of_another_model_is_refused(capsys, tmp_path, tiny_config):
    tiny = load_pretrained(TINY)
    params = jax.tree.map(lambda x: x, tiny.params)
    params["embed"] = {"embedding": params["embed"]["embedding"][: tiny_config.vocab_size]}
    model = tmp_path / "model"
    save_weights(model, tiny_config, params, tokenizer_files=tiny.tokenizer.files())
    line = refusal(capsys, TOY, f"--config.model={model}", f"--workdir={tmp_path / 'run'}")
    assert "wrong tokenizer for the model: it has 258 tokens, the embedding 128 rows" in line


def test_a_config_that_is_not_there_is_named(capsys, tmp_path):
    line = refusal(capsys, "--config=configs/rl_quick.py", f"--workdir={tmp_path}")
    assert "'configs/rl_quick.py' does not exist; there are: configs/" in line
    assert "configs/rl_quickstart.py" in line


def test_a_workdir_that_cannot_be_written_is_named(capsys, tmp_path, one_device):
    (tmp_path / "file").write_text("")
    line = refusal(capsys, TOY, f"--workdir={tmp_path / 'file' / 'run'}")
    assert "cannot be written" in line
    assert "choose another --workdir" in line


def test_a_run_is_not_resumed_with_other_settings(capsys, finished, one_device):
    before = contents(finished)
    flags = [TOY, f"--workdir={finished}", "--config.num_steps=2", "--config.checkpoint.every=1"]
    line = refusal(capsys, *flags, "--config.optimizer.learning_rate=0.5", "--seed=1")
    assert "optimizer.learning_rate (0.001 -> 0.5), seed (0 -> 1)" in line
    assert "--fresh to start over" in line
    # The answers before and after training must be comparable.
    assert "eval.num_samples (2 -> 3)" in refusal(capsys, *flags, "--config.eval.num_samples=3")
    assert contents(finished) == before


# The kernel refuses to write past 32 KiB of any file, as a full disk would. A process of its own: TensorStore reports
# what else it could not write to an event loop that Orbax has closed by then, at any time later.
FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
from rlvr_jax.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_at_a_checkpoint_costs_that_checkpoint_only(
    capsys, tmp_path, one_device
):
    flags = [TOY, f"--workdir={tmp_path}"]
    assert rlvr(["train", *flags, "--config.num_steps=1"]) == 0
    longer = [*flags, "--config.num_steps=2", "--config.checkpoint.every=1"]
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "train", *longer],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("rlvr: error: ")]
    assert "step_2 could not be written" in line
    assert "The checkpoint of step 1 is intact" in line
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    # With room again, the run goes on from there.
    assert rlvr(["train", *longer]) == 0
    assert "resuming after step 1 of 2" in capsys.readouterr().out
    assert [record["step"] for record in read_metrics(tmp_path)] == [0, 1]
    assert len(ParquetStore(tmp_path / "trajectories").read()) == 2 * 8
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2
