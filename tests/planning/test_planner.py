"""``rlvr plan`` as a user meets it."""

import dataclasses
import functools
import json

import jax
import pytest

from rlvr_jax.cli.flags import load_config
from rlvr_jax.cli.main import main as rlvr
from rlvr_jax.errors import WeightsError
from rlvr_jax.planning import targets
from rlvr_jax.planning.chips import CHIPS
from rlvr_jax.planning.estimate import estimate
from rlvr_jax.planning.plan import roofline
from rlvr_jax.planning.programs import make_programs
from rlvr_jax.planning.search import better_settings, factorisations, flags
from rlvr_jax.planning.shapes import model_shape, published_names
from rlvr_jax.planning.work import measure_work
from rlvr_jax.training.policy import TINY, load_pretrained
from tests.training.toys import REPOSITORY, get_config, override

TOY = f"--config={REPOSITORY / 'tests' / 'training' / 'toy_config.py'}"
LLAMA = f"--config={REPOSITORY / 'configs' / 'rl_llama3_70b.py'}"
QWEN = f"--config={REPOSITORY / 'configs' / 'rl_qwen3_0_6b.py'}"


def plan(capsys, *arguments):
    """(exit status, the JSON printed)."""
    status = rlvr(["plan", "--json", *arguments])
    return status, json.loads(capsys.readouterr().out)


def refusal(capsys, *arguments):
    assert rlvr(["plan", *arguments]) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_local_plan_has_the_memory_of_the_trainers_own_programs(capsys):
    status, found = plan(capsys, TOY, "--topology=local", "--prompt-tokens=60")
    assert status == 0
    assert found["topology"] == "local"
    assert found["num_devices"] == jax.device_count()
    assert found["compiled"] is True
    assert found["fits"] is True
    model = load_pretrained(TINY).config
    programs = make_programs(get_config(), model, jax.devices(), prompt_tokens=60, on_cpu=True)
    assert list(found["phases"]) == ["rollout", "reference", "update"]
    for name, phase in found["phases"].items():
        real = programs.trace(name).lower().compile().memory_analysis()
        assert phase["memory_bytes"] == (
            real.argument_size_in_bytes
            + real.output_size_in_bytes
            - real.alias_size_in_bytes
            + real.temp_size_in_bytes
        )
        assert set(phase) >= {"memory_bytes", "flops", "bytes", "collectives", "seconds"}
        assert phase["flops"] > 0 and phase["bytes"] > 0 and phase["collectives"]


@pytest.mark.slow
def test_stand_ins_are_compiled_in_a_process_of_their_own(capsys):
    """More devices than this process has, and the state is divided over them."""
    arguments = (
        "--topology=h100:16",
        "--prompt-tokens=60",
        "--config.tasks.tasks_per_step=16",
        "--config.mesh.fsdp=16",
    )
    status, found = plan(capsys, TOY, *arguments)
    assert status == 0
    assert (found["num_devices"], found["chip"], found["compiled"]) == (16, "h100", True)
    assert any("virtual CPU devices" in note for note in found["notes"])
    state = 3 * 4 * found["num_params"]
    assert found["phases"]["update"]["memory"]["aliased"] == pytest.approx(state / 16, rel=0.1)
    assert all(phase["seconds"] > 0 for phase in found["phases"].values())
    assert found["tokens_per_s"] == pytest.approx(found["sampled_tokens"] / found["step_seconds"])


def test_a_tpu_without_libtpu_says_so_and_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    assert targets.find_libtpu() is None
    assert "pip install --no-deps --target DIR libtpu" in targets.NO_LIBTPU


def test_a_model_that_is_not_here_is_planned_from_its_published_shape(capsys):
    status, found = plan(capsys, QWEN, "--topology=v5e:1x1", "--estimate")
    assert found["compiled"] is False
    assert found["num_params"] == 596_049_920
    assert {phase["how"] for phase in found["phases"].values()} == {"estimated"}
    assert status == (0 if found["fits"] else 1)


def test_a_plan_that_does_not_fit_proposes_settings_that_do(capsys):
    settings = ("--config.train.micro_rows=0", "--config.train.remat=none")
    status, found = plan(capsys, QWEN, "--topology=v5e:2x2", "--estimate", *settings)
    assert (status, found["fits"]) == (1, False)
    [suggestion] = found["suggestions"]
    assert ": fits (estimated" in suggestion
    overrides = [word for word in suggestion.split(":")[0].split() if word.startswith("--config")]
    status, found = plan(capsys, QWEN, "--topology=v5e:2x2", "--estimate", *overrides)
    assert (status, found["fits"]) == (0, True)


def test_the_table_is_for_people(capsys):
    rlvr(["plan", QWEN, "--topology=v5e:1x1", "--estimate"])
    printed = capsys.readouterr().out
    assert "rlvr plan: Qwen3-0.6B" in printed
    assert "sampled tokens/s" in printed
    assert "estimated from the shapes; nothing was compiled" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=v9:2x2"], "unknown topology 'v9:2x2'; expected local, v4:AxBxC"),
        (
            ["--topology=h100:8", "--config.mesh.fsdp=3"],
            "mesh context=1, data=1, expert=1, fsdp=3, tensor=1 does not multiply to 8 devices; change config.mesh",
        ),
        (["--topology=h100:8", "--config.model=nowhere"], "published shape: Llama-3.1-70B"),
        (
            ["--topology=h100:8", "--config.rollout.max_tokens=4000"],
            "lower config.rollout.max_tokens",
        ),
        (["--topology=h100:8", "--config.train.micro_rows=3", "--estimate"], "change config.train"),
    ],
)
def test_what_cannot_work_is_one_line(capsys, arguments, message):
    assert message in refusal(capsys, TOY, *arguments)


@pytest.mark.parametrize("name", published_names())
def test_every_published_shape_is_read_and_has_the_size_of_its_name(name):
    shape = model_shape(f"models/{name}")
    size = {
        "Qwen3-0.6B": 0.596e9,
        "Qwen3-8B": 8.19e9,
        "Llama-3.1-70B-Instruct": 70.55e9,
        "Qwen3-235B-A22B": 235.1e9,
        "MoE-1T-A32B": 1.04e12,
    }[name]
    assert shape.config.num_params == pytest.approx(size, rel=0.01)


def test_a_directory_with_a_config_json_is_enough(tmp_path):
    published = model_shape("Qwen3-8B").config
    source = REPOSITORY / "rlvr_jax" / "planning" / "published" / "Qwen3-8B.json"
    (tmp_path / "config.json").write_text(source.read_text())
    assert model_shape(tmp_path).config == published
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(WeightsError, match="is not JSON"):
        model_shape(tmp_path)


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_8b", "llama3_70b", "moe_235b", "moe_1t"])
def test_shipped_configs_are_planned_without_their_models(name):
    config = load_config(f"{REPOSITORY / 'configs' / f'rl_{name}.py'}")
    assert model_shape(config.model).source.startswith("published")
    assert load_config(f"{REPOSITORY / 'configs' / f'rl_{name}.py'}:tiny").model == TINY


def test_rows_are_those_that_the_trainer_packs():
    config, model = get_config(), load_pretrained(TINY).config
    work = measure_work(config, model, prompt_tokens=60, num_shards=8, on_cpu=True)
    # 8 trees of a prompt and 4 responses of 6 tokens in rows of 240: two a row; at least two rows a shard.
    assert work.batch.tokens.shape == (16, 240)
    assert (work.num_samples, work.sampled_tokens) == (8 * 4, 8 * 4 * 6)
    fewer = measure_work(config, model, prompt_tokens=60, num_shards=2, on_cpu=False)
    assert fewer.batch.tokens.shape == (4, 240)


def test_replayed_experts_are_part_of_a_batch():
    config = override(get_config(), rollout__router_replay=True)
    model = dataclasses.replace(load_pretrained(TINY).config, num_experts=8, experts_per_token=2)
    work = measure_work(config, model, prompt_tokens=60, num_shards=8, on_cpu=True)
    assert work.batch.experts is not None
    assert work.batch.experts.shape == (16, 240, model.num_layers, 2)


def test_factorisations_are_all_ways_to_multiply():
    assert sorted(factorisations(4, 2)) == [(1, 4), (2, 2), (4, 1)]
    assert len(list(factorisations(8, 3))) == 10


def test_the_search_changes_only_what_it_names():
    config = load_config(QWEN.partition("=")[2])
    config.train.micro_rows = 4  # divided over the mesh
    model = model_shape(config.model).config
    mesh = {"data": 1, "fsdp": 4, "tensor": 1}
    phases = estimate(config, model, mesh, prompt_tokens=256)
    search = functools.partial(better_settings, config, model, mesh, prompt_tokens=256, chip="v5e")
    found = search(measured=phases)
    assert found.fits
    assert set(found.overrides) <= {
        *("mesh.data", "mesh.fsdp", "mesh.tensor"),
        *("train.micro_rows", "train.remat", "rollout.max_rows"),
    }
    assert flags({"train.remat": "dots"}) == "--config.train.remat=dots"
    assert config.train.micro_rows == 4  # as it was
    memory = phases["update"].memory
    larger = dataclasses.replace(memory, temporaries=3 * memory.temporaries)
    phases["update"] = dataclasses.replace(phases["update"], memory=larger)
    corrected = search(measured=phases)
    assert corrected.overrides != found.overrides, "what the compiler found counts"


@pytest.mark.slow
def test_where_no_mesh_fits_smaller_batches_are_proposed():
    """The reference scores a minibatch at once; 70 B on 64 GPUs leave no room for all of a step of long answers."""
    config = load_config(LLAMA.partition("=")[2])
    config.rollout.max_tokens *= 4
    config.train.row_length *= 4
    model = model_shape(config.model).config
    mesh = {"data": 1, "fsdp": 8, "tensor": 8}
    phases = estimate(config, model, mesh, prompt_tokens=256)
    found = better_settings(config, model, mesh, prompt_tokens=256, chip="h100", measured=phases)
    assert found.fits
    assert found.overrides["train.num_minibatches"] > 1


@pytest.mark.slow
def test_what_no_setting_can_make_fit_is_said_with_the_least_that_it_takes(capsys):
    status, found = plan(capsys, LLAMA, "--topology=v5e:16x16", "--estimate")
    assert (status, found["fits"]) == (1, False)
    [advice] = found["suggestions"]
    assert "the rollout takes at least" in advice
    assert float(advice.partition("at least ")[2].split()[0]) > 16


def test_collectives_between_nodes_are_slower(measured):
    near = measured["update"]
    spread = tuple(dataclasses.replace(c, span=64) for c in near.collectives)
    seconds = roofline(near, CHIPS["h100"])
    far = roofline(dataclasses.replace(near, collectives=spread), CHIPS["h100"])
    assert far["communication"] == pytest.approx(9 * seconds["communication"])
    assert far["memory"] == seconds["memory"]
