"""Domains: where problems come from, how hard they get, and who judges the answers.

A domain is one function, ``make(level, rng) -> Draft``, and the facts about it. A new one is a decorated function in a
file under ``tasks/domains/`` (every module there is imported), or in any module of a user's own that gets imported::

    @domain("cooking/units", description="...", num_levels=3, verifiers=(VerifierUse(name="exact"),), ...)
    def units(level: int, rng: np.random.Generator) -> Draft: ...

Verifiers are named, not imported: tasks know nothing of rewards. A *family* (``rg/*``) resolves its names on demand, so
that a hundred generators cost nothing until one is used.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from rlvr_jax.registry import Registry
from rlvr_jax.types import JSON, Message

# Short names for sets of domains, beside the part of a name before its slash, which is always one.
GROUPS: Mapping[str, tuple[str, ...]] = {"math": ("arithmetic",)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """What a domain makes: a Task without its identity, which follows from the content.

    Attributes:
      prompt: the conversation up to the policy's turn (``ask`` writes the usual one).
      answer: the gold answer as the domain's verifiers take it; None when there is none to compare with.
      metadata: JSON values a verifier needs.
    """

    prompt: tuple[Message, ...]
    answer: JSON
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


def ask(
    question: str, *, system: str, example: tuple[str, str] | None = None
) -> tuple[Message, ...]:
    """A system message, an answered question as an example, and the question.

    Without a system message of ours, chat templates put in a longer one of theirs. The example shows a small model the
    form of an answer; being the same in every prompt, it costs a prefix.
    """
    shown = zip(("user", "assistant"), example or (), strict=False)
    return (
        Message(role="system", content=system),
        *(Message(role=role, content=content) for role, content in shown),
        Message(role="user", content=question),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierUse:
    """One verifier of a domain.

    Attributes:
      name: of a registered verifier (``exact``, ``numeric``, ...), or a picklable callable
        ``(task, response, **params) -> score``.
      weight: of its verdict in the trajectory's score; a domain's weights sum to 1 so that a right answer scores 1.
      params: keyword arguments of the verifier.
    """

    name: str | Callable[..., float]
    weight: float = 1.0
    params: Mapping[str, JSON] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """A kind of problem.

    Attributes:
      name: ``area/skill``.
      description: one line, for people.
      num_levels: levels are 0 (easiest) to num_levels - 1.
      make: draws one problem of a level from the generator it is given, and from nothing else.
      verifiers: who judges a response.
      max_response_tokens: how long an answer may get, without reasoning before it; a hint for sampling.
      licence, source: of the problems.
    """

    name: str
    description: str
    num_levels: int
    make: Callable[[int, np.random.Generator], Draft]
    verifiers: tuple[VerifierUse, ...]
    max_response_tokens: int
    licence: str = "Apache-2.0"
    source: str = "rlvr_jax"

    def __post_init__(self) -> None:
        if self.num_levels < 1:
            raise ValueError(
                f"domain {self.name!r} has num_levels={self.num_levels}; expected at least 1"
            )
        if not self.verifiers:
            raise ValueError(
                f"domain {self.name!r} has no verifiers; expected at least one VerifierUse"
            )

    def check_level(self, level: int) -> None:
        """Raises ValueError if the domain has no such level."""
        if not 0 <= level < self.num_levels:
            raise ValueError(
                f"domain {self.name!r} has no level {level}; expected 0 to {self.num_levels - 1}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Domains under one prefix that are built when first asked for.

    Attributes:
      names: the full names (``prefix/member``); listing them needs nothing heavy.
      resolve: builds the domain of one of them.
      excluded: full names that exist at the source and are left out, and why.
    """

    names: tuple[str, ...]
    resolve: Callable[[str], Domain]
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)


class DomainRegistry(Registry[Domain]):
    """Domains by name, and families of them by prefix."""

    def __init__(self) -> None:
        super().__init__("domain")
        self.families: dict[str, Family] = {}

    def register_family(self, prefix: str, family: Family) -> None:
        """Enters a family; raises ValueError if the prefix is taken."""
        if prefix in self.families:
            raise ValueError(f"domain family {prefix!r} is registered twice; choose another prefix")
        self.families[prefix] = family

    def get(self, name: str) -> Domain:
        """Returns the domain; raises ValueError naming the nearest and the known ones if there is none."""
        if name in self._entries:
            return self._entries[name]
        family = self.families.get(name.partition("/")[0])
        if family and name in family.excluded:
            raise ValueError(f"domain {name!r} is left out: {family.excluded[name]}")
        if not family or name not in family.names:
            raise self.unknown(name)
        return self.register(name)(family.resolve(name))

    def unknown(self, name: str) -> ValueError:
        """The error about a name that is neither a domain nor a group of them."""
        known = {*self, *self.prefixes(), *GROUPS}
        near = difflib.get_close_matches(name, sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        own = ", ".join(n for n in self if n.partition("/")[0] not in self.families)
        families = ", ".join(f"{p}/* ({len(f.names)})" for p, f in self.families.items())
        return ValueError(
            f"unknown domain {name!r}{hint} Known: {own}; families: {families}; "
            f"groups: {', '.join([*self.prefixes(), *GROUPS])}. `rlvr tasks list` shows all."
        )

    def prefixes(self) -> list[str]:
        """The parts of the names before the slash, each once, sorted."""
        return sorted({name.partition("/")[0] for name in self})

    def __contains__(self, name: str) -> bool:
        return name in set(self)

    def __iter__(self) -> Iterator[str]:
        members = (name for family in self.families.values() for name in family.names)
        return iter(sorted({*self._entries, *members}))


DOMAINS = DomainRegistry()


def domain(
    name: str,
    *,
    description: str,
    num_levels: int,
    verifiers: tuple[VerifierUse, ...],
    max_response_tokens: int,
    licence: str = Domain.licence,
    source: str = Domain.source,
) -> Callable[[Callable[[int, np.random.Generator], Draft]], Domain]:
    """Decorator that makes a registered Domain of a ``make`` function; the arguments are Domain's attributes."""

    def enter(make: Callable[[int, np.random.Generator], Draft]) -> Domain:
        return DOMAINS.register(name)(
            Domain(
                name=name,
                description=description,
                num_levels=num_levels,
                make=make,
                verifiers=verifiers,
                max_response_tokens=max_response_tokens,
                licence=licence,
                source=source,
            )
        )

    return enter


def expand_domains(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names of domains, prefixes (``arithmetic``) and groups (``math``) as the names of domains, each once, in order.

    Raises:
      ValueError: a name is unknown, or there is none.
    """
    requested = [names] if isinstance(names, str) else list(names)
    found: dict[str, None] = {}
    for name in requested:
        if name in GROUPS:
            found.update(dict.fromkeys(expand_domains(GROUPS[name])))
        elif name in DOMAINS.prefixes():
            found.update(dict.fromkeys(n for n in DOMAINS if n.startswith(name + "/")))
        else:
            found[DOMAINS.get(name).name] = None
    if not found:
        raise ValueError(
            "the set of domains is empty; expected at least one domain or group, such as "
            f"{', '.join([*DOMAINS.prefixes(), *GROUPS])}"
        )
    return tuple(found)
