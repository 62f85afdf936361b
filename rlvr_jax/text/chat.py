"""Chat templates: the only place where messages become token ids.

A template is Jinja source that came with the weights; it runs in a sandbox with the functions Hugging Face gives it.
Three promises beyond rendering:

- *Text stays text.* Special tokens are what the template writes. The same characters inside a message are encoded as
  plain text: before rendering, each special token spelled in a message is broken by a character that occurs nowhere
  else, which is taken out again once the special tokens of the template have been found.
- *Masks are measured.* What an assistant turn adds is found by rendering up to it and comparing ids, never by looking
  for markers in the template. Where the prefixes do not match, ``ValueError`` says so; nothing is guessed.
- *History is append-only.* ``next_turn_ids`` gives what to append to ids that were already sampled.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np

from rlvr_jax.text.tokenizer import Tokenizer
from rlvr_jax.types import Message

Conversation = Sequence[Message | Mapping[str, Any]]


class ChatTemplate:
    """A chat template bound to its tokenizer.

    Messages are ``Message`` or mappings with ``role``, ``content`` and whatever else the template reads
    (``tool_calls``, ``reasoning_content``). A null content is an empty one.

    Args:
      tokenizer: its ``chat_template`` is used unless ``source`` is given.
      source: Jinja source.

    Raises:
      ValueError: when there is no template, or it is not valid Jinja.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None) -> None:
        source = tokenizer.chat_template if source is None else source
        if source is None:
            raise ValueError(
                "the tokenizer has no chat template; expected chat_template in tokenizer_config.json or a "
                "chat_template.jinja: use an instruction-tuned model, or pass source="
            )
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error}"
            ) from error
        self._tokenizer = tokenizer
        specials = sorted(tokenizer.special_tokens, key=len, reverse=True)
        if specials and len(specials[-1]) < 2:
            raise ValueError(
                f"special token {specials[-1]!r} is one character long; expected at least two, so that it can be told "
                "from the same text in a message: rename it in tokenizer.json"
            )
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._spellings = {i: token for token, i in tokenizer.special_tokens.items()}
        # Where a special token starts, found through lookahead so that overlapping spellings count too.
        self._spelled = re.compile(rf"(?=(?:{self._special.pattern}))(.)", re.DOTALL)
        self._openings = tuple({s[:i] for s in specials for i in range(1, len(s))})
        self._endings = tuple({s[i:] for s in specials for i in range(1, len(s))})

    def render(self, messages: Conversation, *, add_generation_prompt: bool = True) -> str:
        """Returns the conversation as text. Show it to people; to get ids use ``render_ids``.

        Raises:
          ValueError: when the template refuses the messages.
        """
        text, guard = self._render_guarded(messages, add_generation_prompt)
        return text.replace(guard, "")

    def render_ids(
        self, messages: Conversation, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Returns the conversation as ids; special tokens are those of the template only.

        Raises:
          ValueError: when the template refuses the messages.
        """
        return self._encode_parts(
            self._parts(*self._render_guarded(messages, add_generation_prompt))
        )

    def render_with_mask(self, messages: Conversation) -> tuple[list[int], np.ndarray]:
        """Returns a whole conversation for supervised training.

        Returns:
          ids: the full render, T ids, without a generation prompt.
          mask: bool[T], true for the tokens an assistant would sample: each assistant turn after its generation prompt,
            up to and with the stop token; what the template puts after that is not.

        Raises:
          ValueError: when no message is the assistant's, when a turn does not end in a stop token, or when the render
            up to a turn is not a prefix of the whole (a template that rewrites history): split the conversation there.
        """
        ids = self.render_ids(messages, add_generation_prompt=False)
        mask = np.zeros(len(ids), bool)
        stops = set(self._tokenizer.stop_token_ids)
        for turn, message in enumerate(messages):
            if _as_mapping(message).get("role") != "assistant":
                continue
            before = self.render_ids(messages[:turn])
            after = self.render_ids(messages[: turn + 1], add_generation_prompt=False)
            start = len(before)
            end = next((i + 1 for i in range(start, len(after)) if after[i] in stops), None)
            if after[:start] != before:
                raise ValueError(
                    f"the chat template does not render turn {turn} as its generation prompt followed by the reply; "
                    "which tokens the assistant would sample cannot be told: change the messages or the template"
                )
            if end is None:
                raise ValueError(
                    f"turn {turn} does not end in a stop token (stop_token_ids {sorted(stops)}); the template ends "
                    "turns with another token: list it as eos_token_id in generation_config.json"
                )
            if ids[:end] != after[:end]:
                raise ValueError(
                    f"the chat template changes turn {turn} or what is before it once later messages follow; "
                    f"train on messages[:{turn + 1}] as a conversation of its own"
                )
            mask[start:end] = True
        if not mask.any():
            raise ValueError(
                f"no message of the {len(messages)} has the role 'assistant'; there is nothing to train on"
            )
        return ids, mask

    def reply_ids(
        self, prompt: Conversation, replies: Sequence[Message | Mapping[str, Any]]
    ) -> tuple[list[int], list[list[int]]]:
        """Splits several replies to one prompt at the ids they all share with it, for preference pairs.

        A generation prompt may hold what only some replies start with (``<think>``); then the shared part is shorter.

        Returns:
          ``(prompt_ids, [reply_ids, ...])``; ``prompt_ids + reply_ids[i]`` is the full render of prompt and reply i.

        Raises:
          ValueError: when the template refuses the messages.
        """
        renders = [
            self.render_ids([*prompt, reply], add_generation_prompt=False) for reply in replies
        ]
        shared = _common_prefix([self.render_ids(prompt), *renders])
        return renders[0][:shared] if renders else [], [render[shared:] for render in renders]

    def next_turn_ids(self, history_ids: Sequence[int], messages: Conversation) -> list[int]:
        """Returns the ids to append to a sampled history so that the policy can take its next turn.

        The history stays exactly as it was sampled, whatever its text would be encoded to. What is appended (the
        separator after the stop token, the new messages, the generation prompt) was not sampled: its mask is 0.

        Args:
          history_ids: what the model saw and sampled so far, the last reply included.
          messages: the conversation so far, that reply included, and the new messages.

        Raises:
          ValueError: when the history is not the beginning of the full render of ``messages``, special token by special
            token and text by text: start a new sample from the full render.
        """
        parts = self._parts(*self._render_guarded(messages, True))
        past = self._history_parts(history_ids)
        matched = _common_prefix([past, parts])
        before = past[matched - 1] if matched else None
        if matched == len(past):
            return self._encode_parts(parts[matched:], before=before)
        ours, full = past[matched], parts[matched] if matched < len(parts) else None
        is_last = matched == len(past) - 1
        if is_last and isinstance(ours, str) and isinstance(full, str) and full.startswith(ours):
            # A reply that ran out of tokens ends inside a text.
            return self._encode_parts([full[len(ours) :], *parts[matched + 1 :]], before=ours)
        raise ValueError(
            f"the history is not the beginning of the full render: after {matched} equal parts it has {_show(ours)}, "
            f"the render has {_show(full)}; the template rewrites earlier turns, or the messages hold other text than "
            "was sampled: start a new sample from render_ids(messages)"
        )

    def _render_guarded(
        self, messages: Conversation, add_generation_prompt: bool
    ) -> tuple[str, str]:
        """Renders with the special tokens spelled in messages broken by a guard character; returns text and guard."""
        plain = [_as_mapping(message) for message in messages]
        written = json.dumps(plain, ensure_ascii=False, default=str)
        guard = next(c for c in map(chr, range(0xF0000, 0x10FFFE)) if c not in written)
        guarded = [
            {key: self._guard(value, guard, ends=key != "role") for key, value in message.items()}
            for message in plain
        ]
        try:
            text = self._template.render(
                messages=guarded,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokenizer.named_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = [message.get("role") for message in plain]
            raise ValueError(
                f"the chat template refuses messages with roles {roles}: {error}"
            ) from error
        return text, guard

    def _guard(self, value: Any, guard: str, *, ends: bool) -> Any:
        """Breaks special tokens in the strings of ``value``; with ``ends`` also those that what is around completes."""
        if isinstance(value, Mapping):
            return {
                self._guard(k, guard, ends=ends): self._guard(v, guard, ends=ends)
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guard(item, guard, ends=ends) for item in value]
        if not isinstance(value, str):
            return value
        text = self._spelled.sub(rf"\g<1>{guard}", value)
        if ends and text.endswith(self._openings):
            text += guard
        if ends and text.startswith(self._endings):
            text = guard + text
        return text

    def _parts(self, text: str, guard: str) -> list[int | str]:
        """Splits a guarded render into special ids and the plain texts between them."""
        specials = self._tokenizer.special_tokens
        parts: list[int | str] = []
        position = 0
        for match in self._special.finditer(text):
            parts += [text[position : match.start()].replace(guard, ""), specials[match[0]]]
            position = match.end()
        parts.append(text[position:].replace(guard, ""))
        return [part for part in parts if part != ""]

    def _history_parts(self, ids: Sequence[int]) -> list[int | str]:
        """The same for ids: special ids, and the decoded text of the runs between them."""
        parts: list[int | str] = []
        run: list[int] = []
        for token_id in map(int, ids):
            if token_id in self._spellings:
                parts += [self._tokenizer.decode(run), token_id]
                run = []
            else:
                run.append(token_id)
        parts.append(self._tokenizer.decode(run))
        return [part for part in parts if part != ""]

    def _encode_parts(
        self, parts: Sequence[int | str], *, before: int | str | None = None
    ) -> list[int]:
        """Encodes the texts among the parts, each between its special tokens, as it would be in the whole string.

        Some vocabularies treat a text differently at the start of a string or beside certain special tokens. Text that
        spells a special token is encoded alone: beside nothing that could be parsed.
        """
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            elif self._guard(part, "\0", ends=True) != part:
                ids += self._tokenizer.encode(part)
            else:
                left = parts[index - 1] if index else before
                right = parts[index + 1] if index + 1 < len(parts) else None
                left, right = (
                    self._spellings[p] if isinstance(p, int) else "" for p in (left, right)
                )
                inside = self._tokenizer.encode(left + part + right, allow_special=True)
                ids += inside[bool(left) : len(inside) - bool(right)]
        return ids


class _Generation(jinja2.ext.Extension):
    """Lets templates that mark the assistant's text with ``{% generation %}`` parse; the marks are not used."""

    tags = {"generation"}  # noqa: RUF012 (the name and the type are Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _as_mapping(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(message, Message):
        return {"role": message.role, "content": message.content}
    return {**message, "content": "" if message.get("content") is None else message["content"]}


def _common_prefix(sequences: Sequence[Sequence[Any]]) -> int:
    """Returns how many leading elements all sequences share."""
    length = 0
    for column in zip(*sequences, strict=False):
        if any(element != column[0] for element in column):
            break
        length += 1
    return length


def _show(part: int | str | None) -> str:
    """A part for a message: its end, since that is where differences are, and the end itself as such."""
    return "nothing more" if part is None else f"{part if isinstance(part, int) else part[-80:]!r}"


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
