"""Names to verifiers, and the order for one: ``VerifierSpec``.

A verifier is a frozen, picklable dataclass whose fields are its parameters and whose call judges one response. It is
built and checked where it is ordered (a wrong parameter raises there), and run in a worker process (``pool.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from rlvr_jax.errors import MissingExtraError
from rlvr_jax.registry import Registry
from rlvr_jax.types import Task

VerifierFn = Callable[[Task, str], float]

VERIFIERS: Registry[Callable[..., VerifierFn]] = Registry("verifier")


@dataclasses.dataclass(frozen=True)
class VerifierSpec:
    """Which verifier to run, with what parameters, and how much its verdict weighs.

    Attributes:
      name: a registered name, or any picklable callable ``(task, response, **params) -> float``.
      weight: of the verdict in ``Trajectory.score``.
      params: keyword arguments: fields of the registered verifier, or of the call when ``name`` is a callable.
    """

    name: str | VerifierFn
    weight: float = 1.0
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) or callable(self.name)):
            raise TypeError(
                f"VerifierSpec.name is {self.name!r}; expected a registered name"
                f" ({', '.join(VERIFIERS)}) or a callable"
            )
        if not math.isfinite(self.weight):
            raise ValueError(f"VerifierSpec.weight is {self.weight!r}; expected a finite number")

    @property
    def label(self) -> str:
        """The name under which the verdict is reported."""
        if isinstance(self.name, str):
            return self.name
        own = getattr(self.name, "name", None) or getattr(self.name, "__name__", None)
        return own if isinstance(own, str) else type(self.name).__name__

    def build(self) -> VerifierFn:
        """Returns the verifier; raises ValueError or TypeError for an unknown name or parameter."""
        if not isinstance(self.name, str):
            return functools.partial(self.name, **self.params) if self.params else self.name
        try:
            return VERIFIERS.get(self.name)(**self.params)
        except TypeError as error:
            raise TypeError(
                f"verifier {self.name!r} with params {dict(self.params)!r}: {error}"
            ) from error

    def serialised(self) -> bytes:
        """The built verifier as a pickle; raises TypeError, saying what to do, when it cannot be sent to a worker."""
        verifier = self.build()
        home = self.name if hasattr(self.name, "__qualname__") else type(self.name)
        if getattr(home, "__module__", None) == "__main__":
            raise TypeError(
                f"verifier {self.label!r} is defined in the script or notebook that runs (__main__), which worker"
                " processes do not run again; move it into a module that can be imported"
            )
        try:
            return pickle.dumps(verifier, protocol=pickle.HIGHEST_PROTOCOL)
        except (
            Exception
        ) as error:  # pickling runs arbitrary __reduce__ code: any exception means "not picklable"
            raise TypeError(
                f"verifier {self.label!r} cannot be sent to a worker process ({type(error).__name__}: {error});"
                " use a function or a dataclass defined at the top level of a module, not a lambda or a closure"
            ) from error


def require_extra(module: str, extra: str) -> None:
    """Raises MissingExtraError if ``module`` is absent, without importing it (that is the worker's work)."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"{module} is not installed; install it with: pip install 'rlvr_jax[{extra}]'"
        )


def accepted_answers(task: Task) -> list[str | int | float]:
    """The gold answers of a task as a list (a list or tuple means *any of these*).

    Raises TypeError when there is none, or when one is not a string or a number: such a task cannot be judged.
    """
    answers = list(task.answer) if isinstance(task.answer, (list, tuple)) else [task.answer]
    wrong = [a for a in answers if isinstance(a, bool) or not isinstance(a, (str, int, float))]
    if wrong or not answers:
        raise TypeError(
            f"task {task.key} has the answer {task.answer!r}; expected a string, a number, or a list of them"
        )
    return answers
