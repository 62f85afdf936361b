"""The benchmark runs the real step and reports every figure that docs/benchmarks.md explains."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.measure import count_flops, memory_bound_bytes
from benchmarks.peers import common
from benchmarks.peers.run import check_peers, format_comparison, write_weights
from benchmarks.work import MODELS, SHAPES, Shape, even_fraction, number_tasks, number_tokenizer
from rlvr_jax.errors import ConfigError
from rlvr_jax.models.config import SMOLLM2_135M
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import load_tokenizer

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MICRO = "--prompts 4 --group 4 --prompt-len 8 --new-tokens 8 --steps 1 --warmup 1 --devices 2"


@pytest.fixture(scope="module")
def report():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", *MICRO.split(), "--json"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_figure_is_a_positive_number(report):
    keys = "rollout_tok_s verify_s ref_s update_s update_tok_s step_s rollout_s compile_s peak_rss_gib cache_gib"
    for key in keys.split():
        assert np.isfinite(report[key]) and report[key] >= 0, key
        assert report["best"].get(key, 0) <= report[key] or key.endswith("tok_s")
    for key in ("rollout_tok_s", "update_tok_s", "step_s", "compile_s", "peak_rss_gib"):
        assert report[key] > 0, key
    assert 0 < report["roofline_share"]["step"] < 1
    assert report["rollout_tok_s"] == pytest.approx(4 * 4 * 8 / report["rollout_s"], rel=0.01)


@pytest.mark.slow
def test_every_program_compiles_once(report):
    assert report["compiles"] == {"generate": 1, "with_reference": 1, "update": 1}
    assert report["compiles_ok"] is True


@pytest.mark.slow
def test_memory_is_compared_with_the_bound(report):
    peak = max(report["peak_arrays_gib"].values())
    assert peak > 0
    assert report["memory_bound_ok"] is (peak <= report["memory_bound_gib"])


@pytest.mark.slow
def test_the_phases_add_up_to_the_step(report):
    for step in report["all_steps"]:
        parts = sum(step[name] for name in ("rollout", "verify", "ref", "update", "other"))
        assert parts == pytest.approx(step["step"], abs=1e-3)


def test_memory_bound_of_smollm2():
    # 134,515,008 parameters x 20 bytes, a cache of 1 GB, and a quarter.
    assert memory_bound_bytes(SMOLLM2_135M, 10**9) == int(1.25 * (134_515_008 * 20 + 10**9))


def test_flops_are_two_for_each_weight_and_token():
    model = MODELS["tiny"]
    flops = count_flops(model, Shape(prompts=1, group=1, prompt_len=1, new_tokens=1))
    weights = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    # Two tokens through the layers, one through the head; the prompt sees 1 key, the answer 2, scores and values each.
    attention = 4 * (2 + 2) * 128 * (1 + 2)
    assert flops.rollout == 2 * weights * 2 + 2 * 512 * 128 + attention
    assert flops.update == 3 * flops.reference == 3 * flops.rollout


def test_a_prompt_is_rendered_as_its_numbers():
    tokenizer = number_tokenizer(512)
    tasks = number_tasks(512, SHAPES["tiny"], seed=3)
    ids = ChatTemplate(tokenizer).render_ids(tasks[0].prompt)
    assert [str(i) for i in ids] == tasks[0].prompt[0].content.split()
    assert len(ids) == SHAPES["tiny"].prompt_len
    assert tokenizer.decode([3, 17, 511]) == "3 17 511"
    assert min(tokenizer.stop_token_ids) >= 512


def test_peers_get_the_same_prompts_and_the_same_reward():
    tasks = number_tasks(512, SHAPES["tiny"], seed=5)
    prompts = common.make_prompts(512, 32, 16, 5)
    assert [task.prompt[0].content for task in tasks] == prompts
    assert even_fraction(tasks[0], "2 3 4 8") == common.even_fraction("2 3 4 8") == 0.75


def test_peers_get_weights_and_a_tokenizer_they_can_read(tmp_path):
    write_weights(tmp_path / "tiny", "tiny", seed=0)
    settings = common.model_settings(tmp_path / "tiny")
    assert settings["vocab_size"] == 512 and settings["num_hidden_layers"] == 4
    assert load_tokenizer(tmp_path / "tiny").encode("1 2 511") == [1, 2, 511]
    assert (tmp_path / "tiny" / "model.safetensors").is_file()


def test_a_peer_without_an_environment_is_refused(monkeypatch):
    monkeypatch.delenv("TRL_PYTHON", raising=False)
    with pytest.raises(ConfigError, match="TRL_PYTHON"):
        check_peers(["trl"])
    with pytest.raises(ConfigError, match="unknown peer 'verl'"):
        check_peers(["verl"])


def test_comparison_gives_ratios_and_says_what_failed():
    keys = ("step_s", "rollout_s", "ref_s", "update_s", "peak_rss_gib")
    ours = {"peer": "rlvr_jax", **dict.fromkeys(keys, 2.0)}
    reports = [
        {"peer": "trl", **dict.fromkeys(keys, 3.0)},
        {"peer": "tunix", "error": "not done within 5 s"},
    ]
    table = format_comparison(ours, reports)
    assert "3 (1.50x)" in table and "not done within 5 s" in table
