"""Names to things: domains, verifiers, advantage estimators, model families.

Registering a name twice raises; asking for an unknown one lists the known ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping that can only grow.

    Args:
      kind: what the entries are, in the singular, for messages ("domain", "verifier").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that enters the decorated thing under ``name``; raises ValueError if the name is taken."""

        def enter(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice; choose another name")
            self._entries[name] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        """Returns the entry; raises ValueError with the nearest and all known names if there is none."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            known = ", ".join(sorted(self._entries))
            raise ValueError(f"unknown {self.kind} {name!r}; {hint}known: {known}")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
