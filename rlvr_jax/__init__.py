"""Reinforcement learning with verifiable rewards for language models, in JAX: ``import rlvr_jax as rl``.

The nouns and verbs of the field, each imported when it is first used: importing this alone loads nothing heavy.

    policy = rl.load_policy("smollm2-135m-instruct", mesh=rl.make_mesh())
    reference = policy.freeze()
    optimizer = rl.Optimizer(policy, learning_rate=1e-5)
    verifier = rl.DomainVerifier()
    for batch in rl.task_sampler(domains=["math", "text"], difficulty="adaptive"):
        responses = policy.generate(batch.prompts, temperature=0.7)
        rewards = verifier.score(batch, responses)
        loss = rl.ppo_objective(policy, responses, rewards, ref_model=reference, kl_coef=0.05)
        optimizer.step(loss)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what the names are; _HOMES says where they are found when the program runs
    from rlvr_jax.data.loader import load_tasks
    from rlvr_jax.distributed.mesh import make_mesh
    from rlvr_jax.evaluation.runner import Evaluation, evaluate
    from rlvr_jax.rewards import VERIFIERS, VerifierPool, VerifierSpec
    from rlvr_jax.tasks import (
        DOMAINS,
        Curriculum,
        Draft,
        TaskBatch,
        VerifierUse,
        ask,
        domain,
        held_out_tasks,
        task_sampler,
    )
    from rlvr_jax.training.canonical import Loss, Optimizer, ppo_objective
    from rlvr_jax.training.policy import Policy, Responses, load_policy
    from rlvr_jax.training.rl import train
    from rlvr_jax.training.scoring import DomainVerifier, Rewards
    from rlvr_jax.trajectories.store import ParquetStore
    from rlvr_jax.types import (
        Completion,
        Group,
        Message,
        Reward,
        SamplingParams,
        Task,
        Trajectory,
    )

_HOMES = {
    "data.loader": ("load_tasks",),
    "distributed.mesh": ("make_mesh",),
    "evaluation.runner": ("Evaluation", "evaluate"),
    "rewards": ("VERIFIERS", "VerifierPool", "VerifierSpec"),
    "tasks": (
        "DOMAINS",
        "Curriculum",
        "Draft",
        "TaskBatch",
        "VerifierUse",
        "ask",
        "domain",
        "held_out_tasks",
        "task_sampler",
    ),
    "training.canonical": ("Loss", "Optimizer", "ppo_objective"),
    "training.policy": ("Policy", "Responses", "load_policy"),
    "training.rl": ("train",),
    "training.scoring": ("DomainVerifier", "Rewards"),
    "trajectories.store": ("ParquetStore",),
    "types": (
        "Completion",
        "Group",
        "Message",
        "Reward",
        "SamplingParams",
        "Task",
        "Trajectory",
    ),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "DOMAINS",
    "VERIFIERS",
    "Completion",
    "Curriculum",
    "DomainVerifier",
    "Draft",
    "Evaluation",
    "Group",
    "Loss",
    "Message",
    "Optimizer",
    "ParquetStore",
    "Policy",
    "Responses",
    "Reward",
    "Rewards",
    "SamplingParams",
    "Task",
    "TaskBatch",
    "Trajectory",
    "VerifierPool",
    "VerifierSpec",
    "VerifierUse",
    "ask",
    "domain",
    "evaluate",
    "held_out_tasks",
    "load_policy",
    "load_tasks",
    "make_mesh",
    "ppo_objective",
    "task_sampler",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version(__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
