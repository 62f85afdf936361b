"""Time and memory of one optimizer step: rollout, verification, reference, update.

    python -m benchmarks.step                                # tiny model: 32 prompts x 8 samples, 16 + 32 tokens
    python -m benchmarks.step --model smollm2 --json         # SmolLM2-135M's shape: 8 x 8, 64 + 64 tokens
    TRL_PYTHON=... TUNIX_PYTHON=... python -m benchmarks.step --peers trl,tunix

Random weights and fixed lengths; the median and the best of the steps after warm-up. ``--json`` prints one object as
the last line. docs/benchmarks.md says how each figure is counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from benchmarks.flags import benchmark_parser, parse_flags, spread_over_cores

# By model; docs/benchmarks.md says how they were chosen, and what they take.
BEST = {
    "tiny": {
        "dtype": "bfloat16",
        "remat": "full",
        "micro_rows": 0,
        "samples_per_row": 2,
        "mesh": "data",
        "order": "speed",
    },
    "smollm2": {
        "dtype": "bfloat16",
        "remat": "full",
        "micro_rows": 0,
        "samples_per_row": 4,
        "mesh": "fsdp",
        "order": "memory",
    },
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = benchmark_parser("python -m benchmarks.step", __doc__, BEST)
    add = parser.add_argument
    add("--dtype", choices=["float32", "bfloat16"], help="of activations; params are float32")
    add("--remat", choices=["none", "dots", "full"], help="what the backward pass keeps")
    add("--order", choices=["speed", "memory"], help="what a CPU's programs are ordered for")
    add("--max-rows", type=int, default=256, help="samples decoded together (default 256)")
    add("--verifier-workers", type=int, default=2, help="processes that judge (default 2)")
    add("--peers", default="", help="also run these on the same work: trl, tunix, or both")
    return parse_flags(parser, argv, BEST)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    spread_over_cores(args.devices, args.order)
    from benchmarks.loop import Settings, measure_step
    from benchmarks.peers.run import check_peers, format_comparison, run_peers
    from benchmarks.report import format_report
    from benchmarks.work import SHAPES, Shape

    default = SHAPES[args.model]
    names = ("prompts", "group", "prompt_len", "new_tokens")
    given = {name: getattr(args, name) for name in names}
    shape = Shape(**{k: getattr(default, k) if v is None else v for k, v in given.items()})
    settings = Settings(
        model=args.model,
        shape=shape,
        dtype=args.dtype,
        remat=args.remat,
        micro_rows=args.micro_rows,
        samples_per_row=min(args.samples_per_row, shape.group),
        mesh=args.mesh,
        max_rows=args.max_rows,
        verifier_workers=args.verifier_workers,
        steps=args.steps,
        warmup=args.warmup,
        seed=args.seed,
    )
    peers = [name for name in args.peers.split(",") if name]
    check_peers(peers)
    report = measure_step(settings)
    print(format_report(report), flush=True)
    if peers:
        report["peers"] = run_peers(peers, report, timeout_s=args.peer_timeout)
        print(format_comparison(report, report["peers"]))
    if args.json:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
