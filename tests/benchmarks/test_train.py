"""The benchmark of updates runs the trainers' programs, takes turns with its peers, and counts what it says."""

import json
import os
import pathlib
import subprocess
import sys
import types

import numpy as np
import pytest

from benchmarks import measure, train
from benchmarks.measure import forward_flops, peak_flops
from benchmarks.packing import NumberChats, one_a_row, random_lengths, render
from benchmarks.peers import common
from benchmarks.peers.run import UPDATE_PEERS, check_peers
from benchmarks.peers.turns import PeerProcess, peer_reports, summarise
from benchmarks.report import format_startup, format_updates
from benchmarks.updates import made_up_groups, sequences
from benchmarks.work import MODELS, Shape
from rlvr_jax.data.loader import chat_dataset
from rlvr_jax.data.packing import packing_stats
from rlvr_jax.errors import ConfigError

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
MICRO = (
    "--rows 4 --length 16 --prompts 2 --group 2 --prompt-len 8 --new-tokens 8"
    " --micro-rows 0 --steps 1 --warmup 1 --devices 2"
)
PEER = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY / "benchmarks" / "peers")!r})
import common

for step in common.Turns({{"name": "1.0"}}, {{"micro": 2}}):
    print("noise that is no answer")
    time.sleep(0.05)
    if step == int(sys.argv[1]):
        sys.exit("out of memory")
"""


def run(*flags: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.train", *flags, "--json"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_both_updates_run_and_every_figure_is_positive():
    report = run(*MICRO.split())
    assert set(report["updates"]) == {"sft", "rl"}
    for update in report["updates"].values():
        for key in [
            "step_s",
            "best_s",
            "tok_s",
            "cpu_s",
            "first_step_s",
            "flops",
            "fill",
            "compile_s",
        ]:
            assert np.isfinite(update[key]) and update[key] > 0, key
        assert update["best_s"] <= update["step_s"] and update["compiles"] == 1
        assert update["tok_s"] == pytest.approx(update["tokens"] / update["step_s"], rel=0.01)
        assert 0 < update["roofline_share"] < 1
    assert report["updates"]["sft"]["tokens"] == 4 * 16
    assert report["updates"]["rl"]["tokens"] == 2 * 2 * (8 + 8)


@pytest.mark.slow
def test_packed_rows_hold_the_tokens_that_padded_rows_waste():
    report = run(*MICRO.split(), "--padding", "0.5", "--length", "64")
    assert report["packed"]["fill"] > 1.5 * report["padded"]["fill"]
    assert report["speedup"] > 0


@pytest.mark.slow
def test_a_second_run_starts_faster_than_the_first():
    report = run("--startup")
    for command in ("sft", "train"):
        assert report[command]["cache_files"] > 0
        assert report[command]["second_s"] < report[command]["first_s"]
    assert "rlvr train" in format_startup(report)


def test_a_peer_is_asked_for_one_step_at_a_time():
    peer = PeerProcess("torch", [sys.executable, "-c", PEER, "-1"], timeout_s=60)
    for count in (1, 2, 3):
        peer.run()
        assert len(peer.times) == count
    peer.close()
    assert all(0.05 <= turn["seconds"] < 30 for turn in peer.times)
    assert peer.about["settings"] == {"micro": 2} and peer.about["versions"] == {"name": "1.0"}
    [report] = peer_reports([peer], {"step_s": peer.times[2]["seconds"]}, warmup=2, tokens=10)
    assert report["times_ours"] == pytest.approx(1.0, abs=0.01)


def test_a_peer_that_fails_says_so_and_stops():
    peer = PeerProcess("torch", [sys.executable, "-c", PEER, "1"], timeout_s=60)
    for _ in range(3):
        peer.run()
    peer.close()
    [report] = peer_reports([peer], {"step_s": 1.0}, warmup=1, tokens=10)
    assert len(peer.times) == 1 and "failed" in report["error"]


def test_medians_are_of_the_turns_after_warmup():
    times = [{"seconds": s, "cpu": 2 * s, "foreign_cpu": 0.0} for s in (9.0, 1.0, 4.0, 2.0)]
    summary = summarise(times, warmup=1, tokens=100)
    assert (summary["step_s"], summary["best_s"], summary["first_step_s"]) == (2.0, 1.0, 9.0)
    assert (summary["tok_s"], summary["cpu_s"]) == (50.0, 4.0)


def test_peers_need_their_environments(monkeypatch):
    monkeypatch.delenv("TRL_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"TRL_PYTHON.*torch_update\.py"):
        check_peers(["torch"], UPDATE_PEERS)


def test_peers_train_on_as_many_tokens_as_we_do():
    args = common.update_parser(None).parse_args(
        [
            "--model-dir",
            "x",
            "--rows",
            "4",
            "--prompt-len",
            "3",
            "--new-tokens",
            "5",
            "--update",
            "rl",
        ]
    )
    assert common.random_rows(512, args, step=1).shape == (4, 8)


def test_flops_of_a_sequence():
    model = MODELS["tiny"]
    weights = 4 * (4 * 128 * 128 + 3 * 128 * 512)
    expected = 2 * weights * 3 + 2 * 512 * 128 * 2 + 4 * (2 + 2) * 128 * (1 + 2 + 3)
    assert forward_flops(model, tokens=3, targets=2, pairs=6) == expected


def test_shares_on_a_known_accelerator_are_of_its_published_peak():
    device = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    mesh = types.SimpleNamespace(devices=np.array([device, device]), size=2)
    peak, of_what = peak_flops(mesh, "bfloat16")
    assert peak == 2 * 989e12
    assert "NVIDIA H100" in of_what and "989 TFLOP/s" in of_what


def test_every_token_of_a_sequence_but_the_first_is_trained_on():
    batch = sequences(512, 3, 8, seed=0)
    assert batch.loss_mask.sum() == 3 * 7
    assert packing_stats(batch)["fill"] == 1.0
    assert np.array_equal(batch.parents[0], np.arange(-1, 7))


def test_groups_have_the_sizes_of_the_shape():
    shape = Shape(prompts=2, group=3, prompt_len=4, new_tokens=5)
    groups = made_up_groups(512, shape, seed=0)
    assert [len(group.trajectories) for group in groups] == [3, 3]
    assert {len(t.tokens) for group in groups for t in group.trajectories} == {9}
    assert {int(t.response_mask.sum()) for g in groups for t in g.trajectories} == {5}


@pytest.mark.parametrize("padding", [0.3, 0.5, 0.8])
def test_lengths_leave_the_share_that_was_asked_for(padding):
    lengths = random_lengths(20000, 128, padding, seed=0)
    assert lengths.min() >= 2 and lengths.max() <= 128
    assert 1 - lengths.mean() / 128 == pytest.approx(padding, abs=0.01)


def test_one_a_row_holds_the_conversations_of_the_packed_batch():
    source = NumberChats(random_lengths(40, 32, 0.5, seed=0), 512, seed=0)
    packed = next(chat_dataset([source], render, length=32, batch_size=4, seed=0, num_epochs=1))
    alone = one_a_row(packed)
    assert alone.tokens.shape[0] > 4 and alone.segment_ids.max() == 1
    for field in ("segment_ids", "loss_mask"):
        assert np.count_nonzero(getattr(alone, field)) == np.count_nonzero(getattr(packed, field))

    def conversations(batch) -> set[bytes]:
        return {
            batch.tokens[row][batch.segment_ids[row] == segment].tobytes()
            for row in range(len(batch.tokens))
            for segment in range(1, batch.segment_ids[row].max() + 1)
        }

    assert conversations(alone) == conversations(packed)
    real = alone.segment_ids > 0
    assert np.array_equal(alone.parents[real], alone.positions[real] - 1)


def test_the_table_shows_a_peer_that_failed():
    times = [{"seconds": 1.0, "cpu": 1.0, "foreign_cpu": 0.0}] * 2
    ours = summarise(times, warmup=1, tokens=100)
    about = {"tokens": 100, "fill": 1.0, "compile_s": 1.0, "peak_arrays_gib": 0.1, "flops": 5e8}
    peers = [{"peer": "tunix", "error": "failed"}]
    report = {
        **vars(train.parse([])),
        "peak_gflops": 1.0,
        "peak_of": "large products",
        "updates": {"sft": {**ours, **about, "peers": peers}},
        "machine": measure.describe_machine(),
    }
    table = format_updates(report)
    assert "50.0%" in table and "sft tunix" in table and "failed" in table


def test_options_that_cannot_work_are_refused():
    for flags in ("--padding 1.5", "--steps 0", "--padding 0.5 --startup", "--update dpo"):
        with pytest.raises(SystemExit):
            train.parse(flags.split())
