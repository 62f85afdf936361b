r"""Where an answer is taken out of a response. No verifier looks for one in any other way.

Policies, each chosen so that a model cannot gain by vagueness or by listing guesses:

- *Boxed*: the last complete ``\boxed{...}`` or ``\fbox{...}`` wins. A last box that never closes means the answer was
  cut off: no answer, and an earlier box is not used instead.
- *Tagged*: inside the last ``<answer>...</answer>``; a last opening tag without its end means no answer. Without tags,
  the rest of the line after the last ``Answer:`` (or the next line that is not empty).
- *Whole*: the stripped response itself.

Text in code fences is text like any other. When nothing is found the result is None, never the whole text: a format
that is required must not be cheaper to leave out. Every function is linear in the length of the text.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

ExtractMode = Literal["whole", "tagged", "boxed"]

_BOX_EVENT = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,})")
_MARKER = "answer"


def check_mode(owner: str, mode: str, modes: tuple[str, ...] = get_args(ExtractMode)) -> None:
    if mode not in modes:
        raise ValueError(f"{owner} mode is {mode!r}; expected one of {', '.join(modes)}")


def extract(response: str, mode: str) -> str | None:
    """Returns the answer text by ``mode`` (see the module's policies), stripped, or None if there is none."""
    if mode == "boxed":
        answer = last_boxed(response)
    elif mode == "tagged":
        answer = tagged(response)
    else:
        answer = response
    answer = None if answer is None else answer.strip()
    return answer or None


def last_boxed(text: str) -> str | None:
    r"""Returns what is in the last complete outermost ``\boxed{}`` or ``\fbox{}``; None if the last one never closes.

    ``\boxed{\boxed{7}}`` gives ``\boxed{7}``: the outermost one is the answer. ``\{`` and ``\}`` are no braces.
    """
    open_braces: list[int] = []  # content start of a box, -1 for any other brace
    answer: tuple[int, int] | None = None
    last_start, last_closed = -1, True
    for event in _BOX_EVENT.finditer(text):
        token = event.group()
        if token == "}":
            if not open_braces:
                continue
            start = open_braces.pop()
            if start >= 0:  # an outer box closes after its inner ones and takes their place
                answer = (start, event.start())
                last_closed = last_closed or start == last_start
        elif token == "{":
            open_braces.append(-1)
        elif token.endswith("{") and len(token) > 2:
            open_braces.append(event.end())
            last_start, last_closed = event.end(), False
    if answer is None or not last_closed:
        return None
    return text[answer[0] : answer[1]]


def last_tag(text: str, tag: str) -> str | None:
    """Returns what is in the last ``<tag>...</tag>``; None if there is none or the last opening tag is not closed."""
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    start += len(tag) + 2
    end = text.find(f"</{tag}>", start)
    return None if end < 0 else text[start:end]


def after_marker(text: str, marker: str = _MARKER) -> str | None:
    """Returns the rest of the line after the last ``marker:`` (any case, Markdown emphasis allowed around it).

    When nothing follows on that line, the next line that is not empty.
    """
    pattern = re.compile(
        rf"(?<!\w){re.escape(marker)}[*_]{{0,3}}[ \t]?[:：][*_]{{0,3}}", re.IGNORECASE
    )
    found = list(pattern.finditer(text))
    if not found:
        return None
    last = found[-1]
    emphasis = (
        "*_" if set(last.group()) & set("*_") or text[: last.start()].endswith(("*", "_")) else ""
    )
    for line in text[last.end() :].split("\n"):
        line = line.strip().strip(emphasis).strip() if emphasis else line.strip()
        if line:
            return line
    return None


def tagged(text: str) -> str | None:
    """Returns the text in the last ``<answer></answer>``, or after the last ``Answer:`` when there are no such tags."""
    if f"<{_MARKER}>" in text:
        return last_tag(text, _MARKER)
    return after_marker(text)


def fenced_blocks(text: str) -> list[str]:
    """Returns the contents of the complete Markdown code fences, of three or more backticks or tildes, in order."""
    blocks: list[str] = []
    block: list[str] | None = None
    fence = ""
    for line in text.split("\n"):
        stripped = line.strip()
        opening = _FENCE.match(stripped) if block is None else None
        if opening is not None:
            block, fence = [], opening.group(1)
        elif block is not None and stripped.startswith(fence) and not stripped.strip(fence[0]):
            blocks.append("\n".join(block))
            block = None
        elif block is not None:
            block.append(line)
    return blocks
