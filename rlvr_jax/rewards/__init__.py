"""Rewards: verifiers, and the pool of killable worker processes that runs them.

Importing this enters every verifier in ``VERIFIERS``; what a verifier needs beyond numpy is imported when it runs.
"""

from rlvr_jax.rewards import (
    exact,
    format,
    json_schema,
    maths,
    numeric,
    reasoning_gym,
    regex,
    similarity,
)
from rlvr_jax.rewards.pool import VerifierPool
from rlvr_jax.rewards.registry import VERIFIERS, VerifierSpec

__all__ = [
    "VERIFIERS",
    "VerifierPool",
    "VerifierSpec",
    "exact",
    "format",
    "json_schema",
    "maths",
    "numeric",
    "reasoning_gym",
    "regex",
    "similarity",
]
