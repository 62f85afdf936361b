"""What published records look like, turned into ``Message`` and ``Task``. Pure functions of one record.

Conversations: ``messages`` (role, content), ShareGPT ``conversations`` (from, value), ``prompt`` + ``completion`` or
``response``, Alpaca ``instruction`` + ``input`` + ``output``. Tasks: GSM8K, MATH, multiple choice, ``prompt`` +
``answer``. A record that fits no form raises ``ValueError``; nothing is guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlvr_jax.types import JSON, Message, Task

_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}


# A turn with more than role and content (tool_calls, reasoning_content) stays a mapping, for the chat template to read.
Turn = Message | dict[str, JSON]


def to_messages(record: Mapping[str, JSON]) -> tuple[Turn, ...]:
    """The conversation of a record, roles in the spelling of ``Message``.

    Raises:
      ValueError: a record of no known form, an unknown role, or content that is not text.
    """
    if "messages" in record:
        return _messages(record["messages"])
    if "conversations" in record:
        return _messages(record["conversations"])
    if "instruction" in record and "output" in record:
        request = _text(record["instruction"])
        if record.get("input"):
            request = f"{request}\n\n{_text(record['input'])}"
        return (
            Message(role="user", content=request),
            Message(role="assistant", content=_text(record["output"])),
        )
    for key in ("completion", "response"):
        if "prompt" in record and key in record:
            return _turns(record["prompt"], "user") + _turns(record[key], "assistant")
    raise ValueError(
        f"got a record with the keys {sorted(record)}; expected messages, conversations, "
        "prompt + completion (or response), or instruction + output"
    )


def to_task(record: Mapping[str, JSON], *, domain: str, source: str, instruction: str = "") -> Task:
    """The task of a record, its answer in the form verifiers take.

    The id is a hash of the question and the answer: the same wherever the record stands in its file.

    Args:
      record: ``question`` + ``answer`` ending in ``#### number`` (GSM8K: the number, commas and ``$`` removed);
        ``problem`` + ``solution`` (MATH: the last complete box) or ``problem`` + ``answer``; ``question`` +
        ``choices`` + ``answer`` (an index, a letter or the text of a choice: the letter); ``prompt`` (text or
        messages) + ``answer``.
      domain: the registered domain that scores responses.
      source: stored in the metadata.
      instruction: appended to the question after an empty line.

    Raises:
      ValueError: a record of no known form, or a gold answer that no response could match.
    """
    if "choices" in record and "question" in record:
        prompt, answer = _multiple_choice(record)
    elif "question" in record and "answer" in record:
        prompt, answer = _turns(record["question"], "user"), _gsm8k_answer(record["answer"])
    elif "problem" in record and ("solution" in record or "answer" in record):
        prompt, answer = _turns(record["problem"], "user"), _math_answer(record)
    elif "prompt" in record and "answer" in record:
        prompt, answer = _turns(record["prompt"], "user"), record["answer"]
        if answer is None or (isinstance(answer, str) and not answer.strip()):
            raise ValueError("the answer is empty")
    else:
        raise ValueError(
            f"got a record with the keys {sorted(record)}; expected question + answer (GSM8K), problem + solution "
            "(MATH), question + choices + answer, or prompt + answer"
        )
    messages = [turn for turn in prompt if isinstance(turn, Message)]
    if len(messages) < len(prompt):
        raise ValueError(
            "the prompt has turns with more than role and content; a task holds text only"
        )
    if messages[-1].role not in ("user", "tool"):
        raise ValueError("the prompt must end with a turn of the user, which the policy answers")
    if instruction:
        content = f"{messages[-1].content}\n\n{instruction}"
        messages[-1] = Message(role=messages[-1].role, content=content)
    identity = json.dumps([[m.role, m.content] for m in messages] + [answer], sort_keys=True)
    metadata: dict[str, JSON] = {"source": source}
    level = re.fullmatch(r"(?:Level )?(\d+)", str(record.get("level", "")))
    if level:
        metadata["level"] = int(level[1])
    return Task(
        id=hashlib.blake2b(identity.encode(), digest_size=8).hexdigest(),
        domain=domain,
        prompt=tuple(messages),
        answer=answer,
        metadata=metadata,
    )


def last_box(text: str) -> str | None:
    """Content of the last complete ``\\boxed{...}`` or ``\\fbox{...}``, braces balanced; None without one."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            if text[position - 1] == "\\":
                continue  # \{ and \} are characters of a set, not braces
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position].strip()
    return None


def _gsm8k_answer(answer: JSON) -> str:
    marked = re.search(r"####[ \t]*(\S[^\n]*?)\s*$", _text(answer))
    if not marked:
        raise ValueError(
            "the answer has no final line '#### number' (GSM8K); other forms use the keys prompt and answer"
        )
    number = re.sub(r"[,$\s]", "", marked[1])
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)", number):
        raise ValueError(f"the answer after #### is {marked[1]!r}; expected a number")
    return number


def _math_answer(record: Mapping[str, JSON]) -> str:
    if "answer" in record:
        answer = _text(record["answer"]).strip()
    else:
        answer = last_box(_text(record["solution"])) or ""
    if not answer:
        raise ValueError("the solution has no complete \\boxed{...} with an answer in it")
    return answer


def _multiple_choice(record: Mapping[str, JSON]) -> tuple[tuple[Turn, ...], str]:
    choices = record["choices"]
    gold = record.get("answer", record.get("correct"))
    if not isinstance(choices, list) or not 2 <= len(choices) <= 26:
        raise ValueError("choices must be a list of 2 to 26 texts")
    letters = [chr(ord("A") + i) for i in range(len(choices))]
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < len(choices):
        answer = letters[gold]
    elif isinstance(gold, str) and choices.count(gold) == 1:
        answer = letters[choices.index(gold)]
    elif isinstance(gold, str) and gold in letters:
        answer = gold
    else:
        raise ValueError(f"the gold answer {gold!r} matches no choice of {choices}")
    lines = [f"{letter}. {_text(choice)}" for letter, choice in zip(letters, choices, strict=True)]
    question = "\n".join([_text(record["question"]), *lines])
    return (Message(role="user", content=question),), answer


def _turns(value: JSON, role: str) -> tuple[Turn, ...]:
    return (Message(role=role, content=value),) if isinstance(value, str) else _messages(value)


def _messages(value: JSON) -> tuple[Turn, ...]:
    if isinstance(value, Mapping):  # TFDS and Parquet keep a list of pairs as a pair of lists
        columns = {key: column for key, column in value.items() if isinstance(column, Sequence)}
        value = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"got {type(value).__name__} {value!r:.80}; expected a list of messages that is not empty"
        )
    return tuple(_message(item) for item in value)


def _message(item: Any) -> Turn:
    if not isinstance(item, Mapping):
        raise ValueError(f"got the message {item!r:.80}; expected an object with role and content")
    role = item.get("role", item.get("from"))
    if role not in _ROLES:
        raise ValueError(f"unknown role {role!r}; expected one of {sorted(_ROLES)}")
    content = item.get("content", item.get("value"))
    # Parquet fills what other rows have with null
    rest = {k: v for k, v in item.items() if k not in ("role", "from", "content", "value") and v}
    if content is None and rest.get("tool_calls"):
        content = ""  # null and empty are the same turn
    text = _text(content)
    if rest:
        return {"role": _ROLES[role], "content": text, **rest}
    return Message(role=_ROLES[role], content=text)


def _text(value: JSON) -> str:
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value)
    ):
        return "".join(part["text"] for part in value)
    raise ValueError(f"got {type(value).__name__} {value!r:.80}; expected text")
