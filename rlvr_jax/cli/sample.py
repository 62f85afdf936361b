"""``rlvr sample``: prints what a policy answers."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlvr_jax.cli.compilation_cache import keep_compiled
from rlvr_jax.cli.policy_flags import (
    RunConfig,
    add_model_flags,
    add_sampling_flags,
    policy_of,
    sampling_of,
)
from rlvr_jax.errors import ConfigError

if TYPE_CHECKING:
    from rlvr_jax.training.policy import Policy, Responses

EXAMPLES = """examples:
  rlvr sample --model smollm2-135m-instruct --prompt 'What is 2 + 3?'
  echo 'What is 2 + 3?' | rlvr sample --workdir runs/quickstart
  rlvr sample --workdir runs/quickstart --chat questions.jsonl --num-samples 4 --json
  rlvr sample --model runs/sft/model --prompt Hi --temperature 0 --stop '.' --logprobs

One prompt and one answer print the answer alone. A line of a --chat file is a conversation up to the policy's turn:
[{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], or an object with it under "messages".
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlvr sample",
        description="Prints what a model, or the newest checkpoint of a run, answers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_model_flags(parser)
    group = parser.add_argument_group("prompts (from standard input when none is given)")
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a user's message; may be repeated",
    )
    group.add_argument(
        "--chat",
        action="append",
        default=[],
        type=pathlib.Path,
        metavar="FILE.jsonl",
        help="conversations, one a line; may be repeated",
    )
    group.add_argument(
        "--num-samples", type=int, default=1, metavar="N", help="answers to each (%(default)s)"
    )
    add_sampling_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON, an object a prompt")
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="each token with its log-probability, in nats, of the distribution it was sampled from",
    )
    return parser


def read_chats(path: pathlib.Path) -> list[list[dict[str, Any]]]:
    """The conversations of a JSONL file.

    Raises:
      ConfigError: a line is no conversation.
      OSError: the file cannot be read.
    """
    chats = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from error
        messages = record.get("messages") if isinstance(record, dict) else record
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(turn, dict) and "role" in turn for turn in messages)
        ):
            raise ConfigError(
                f"{path}, line {number} is no conversation; expected a list of messages with 'role' and 'content', "
                "or an object with it under 'messages'"
            )
        chats.append(messages)
    return chats


def _prompts(args: argparse.Namespace) -> list[str | list[dict[str, Any]]]:
    prompts = [*args.prompt, *(chat for path in args.chat for chat in read_chats(path))]
    if not prompts and not args.chat:
        prompts = [text] if (text := sys.stdin.read().strip()) else []
    if not prompts:
        raise ConfigError(
            "no prompt; give --prompt TEXT, --chat FILE.jsonl, or text on standard input"
        )
    return prompts


def main(argv: Sequence[str]) -> int:
    """Samples, prints, and returns 0."""
    args = _parser().parse_args(argv)
    keep_compiled()
    run = RunConfig(args.workdir)
    params = sampling_of(args, run)
    prompts = _prompts(args)
    policy = policy_of(args, run)
    responses = policy.generate(prompts, num_samples=args.num_samples, **vars(params))
    records = [_record(policy, responses, row, args.logprobs) for row in range(len(responses))]
    if args.json:
        print(json.dumps(records, indent=2, ensure_ascii=False))
        return 0
    alone = len(records) == 1 and args.num_samples == 1
    for record, prompt in zip(records, responses.prompts, strict=True):
        if len(records) > 1:
            print(f"prompt: {policy.chat.render(prompt)!r}")
        for index, answer in enumerate(record["answers"]):
            if not alone:
                length = f"{answer['num_tokens']} tokens, {answer['stop_reason']}"
                print(f"[{index + 1}/{args.num_samples}: {length}]")
            print(answer["text"])
            for token in answer.get("tokens", ()):
                print(f"  {token['logprob']:9.4f}  {token['id']:>6}  {token['text']!r}")
    return 0


def _record(policy: Policy, responses: Responses, row: int, logprobs: bool) -> dict[str, Any]:
    answers = []
    for text, sample in zip(responses.texts[row], responses.completions[row], strict=True):
        answer: dict[str, Any] = {
            "text": text,
            "stop_reason": sample.stop_reason,
            "num_tokens": len(sample.tokens),
        }
        if logprobs:
            answer["logprob"] = float(sample.logprobs.sum())
            answer["tokens"] = [
                {
                    "id": token,
                    "text": policy.tokenizer.decode([token], skip_special=False),
                    "logprob": logprob,
                }
                for token, logprob in zip(
                    sample.tokens.tolist(), sample.logprobs.tolist(), strict=True
                )
            ]
        answers.append(answer)
    prompt = [turn if isinstance(turn, dict) else vars(turn) for turn in responses.prompts[row]]
    return {"prompt": prompt, "answers": answers}
