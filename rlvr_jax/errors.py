"""What goes wrong, in two kinds.

Errors of ours, and misuse, raise (``ValueError``/``TypeError``/``ConfigError``: what, got, expected, what to do).
Failures of the outside world (a sandbox, a tool, a judge) become values on the trajectory through ``boundary``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator
from types import ModuleType


class ConfigError(ValueError):
    """A setting that cannot work. The message says what it is, what was expected, and which key to change."""


class MissingExtraError(ImportError):
    """An optional package is absent. The message names the extra that brings it."""


class WeightsError(ValueError):
    """Weights or a tokenizer that are missing, damaged, or of another model."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read."""


class MismatchError(RuntimeError):
    """Sampler and trainer disagree on log-probabilities past the configured bound."""


class OutsideError(Exception):
    """A failure of the outside world; ``boundary`` turns it into a value."""


@dataclasses.dataclass
class Outcome:
    """What ``boundary`` caught: ``error`` is None when all went well."""

    error: str | None = None


@contextlib.contextmanager
def boundary(*kinds: type[BaseException]) -> Iterator[Outcome]:
    """Turns failures of the outside world inside the block into ``outcome.error``.

    Catches ``OutsideError``, ``TimeoutError`` and ``kinds``; anything else is a bug of ours and propagates.
    """
    outcome = Outcome()
    try:
        yield outcome
    except (OutsideError, TimeoutError, *kinds) as error:
        outcome.error = f"{type(error).__name__}: {error}"


def require(module: str, extra: str) -> ModuleType:
    """Imports ``module``, or raises ``MissingExtraError`` naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed ({error}); install it with: pip install 'rlvr_jax[{extra}]'"
        ) from error
