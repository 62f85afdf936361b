"""Exceptions whose message is for the user: what, got, expected, what to do. And the check for an optional package.

Failures of the outside world (a verifier that raises or hangs) are no exceptions: they are a status on the reward.
"""

from __future__ import annotations

import importlib
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


class ProcessError(RuntimeError):
    """Another process of the run was lost, or is not where this one is."""


class Preempted(Exception):
    """The run was told to make room, and has saved what it needs to go on: no failure. The message says up to where."""


def require(module: str, extra: str) -> ModuleType:
    """Imports ``module``, or raises ``MissingExtraError`` naming the extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module} is not installed ({error}); install it with: pip install 'rlvr_jax[{extra}]'"
        ) from error
