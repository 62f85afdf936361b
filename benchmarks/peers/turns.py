"""Updates of ours and of the peers in turn: one of each, again and again, so that all meet the same machine.

A peer is a process that waits while the others work; see ``common.Turns``.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import cpu_seconds, foreign_share
from benchmarks.peers.run import UPDATE_PEERS, peer_command, peer_environment, write_weights
from benchmarks.updates import Update

# Rows of a micro-batch: Tunix holds the logits of all of them, several times.
MICRO = {("tunix", "smollm2", "sft"): 4, ("tunix", "smollm2", "rl"): 4}
Times = list[
    dict[str, float]
]  # of every turn: seconds, cpu (its own processor seconds), foreign_cpu


class PeerProcess:
    """A peer's script, asked for one update at a time."""

    def __init__(self, name: str, command: Sequence[str], timeout_s: float) -> None:
        self.name, self.times, self.about = name, [], {}
        self._process = subprocess.Popen(
            command,
            env=peer_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self._deadline = threading.Timer(timeout_s, self._process.kill)
        self._deadline.start()

    def run(self) -> None:
        """One update. What goes wrong is in ``about['error']``, and nothing is run from then on."""
        if "error" not in self.about:
            answer = self._ask("step\n")
            if answer is not None:
                self.times.append(answer)

    def close(self) -> None:
        """Ends the process, and keeps what it says of its run."""
        if "error" not in self.about:
            self.about |= self._ask(None) or {}
        self._deadline.cancel()
        with contextlib.suppress(BrokenPipeError), self._process:  # which closes its pipes
            self._process.kill()

    def _ask(self, request: str | None) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if request is None:
                self._process.stdin.close()
            else:
                self._process.stdin.write(request)
                self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            self.about["error"] = "failed or took too long; what it printed is above"
            return None


def take_turns(
    update: Update,
    peers: Sequence[str],
    *,
    model: str,
    dtype: str,
    seed: int,
    rows: tuple[int, int, int],
    warmup: int,
    steps: int,
    timeout_s: float,
) -> tuple[Times, list[PeerProcess]]:
    """``warmup + steps`` updates of each.

    Args:
      update: ours.
      peers: names of ``UPDATE_PEERS``.
      model, dtype, seed: of the work.
      rows: of the work: how many, tokens of a prompt, trained tokens.
      timeout_s: for all that a peer does.

    Returns:
      (our times, the peers with theirs).
    """
    own: Times = []
    sizes = dict(zip(("rows", "prompt_len", "new_tokens"), rows, strict=True))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        directory = Path(folder) / model
        if peers:
            write_weights(directory, model, seed)
        running = []
        for name in peers:
            command = peer_command(UPDATE_PEERS[name], directory, {**sizes, "seed": seed})
            # Torch is faster in bfloat16, as we are, and Tunix in float32.
            command += ["--dtype", dtype if name == "torch" else "float32"]
            command += ["--update", update.name]
            if micro := MICRO.get((name, model, update.name)):
                command += ["--micro", str(min(micro, rows[0]))]
            running.append(PeerProcess(name, command, timeout_s))
            stack.callback(running[-1].close)
        for _ in range(warmup + steps):
            own.append(_timed(update))
            for peer in running:
                peer.run()
    return own, running


def _timed(update: Update) -> dict[str, float]:
    before, own, began = cpu_seconds(), time.process_time(), time.perf_counter()
    update.run()
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu": time.process_time() - own,
        "foreign_cpu": foreign_share(before, cpu_seconds(), seconds),
    }


def summarise(times: Times, *, warmup: int, tokens: int) -> dict[str, Any]:
    """Medians and bests of the turns after warm-up, seconds and tokens a second."""
    measured = [turn["seconds"] for turn in times[warmup:]]
    return {
        "step_s": round(statistics.median(measured), 5),
        "best_s": round(min(measured), 5),
        "tok_s": round(tokens / statistics.median(measured), 1),
        "cpu_s": round(statistics.median(turn["cpu"] for turn in times[warmup:]), 5),
        "first_step_s": round(times[0]["seconds"], 3),
        "foreign_cpu_share": round(
            statistics.median(turn["foreign_cpu"] for turn in times[warmup:]), 3
        ),
        "all_s": [round(turn["seconds"], 5) for turn in times],
    }


def peer_reports(
    peers: Sequence[PeerProcess], ours: Mapping[str, Any], *, warmup: int, tokens: int
) -> Iterator[dict[str, Any]]:
    """What each peer came to, with ``times_ours``, the ratio of the medians."""
    for peer in peers:
        report = {"peer": peer.name, **peer.about}
        if "error" not in report:
            report |= summarise(peer.times, warmup=warmup, tokens=tokens)
            report["times_ours"] = round(report["step_s"] / ours["step_s"], 3)
        yield report
