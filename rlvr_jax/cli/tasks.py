"""``rlvr tasks list | show | score``: what there is to train on, what it looks like, and how a response is judged.

``score`` runs the same verifiers in the same worker processes as training does. A task is named by where it was drawn
from (``--level --split --seed --index``, as ``show`` prints them) or given as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from rlvr_jax.cli.imports import add_import_flag, import_modules
from rlvr_jax.envs.single_turn import DomainJudge
from rlvr_jax.errors import ConfigError
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.tasks.registry import DOMAINS, Domain, expand_domains
from rlvr_jax.tasks.splits import SPLITS, draw, task_id
from rlvr_jax.types import JSON, Message, Reward, Task

EXAMPLES = """examples:
  rlvr tasks list arithmetic
  rlvr tasks show text/last_word --level 2 -n 3
  rlvr tasks score arithmetic/add --level 0 --index 1 --response 12
  rlvr tasks score arithmetic/add --response 12 --task '{"prompt": "What is 7 + 5?", "answer": "12"}'
  rlvr tasks score --verifier math --answer '1/2' --response '\\boxed{0.5}'
"""


def _print_json(value: JSON) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _verifier_names(domain: Domain) -> list[str]:
    return [VerifierSpec(use.name).label for use in domain.verifiers]


def list_domains(args: argparse.Namespace) -> int:
    """Prints the domains whose names begin with a prefix, or that a group stands for."""
    found = [name for name in DOMAINS if name.startswith(args.prefix)]
    domains = [DOMAINS.get(name) for name in found or expand_domains(args.prefix)]
    if args.json:
        facts = [
            {
                "name": domain.name,
                "description": domain.description,
                "num_levels": domain.num_levels,
                "verifiers": _verifier_names(domain),
                "max_response_tokens": domain.max_response_tokens,
                "licence": domain.licence,
                "source": domain.source,
            }
            for domain in domains
        ]
        _print_json(facts)
        return 0
    width = max(len(domain.name) for domain in domains)
    verifiers = [", ".join(_verifier_names(domain)) for domain in domains]
    room = max(map(len, ["verifiers", *verifiers]))
    print(f"{'domain':<{width}}  levels  {'verifiers':<{room}}  description")
    for domain, names in zip(domains, verifiers, strict=True):
        print(
            f"{domain.name:<{width}}  {domain.num_levels:>6}  {names:<{room}}  {domain.description}"
        )
    for family in DOMAINS.families.values():
        for name, reason in family.excluded.items():
            if name.startswith(args.prefix):
                print(f"left out: {name}: {reason}")
    return 0


def show_tasks(args: argparse.Namespace) -> int:
    """Prints the first tasks of one level, or of every level."""
    num_levels = DOMAINS.get(args.domain).num_levels
    levels = range(num_levels) if args.level is None else [args.level]
    drawn = [
        (index, draw(args.domain, level, args.split, args.seed, index))
        for level in levels
        for index in range(args.num_tasks)
    ]
    if args.json:
        _print_json([dataclasses.asdict(task) for _, task in drawn])
        return 0
    for index, task in drawn:
        print(
            f"{task.domain} level {task.level} {args.split} seed {args.seed} index {index}: {task.id}"
        )
        for message in task.prompt:
            lines = message.content.replace("\n", "\n    ")
            print(f"  {message.role}: {lines}")
        print(f"  answer: {json.dumps(task.answer, ensure_ascii=False)}")
    return 0


def parse_task(text: str, *, domain: str, where: str) -> Task:
    """Reads a task as ``show --json`` writes it; only ``prompt`` (messages, or the question as text) and ``answer`` are
    required.

    Raises:
      ConfigError: not JSON, not a task, or of another domain.
    """
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not JSON ({error}); expected one task, as 'rlvr tasks show --json' prints"
        ) from error
    if isinstance(record, list) and len(record) == 1:  # what `show --json -n 1 --level L` prints
        record = record[0]
    if not isinstance(record, dict) or "answer" not in record:
        raise ConfigError(
            f"{where} is {type(record).__name__}; expected an object with 'prompt' and 'answer'"
        )
    if record.get("domain", domain) != domain:
        raise ConfigError(
            f"{where} is of domain {record['domain']!r}, and {domain!r} was asked for; make them agree"
        )
    prompt = record.get("prompt", "")
    try:
        if isinstance(prompt, str):
            messages = (Message(role="user", content=prompt),)
        else:
            messages = tuple(Message(role=m["role"], content=m["content"]) for m in prompt)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} has the prompt {prompt!r}; expected text, or a list of messages with 'role' and 'content'"
        ) from error
    return Task(
        id=str(record.get("id") or task_id(domain, messages, record["answer"])),
        domain=domain,
        prompt=messages,
        answer=record["answer"],
        metadata=record.get("metadata") or {},
    )


def _task_of(args: argparse.Namespace) -> Task:
    """The task that the flags name."""
    domain = args.domain or "adhoc"
    if args.task is not None:
        return parse_task(args.task, domain=domain, where="--task")
    if args.task_file is not None:
        return parse_task(
            args.task_file.read_text(encoding="utf-8"), domain=domain, where=str(args.task_file)
        )
    if args.answer is not None:
        return parse_task(json.dumps({"answer": args.answer}), domain=domain, where="--answer")
    if args.domain is None:
        raise ConfigError(
            "no task; give DOMAIN (with --level, --index), --task, --task-file or --answer"
        )
    return draw(args.domain, args.level or 0, args.split, args.seed, args.index)


def _judge(args: argparse.Namespace, task: Task, response: str) -> tuple[Reward, ...]:
    """The verdicts of the domain's verifiers, or of those the flags name."""
    with VerifierPool(1, args.timeout_s) as pool:
        if not args.verifier:
            return DomainJudge(pool)([(task, response)])[0]
        specs = [VerifierSpec(name, 1.0, args.params) for name in args.verifier]
        return tuple(pool.score([(task, response, spec) for spec in specs]))


def score_response(args: argparse.Namespace) -> int:
    """Prints the verdict of each verifier, and the score; exit status 1 when one of them could not judge."""
    if args.domain is not None:
        DOMAINS.get(args.domain)
    elif not args.verifier:
        raise ConfigError("no verifiers; give DOMAIN, or --verifier NAME with --answer or --task")
    task = _task_of(args)
    response = sys.stdin.read() if args.response == "-" else args.response
    rewards = _judge(args, task, response)
    judged = all(reward.status == "ok" for reward in rewards)
    score = math.fsum(reward.weight * reward.value for reward in rewards) if judged else None
    if args.json:
        verdicts = [dataclasses.asdict(reward) for reward in rewards]
        _print_json(
            {
                "task": dataclasses.asdict(task),
                "response": response,
                "verdicts": verdicts,
                "score": score,
            }
        )
        return 0 if judged else 1
    print(f"task {task.domain} {task.id}, answer {json.dumps(task.answer, ensure_ascii=False)}")
    for reward in rewards:
        value = f"{reward.value:g}" if reward.status == "ok" else "-"
        detail = f"  {reward.detail}" if reward.detail else ""
        print(f"  {reward.name}: {reward.status}  value {value}  weight {reward.weight:g}{detail}")
    print("score: " + ("none (a verifier could not judge)" if score is None else f"{score:g}"))
    return 0 if judged else 1


def _json_object(text: str) -> dict[str, JSON]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def _count(text: str) -> int:
    if int(text) < 1:
        raise ValueError("expected at least 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlvr tasks",
        description="Lists domains, shows their tasks, scores a response.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON")
    add_import_flag(common)
    from_where = argparse.ArgumentParser(add_help=False)
    from_where.add_argument(
        "--split", choices=SPLITS, default="train", help="side to draw from (%(default)s)"
    )
    from_where.add_argument("--seed", type=int, default=0, help="of the draws (%(default)s)")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    command = commands.add_parser(
        "list", parents=[common], help="the domains, their levels and verifiers"
    )
    command.add_argument(
        "prefix", nargs="?", default="", metavar="PREFIX", help="beginning of the names, or a group"
    )
    command.set_defaults(run=list_domains)

    command = commands.add_parser(
        "show", parents=[common, from_where], help="some tasks of a domain"
    )
    command.add_argument("domain", metavar="DOMAIN")
    command.add_argument("--level", type=int, help="of difficulty, from 0 (default: each)")
    command.add_argument(
        "-n", "--num-tasks", type=_count, default=1, metavar="N", help="tasks a level (%(default)s)"
    )
    command.set_defaults(run=show_tasks)

    command = commands.add_parser(
        "score", parents=[common, from_where], help="judge a response against a task"
    )
    command.add_argument(
        "domain", nargs="?", metavar="DOMAIN", help="its verifiers judge; optional with --verifier"
    )
    command.add_argument(
        "--response",
        required=True,
        metavar="TEXT",
        help="what the model said; - reads it from stdin",
    )
    given = command.add_mutually_exclusive_group()
    given.add_argument("--task", metavar="JSON", help="the task: an object with prompt and answer")
    given.add_argument("--task-file", type=pathlib.Path, metavar="FILE", help="the same, in a file")
    given.add_argument(
        "--answer", metavar="TEXT", help="a task with this gold answer and no question"
    )
    given.add_argument("--level", type=int, help="redraw the task at this level (0)")
    command.add_argument(
        "--index", type=int, default=0, help="which task of the level to redraw (%(default)s)"
    )
    command.add_argument(
        "--verifier",
        action="append",
        metavar="NAME",
        help="judge with this one and not the domain's; may be repeated",
    )
    command.add_argument(
        "--params", type=_json_object, default={}, metavar="JSON", help="parameters for --verifier"
    )
    command.add_argument(
        "--timeout-s",
        type=float,
        default=5.0,
        metavar="S",
        help="deadline of a verdict, in seconds (%(default)s)",
    )
    command.set_defaults(run=score_response)
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    args: Any = _parser().parse_args(argv)
    import_modules(args.imports)
    return args.run(args)
