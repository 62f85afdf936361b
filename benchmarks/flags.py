"""Flags and devices that the benchmarks have in common. Nothing here imports JAX before the devices are set."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

# What was fastest, by name of a model: values of flags that are not given.
Best = Mapping[str, Mapping[str, Any]]


def benchmark_parser(prog: str, description: str | None, best: Best) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark: model, shape, repetitions, layout, peers."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=sorted(best), default="tiny", help="random weights of this shape")
    add("--prompts", type=int, help="tasks of a step")
    add("--group", type=int, help="samples of each prompt")
    add("--prompt-len", type=int, help="tokens of a prompt")
    add("--new-tokens", type=int, help="tokens of a sample")
    add("--steps", type=int, default=5, help="measured repetitions (default 5)")
    add("--warmup", type=int, default=2, help="before them; the first compiles (default 2)")
    add("--micro-rows", type=int, help="rows whose gradient is computed at once; 0 for all")
    add("--samples-per-row", type=int, help="samples that share a row with their prompt")
    add("--mesh", choices=["data", "fsdp"], help="replicas, or one copy spread over the devices")
    add("--devices", type=int, help="virtual devices of a CPU (default: one a core)")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="print one JSON object as the last line")
    add("--peer-timeout", type=float, default=1800.0, help="seconds for a peer (default 1800)")
    return parser


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, best: Best
) -> argparse.Namespace:
    """The arguments, with those that were not given as ``best`` has them for the model."""
    args = parser.parse_args(argv)
    if args.steps < 1 or args.warmup < 1:
        parser.error(f"--steps {args.steps} --warmup {args.warmup}; expected at least 1 of each")
    for name, value in best[args.model].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def spread_over_cores(devices: int | None, order: str) -> None:
    """Makes a CPU look like one device a core to JAX, which runs one thread a device. Before JAX is imported.

    For ``order`` memory the devices get the threads that ``decoder.compiler_options`` asks for.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        count = devices or cores
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()
        from rlvr_jax.models.decoder import THREADS_PER_DEVICE

        threads = THREADS_PER_DEVICE if order == "memory" else 1
        os.environ.setdefault("NPROC", str(threads * count))
