"""``rlvr eval``: how good a model or a run's checkpoint is on domains, as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlvr_jax.cli.compilation_cache import keep_compiled
from rlvr_jax.cli.imports import add_import_flag, import_modules
from rlvr_jax.cli.policy_flags import (
    RunConfig,
    add_model_flags,
    add_sampling_flags,
    policy_of,
    sampling_of,
)
from rlvr_jax.errors import ConfigError

if TYPE_CHECKING:
    from rlvr_jax.types import Completion, Sampler, SamplingParams

EXAMPLES = """examples:
  rlvr eval --model smollm2-135m-instruct --domains arithmetic/add,text --max-tokens 16
  rlvr eval --workdir runs/quickstart                    # the run's newest checkpoint, on its held-out tasks
  rlvr eval --workdir runs/quickstart --model smollm2-135m-instruct      # what it started from, same settings
  rlvr eval --workdir runs/quickstart --domains math --num-samples 16 --k 1,4,16 --json

Tasks are held out: training draws none of them. pass@k is the chance that one of k answers is right (unbiased,
averaged over tasks). Answers that no verdict could be had on are counted, and are in no rate.
"""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    return sorted({int(number) for number in _names(text)})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlvr eval",
        description="Scores a model, or the newest checkpoint of a run, on held-out tasks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("tasks (defaults: the run's with --workdir, else)")
    group.add_argument(
        "--domains",
        type=_names,
        metavar="A,B",
        help="domains, prefixes or groups ('rlvr tasks list')",
    )
    group.add_argument(
        "--levels", type=_numbers, metavar="0,1", help="levels of difficulty (all of a domain)"
    )
    group.add_argument("--num-tasks", type=int, metavar="N", help="tasks of each domain (32)")
    group.add_argument("--num-samples", type=int, metavar="N", help="answers to each task (8)")
    group.add_argument(
        "--k", type=_numbers, metavar="1,4,8", help="which pass@k (1 and the number of samples)"
    )
    group.add_argument("--timeout-s", type=float, metavar="S", help="deadline of a verdict (5)")
    group.add_argument(
        "--num-workers", type=int, metavar="N", help="verifier processes (one a core)"
    )
    add_import_flag(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON instead of the table")
    group.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the JSON there too")
    group.add_argument(
        "--save", type=pathlib.Path, metavar="DIR", help="keep every answer there (Parquet)"
    )
    return parser


class _Watched:
    """A sampler that says how many prompts it has answered."""

    def __init__(self, sampler: Sampler, advance: Callable[[int], None]) -> None:
        self._sampler, self._advance = sampler, advance

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> list[list[Completion]]:
        found = self._sampler.sample(
            prompts, params=params, num_samples=num_samples, request_ids=request_ids
        )
        self._advance(len(prompts))
        return found


def main(argv: Sequence[str]) -> int:
    """Evaluates, prints, and returns 0."""
    args = _parser().parse_args(argv)
    keep_compiled()
    run = RunConfig(args.workdir)
    domains = run.get("tasks.domains", None, flag=args.domains)
    if not domains:
        raise ConfigError("no domains; give --domains A,B ('rlvr tasks list' shows them)")
    # Imported once the command line is known to be right: a mistake in it shows at once.
    import rich.console
    import rich.progress

    from rlvr_jax.envs.single_turn import DomainJudge, check_verifiers, run_groups
    from rlvr_jax.evaluation.report import table
    from rlvr_jax.evaluation.runner import check_ks, evaluate, select_tasks
    from rlvr_jax.rewards.pool import VerifierPool
    from rlvr_jax.trajectories.store import ParquetStore
    from rlvr_jax.types import Group, Task

    import_modules(args.imports)
    params = sampling_of(args, run)
    num_samples = run.get("eval.num_samples", 8, flag=args.num_samples)
    ks = sorted({1, num_samples}) if args.k is None else args.k
    check_ks(ks, num_samples)
    tasks = select_tasks(
        domains,
        run.get("eval.tasks_per_domain", 32, flag=args.num_tasks),
        seed=params.seed,
        levels=args.levels,
        max_levels=run.get("tasks.max_levels", None),
    )
    check_verifiers({task.domain for task in tasks})
    store = None if args.save is None else ParquetStore(args.save)
    if store is not None and store.steps():
        raise ConfigError(f"--save {args.save} holds answers already; choose a new folder")
    if args.out is not None:  # what cannot be written shows before the work, not after it
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open("a").close()
    policy = policy_of(args, run)
    console = rich.console.Console(stderr=True)
    with (
        VerifierPool(
            run.get("verifiers.num_workers", None, flag=args.num_workers),
            run.get("verifiers.timeout_s", 5.0, flag=args.timeout_s),
        ) as pool,
        rich.progress.Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("answering", total=len(tasks))
        judge = DomainJudge(pool)

        def rollout(tasks: Sequence[Task], *, group_size: int, step: int) -> list[Group]:
            return run_groups(
                tasks,
                sampler=_Watched(policy.engine, lambda count: progress.advance(bar, count)),
                tokenizer=policy.tokenizer,
                chat=policy.chat,
                judge=judge,
                params=params,
                group_size=group_size,
                step=step,
                tasks_per_call=max(1, policy.engine.max_rows // group_size),
            )

        began = time.perf_counter()
        evaluation = evaluate(
            tasks,
            rollout,
            num_samples=num_samples,
            ks=ks,
            step=policy.version,
        )
        seconds = time.perf_counter() - began
    record: dict[str, Any] = {
        "model": str(args.model or args.workdir),
        "step": policy.version,
        **evaluation.to_json(),
        "num_samples": num_samples,
        "sampling": {**vars(params), "stop_token_ids": list(policy.tokenizer.stop_token_ids)},
        "seconds": seconds,
        "device": policy.mesh.devices.flat[0].device_kind,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    if args.json:
        print(text)
    else:
        title = f"{record['model']}, step {policy.version}, temperature {params.temperature:g}"
        width = None if sys.stdout.isatty() else 120  # a file need not be as narrow as a terminal
        rich.console.Console(width=width).print(table(evaluation, title=title))
    if store is not None:
        store.append(evaluation.groups)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 0
