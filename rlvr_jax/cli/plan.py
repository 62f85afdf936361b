"""``rlvr plan``: whether a run fits, how fast it can be at best, and what to change, before anything is rented."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from rlvr_jax.cli.flags import apply_overrides, load_config
from rlvr_jax.cli.imports import add_import_flag, import_modules


def main(argv: Sequence[str]) -> int:
    """Plans; returns 0 when the run fits (or nothing says that it does not), 1 when it does not."""
    parser = argparse.ArgumentParser(
        prog="rlvr plan",
        description="Compiles a run's real step functions for a topology, from shapes alone.",
        allow_abbrev=False,
        epilog="Any setting can be overridden: --config.mesh.tensor=8 --config.train.micro_rows=64",
    )
    parser.add_argument("--config", required=True, metavar="FILE.py[:ARG]", help="config file")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME",
        help="local, v5p:8x8x8, v5e:4x4, v6e:8x8, h100:64, a100:8, h200:8, ...",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of the longest prompt (default: measured on the config's tasks if the model's tokenizer is "
        "here, else 256)",
    )
    parser.add_argument(
        "--whole-decode",
        action="store_true",
        help="compile the decode loop of a deep model at full depth, instead of at two depths",
    )
    parser.add_argument(
        "--estimate", action="store_true", help="compile nothing: figures from the shapes, at once"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_import_flag(parser)
    args, overrides = parser.parse_known_args(list(argv))
    import_modules(args.imports)
    config = apply_overrides(load_config(args.config), overrides, source=args.config)
    from rich.console import Console

    from rlvr_jax.planning.planner import make_plan
    from rlvr_jax.planning.report import show

    began = time.perf_counter()
    errors = Console(stderr=True, markup=False, highlight=False)

    def say(text: str) -> None:
        errors.print(f"{time.perf_counter() - began:6.1f} s  {text}", soft_wrap=True)

    plan = make_plan(
        config,
        args.topology,
        prompt_tokens=args.prompt_tokens,
        whole_decode=args.whole_decode,
        estimate_only=args.estimate,
        say=say,
    )
    if args.json:
        json.dump(plan.to_json(), sys.stdout, indent=2)
        print()
    else:
        show(plan, Console(highlight=False))
    return 1 if plan.fits is False else 0
