"""What the peer scripts share: flags, prompts, the reward, phases, turns, reports. Standard library and NumPy.

The scripts run in environments of their own, by path, and import nothing of this project but this file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def parser(description: str | None, *sizes: str) -> argparse.ArgumentParser:
    """The flags of the work, ``sizes`` of it among them; the scripts add their own settings."""
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory")
    for name in sizes:
        flags.add_argument(f"--{name}", type=int, required=True)
    flags.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    flags.add_argument("--seed", type=int, default=0)
    return flags


def step_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a script that runs whole steps, for ``Phases``."""
    flags = parser(description, "prompts", "group", "prompt-len", "new-tokens")
    flags.add_argument("--steps", type=int, default=5)
    flags.add_argument("--warmup", type=int, default=2)
    return flags


def update_parser(description: str | None) -> argparse.ArgumentParser:
    """Of a script that runs updates in turn with us, for ``Turns``: rows of a prompt and as many trained tokens."""
    flags = parser(description, "rows", "prompt-len", "new-tokens")
    flags.add_argument("--update", choices=["sft", "rl"], required=True)
    flags.add_argument("--micro", type=int, help="rows of a micro-batch; all by default")
    return flags


def model_settings(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "config.json").read_text())


def make_prompts(vocab_size: int, count: int, length: int, seed: int) -> list[str]:
    """The prompts of ``benchmarks.work.number_tasks``: token ids as decimal numbers."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (count, length))
    return [" ".join(map(str, row)) for row in ids.tolist()]


def even_fraction(text: str) -> float:
    """The reward of ``benchmarks.work.even_fraction``."""
    numbers = text.split()
    return sum(int(number) % 2 == 0 for number in numbers) / max(1, len(numbers))


def _cpu_seconds() -> tuple[float, float]:
    """(busy seconds of the whole machine, of this process)."""
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:9]]
    own = os.times()
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    return busy, own.user + own.system


class Phases:
    """Seconds of the phases of every step; the first ``warmup`` steps do not count."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.steps: list[dict[str, float]] = []
        self.current: dict[str, float] | None = None
        self._began, self._cpu = 0.0, (0.0, 0.0)

    @property
    def num_steps(self) -> int:
        return self.args.warmup + self.args.steps

    @property
    def done(self) -> bool:
        return len(self.steps) >= self.num_steps

    def begin(self) -> None:
        self.current, self._began, self._cpu = {}, time.perf_counter(), _cpu_seconds()

    def add(self, name: str, seconds: float) -> None:
        if self.current is not None:
            self.current[name] = self.current.get(name, 0.0) + seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def end(self) -> None:
        assert self.current is not None
        wall, (busy, own) = self.elapsed(), _cpu_seconds()
        others = max(0.0, (busy - self._cpu[0]) - (own - self._cpu[1]))
        foreign = others / wall / (os.cpu_count() or 1)
        self.steps.append({**self.current, "step": wall, "foreign_cpu": foreign})
        self.current = None
        shown = " ".join(f"{name}={value:.3f}" for name, value in self.steps[-1].items())
        print(f"# step {len(self.steps)}: {shown}", file=sys.stderr, flush=True)

    def wrap(
        self,
        owner: Any,
        attribute: str,
        name: str | Callable[..., str | None],
        wait: Callable[[Any], Any] | None = None,
    ) -> None:
        """Counts calls of a method as a phase (``name`` may decide from the arguments; None is no phase)."""
        function = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            label = name if isinstance(name, str) else name(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            if wait is not None:
                wait(result)
            if label:
                self.add(label, time.perf_counter() - start)
            return result

        setattr(owner, attribute, timed)


def report(peer: str, phases: Phases, versions: Mapping[str, str], settings: Any) -> None:
    """Prints the JSON object, last line of the output; keys as those of ``benchmarks.step``."""
    args, measured = phases.args, phases.steps[phases.args.warmup :]
    names = ("rollout", "verify", "ref", "old", "update", "step")
    values = {name: [step.get(name, 0.0) for step in measured] for name in names}
    median = {name: statistics.median(value) for name, value in values.items()}
    sequences = args.prompts * args.group
    sampled = sequences * args.new_tokens
    trained = sequences * (args.prompt_len + args.new_tokens)
    out = {
        "bench": "grpo",
        "peer": peer,
        "model": args.model_dir.name,
        "dtype": args.dtype,
        "prompts": args.prompts,
        "group": args.group,
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "steps": len(measured),
        **{f"{name}_s": round(median[name], 4) for name in names},
        "rollout_tok_s": round(sampled / median["rollout"], 1),
        "update_tok_s": round(trained / median["update"], 1),
        "best": {f"{name}_s": round(min(value), 4) for name, value in values.items()},
        "first_step_s": round(phases.steps[0]["step"], 3),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "foreign_cpu_share": round(statistics.median(s["foreign_cpu"] for s in measured), 3),
        "loadavg": round(os.getloadavg()[0], 2),
        "settings": settings,
        "versions": dict(versions),
    }
    print(json.dumps(out), flush=True)


class Turns:
    """Steps when the benchmark asks for one: a line on standard input each, answered by a line of JSON.

    Iterating gives the number of the step; what the loop's body does until it asks for the next one is timed. When the
    input ends, a last line says what there is to say about the run.
    """

    def __init__(self, versions: Mapping[str, str], settings: Any) -> None:
        self._about = {"settings": settings, "versions": dict(versions)}
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def __iter__(self) -> Iterator[int]:
        for step, _ in enumerate(sys.stdin):
            cpu, began = _cpu_seconds(), time.perf_counter()
            yield step
            wall, (busy, own) = time.perf_counter() - began, _cpu_seconds()
            others = max(0.0, (busy - cpu[0]) - (own - cpu[1]))
            self._answer(
                seconds=wall, cpu=own - cpu[1], foreign_cpu=others / wall / (os.cpu_count() or 1)
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        self._answer(peak_rss_gib=round(peak, 3), **self._about)

    def _answer(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


def random_rows(vocab_size: int, args: argparse.Namespace, step: int) -> np.ndarray:
    """int64[rows, prompt_len + new_tokens], the tokens of a step."""
    shape = (args.rows, args.prompt_len + args.new_tokens)
    return np.random.default_rng(args.seed + step).integers(0, vocab_size, shape)
