"""``json_schema``: the response is JSON that a JSON Schema accepts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from rlvr_jax.rewards.extraction import fenced_blocks
from rlvr_jax.rewards.registry import VERIFIERS, require_extra
from rlvr_jax.types import Task

_MISSING = object()


@VERIFIERS.register("json_schema")
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonSchema:
    """1.0 if the response's JSON is valid, else 0.0.

    The JSON is the stripped response, or else the content of its last complete code fence. It is read strictly: a
    duplicate key, NaN and Infinity make it invalid. References to other documents are never fetched.

    Attributes:
      schema: the schema (draft 2020-12 unless it says otherwise); None takes ``task.metadata["schema"]``.

    Raises:
      ValueError, jsonschema.SchemaError: there is no schema, or it is not one.
      MissingExtraError: jsonschema is not installed.
    """

    name = "json_schema"
    schema: Mapping[str, Any] | bool | None = None

    def __post_init__(self) -> None:
        require_extra("jsonschema", "json")

    def warm(self) -> None:
        import jsonschema  # noqa: F401

    def __call__(self, task: Task, response: str) -> float:
        from jsonschema.validators import validator_for
        from referencing import Registry

        schema = task.metadata.get("schema") if self.schema is None else self.schema
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError(
                f"task {task.key} has no JSON schema; give schema=, or metadata['schema']"
            )
        schema: Any = dict(schema) if isinstance(schema, Mapping) else schema
        validator_class = validator_for(schema, default=validator_for({}))
        validator_class.check_schema(schema)
        value = read_json(response)
        if value is _MISSING:
            return 0.0
        validator = validator_class(
            schema, registry=Registry(), format_checker=validator_class.FORMAT_CHECKER
        )
        try:
            return float(validator.is_valid(value))
        except RecursionError:  # nested deeper than the schema can be followed
            return 0.0


def read_json(response: str) -> Any:
    """Returns the response's JSON value, or ``_MISSING`` when it has none that is strict JSON."""
    candidates = [response.strip(), *fenced_blocks(response)[-1:]]
    for candidate in candidates:
        try:
            return json.loads(
                candidate, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
            )
        except (ValueError, RecursionError):
            continue
    return _MISSING


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return value
