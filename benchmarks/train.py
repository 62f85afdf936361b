"""Trained tokens a second of the update: fine-tuning and reinforcement learning, alone or in turn with two peers.

    python -m benchmarks.train                                # tiny model: both updates
    python -m benchmarks.train --model smollm2 --dtype float32 --update sft --json
    TRL_PYTHON=... TUNIX_PYTHON=... python -m benchmarks.train --peers torch,tunix
    python -m benchmarks.train --padding 0.5                  # packed rows against padded ones
    python -m benchmarks.train --startup                      # a second process against a first

Random weights and tokens. ``--json`` prints one object as the last line. docs/benchmarks.md says how each figure is
counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.flags import benchmark_parser, parse_flags, spread_over_cores

# By model: how much is trained, and what was fastest; docs/benchmarks.md says how it was chosen.
BEST: dict[str, dict[str, Any]] = {
    "tiny": {
        "rows": 64,
        "length": 128,
        "prompts": 32,
        "group": 8,
        "prompt_len": 16,
        "new_tokens": 32,
        "samples_per_row": 2,
        "micro_rows": 16,
        "mesh": "data",
    },
    "smollm2": {
        "rows": 8,
        "length": 128,
        "prompts": 2,
        "group": 4,
        "prompt_len": 64,
        "new_tokens": 64,
        "samples_per_row": 4,
        "micro_rows": 0,
        "mesh": "fsdp",
    },
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("python -m benchmarks.train", __doc__, BEST)
    add = parser.add_argument
    add("--update", choices=["sft", "rl", "both"], default="both", help="what is trained")
    add("--rows", type=int, help="fine-tuning: sequences of a batch")
    add("--length", type=int, help="fine-tuning: tokens of each")
    add("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of activations")
    add("--remat", choices=["none", "dots", "full"], default="full", help="what is kept")
    add("--peers", default="", help="also run these in turn with ours: torch, tunix, or both")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--padding",
        type=float,
        metavar="SHARE",
        help="instead: packed against padded, of conversations that leave this share of a row empty",
    )
    mode.add_argument(
        "--startup", action="store_true", help="instead: runs of the tiny configs, first and second"
    )
    args = parse_flags(parser, argv, BEST)
    if args.padding is not None and not 0 < args.padding < 1:
        parser.error(f"--padding {args.padding}; expected a share between 0 and 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.startup:
        from benchmarks.report import format_startup
        from benchmarks.startup import measure_startup

        report = {"bench": "startup", **measure_startup(steps=2, timeout_s=600.0)}
        print(format_startup(report), flush=True)
    else:
        report = _measure(args)
    if args.json:
        print(json.dumps(report))
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs what was asked for and prints a table; what it returns are plain JSON values."""
    spread_over_cores(args.devices, "speed")
    import jax

    from benchmarks.measure import CompileLog, describe_machine, gib, peak_flops, peak_rss_bytes
    from benchmarks.packing import measure_packing
    from benchmarks.peers.run import UPDATE_PEERS, check_peers
    from benchmarks.peers.turns import peer_reports, summarise, take_turns
    from benchmarks.report import format_packing, format_updates
    from benchmarks.updates import Programs, rl_update, sft_update
    from benchmarks.work import MODELS, Shape
    from rlvr_jax.distributed.mesh import make_mesh

    peers = [name for name in args.peers.split(",") if name]
    check_peers(peers, UPDATE_PEERS)
    jax.config.update("jax_enable_compilation_cache", False)  # compile_s is that of a first run
    mesh = make_mesh(data=-1) if args.mesh == "data" else make_mesh(data=1, fsdp=-1)
    programs = Programs(
        model=MODELS[args.model],
        mesh=mesh,
        dtype=args.dtype,
        remat=args.remat,
        micro_rows=args.micro_rows,
        seed=args.seed,
    )
    report: dict[str, Any] = {**vars(args), "bench": "train", "peers": peers}
    if args.padding is not None:
        report["bench"] = "packing"
        report |= measure_packing(
            programs,
            rows=args.rows,
            length=args.length,
            padding=args.padding,
            warmup=args.warmup,
            steps=args.steps,
        )
        report["machine"] = describe_machine()
        print(format_packing(report), flush=True)
        return report

    shape = Shape(
        prompts=args.prompts,
        group=args.group,
        prompt_len=args.prompt_len,
        new_tokens=args.new_tokens,
    )
    peak, of_what = peak_flops(mesh, args.dtype)
    log = CompileLog()
    report |= {"peak_gflops": round(peak / 1e9, 1), "peak_of": of_what, "updates": {}}
    for name in ("sft", "rl") if args.update == "both" else (args.update,):
        compiled = log.seconds
        if name == "sft":
            update = sft_update(programs, rows=args.rows, length=args.length)
            rows = (args.rows, 0, args.length)
        else:
            update = rl_update(
                programs, shape, samples_per_row=min(args.samples_per_row, shape.group)
            )
            rows = (shape.sequences, shape.prompt_len, shape.new_tokens)
        times, others = take_turns(
            update,
            peers,
            model=args.model,
            dtype=args.dtype,
            seed=args.seed,
            rows=rows,
            warmup=args.warmup,
            steps=args.steps,
            timeout_s=args.peer_timeout,
        )
        ours = summarise(times, warmup=args.warmup, tokens=update.tokens)
        report["updates"][name] = {
            **ours,
            "tokens": update.tokens,
            "flops": update.flops,
            "roofline_share": round(update.flops / ours["step_s"] / peak, 4),
            "fill": round(update.fill, 4),
            "compile_s": round(log.seconds - compiled, 2),
            "compiles": update.program._cache_size(),
            "peak_arrays_gib": gib(update.program.peak_bytes()),
            "peers": list(peer_reports(others, ours, warmup=args.warmup, tokens=update.tokens)),
        }
        del update
    report["peak_rss_gib"] = gib(peak_rss_bytes())
    report["machine"] = describe_machine()
    print(format_updates(report), flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
