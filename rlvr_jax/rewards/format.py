"""``format``: the response has the required parts, each exactly once and in order. It never looks at the answer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from rlvr_jax.rewards.extraction import last_boxed
from rlvr_jax.rewards.registry import VERIFIERS
from rlvr_jax.types import Task

_LATEX_SPACE = re.compile(r"[{}~$]|\\[ ,;:!]")
_TAG_NAME = re.compile(r"[A-Za-z][\w-]*")


@VERIFIERS.register("format")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    r"""1.0 if every requirement holds of the response (never of the prompt, which names the same markers), else 0.0.

    Attributes:
      tags: each ``<tag>...</tag>`` exactly once, not empty, one after another in this order.
      sections: each starts exactly one line (``"## Plan"``, ``"Answer:"``), in this order, with some text after it.
      boxed: the response ends its answer in a complete ``\boxed{}``: one that is not empty, and the last one closes.
      only: nothing but white space outside the tags.
    """

    name = "format"
    tags: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    boxed: bool = False
    only: bool = False

    def __post_init__(self) -> None:
        for field in ("tags", "sections"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # a list, in a config
        if not (self.tags or self.sections or self.boxed):
            raise ValueError("format requires nothing; give tags, sections or boxed=True")
        wrong = [tag for tag in self.tags if not _TAG_NAME.fullmatch(tag)]
        if wrong:
            raise ValueError(
                f"format tags are {self.tags!r}; expected names without brackets, such as 'think'"
            )
        if any(not section.strip() for section in self.sections):
            raise ValueError(
                f"format sections are {self.sections!r}; expected texts that are not empty"
            )
        if self.only and not self.tags:
            raise ValueError("format only=True needs tags: it forbids text outside them")

    def __call__(self, task: Task, response: str) -> float:
        return float(all(self._checks(response)))

    def _checks(self, response: str) -> Iterator[bool]:
        yield self._tags_hold(response)
        yield self._sections_hold(response)
        if self.boxed:
            yield _says(_LATEX_SPACE.sub("", last_boxed(response) or ""))

    def _tags_hold(self, response: str) -> bool:
        position = 0
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            if response.count(opening) != 1 or response.count(closing) != 1:
                return False
            start, end = response.find(opening), response.find(closing)
            if start < position or end < start or not _says(response[start + len(opening) : end]):
                return False
            if self.only and response[position:start].strip():
                return False
            position = end + len(closing)
        return not (self.only and response[position:].strip())

    def _sections_hold(self, response: str) -> bool:
        lines = response.split("\n")
        position = 0
        starts = []
        for section in self.sections:
            where = [i for i, line in enumerate(lines) if _starts(line, section)]
            if len(where) != 1 or where[0] < position:
                return False
            starts.append(where[0])
            position = where[0] + 1
        ends = [*starts, len(lines)][1:]
        for section, start, end in zip(self.sections, starts, ends, strict=True):
            body = [lines[start].strip()[len(section.strip()) :], *lines[start + 1 : end]]
            if not _says("".join(body)):
                return False
        return True


def _says(text: str) -> bool:
    """Whether there is anything to see in a text: not only white space and invisible characters."""
    return any(character.isprintable() and not character.isspace() for character in text)


def _starts(line: str, section: str) -> bool:
    """Whether a line starts with a section's label as a whole word: "## Plan" does not start "## Planning"."""
    line, section = line.strip(), section.strip()
    rest = line[len(section) :]
    return line.startswith(section) and not (section[-1].isalnum() and rest[:1].isalnum())
