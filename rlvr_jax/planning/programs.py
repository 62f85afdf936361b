"""The real step functions of a config, traced for a mesh from shapes alone: rollout, reference, update.

Nothing is computed and no weight exists; arguments are ShapeDtypeStructs with the shardings a run would have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from rlvr_jax.distributed.mesh import make_mesh, num_column_shards, num_row_shards
from rlvr_jax.distributed.sharding import batch_sharding, replicated, sampler_sharding
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.planning.work import Work, measure_work
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.training.rl import (
    check_settings,
    sampling_params,
    step_config,
    uses_reference,
)
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_state,
    make_optimizer,
    state_shardings,
)
from rlvr_jax.training.step import Learner, make_learner

PHASES = ("rollout", "reference", "update")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """A config's programs on a mesh. ``trace`` gives one of them.

    Attributes:
      state: the train state as ShapeDtypeStructs.
      phases: those of ``PHASES`` that the config runs.
    """

    model: ModelConfig
    mesh: jax.sharding.Mesh
    learner: Learner
    state: Any
    sampling: Any
    work: Work
    phases: tuple[str, ...]

    def trace(self, phase: str) -> Any:
        """``jax.stages.Traced`` of a phase: its ``jaxpr``, and ``lower()``."""
        rows, whole, work = sampler_sharding(self.mesh), replicated(self.mesh), self.work
        learner, params = self.learner, self.state.params
        of_batch = batch_sharding(self.mesh)
        batch = jax.tree.map(lambda x: _struct(x.shape, x.dtype, of_batch), work.batch)
        with jax.set_mesh(self.mesh):
            if phase == "update":
                return learner._update.trace(  # pyright: ignore[reportFunctionMemberAccess]
                    self.state,
                    batch,
                    bounds=work.bounds,
                    num_samples=work.num_samples,
                )
            if phase == "reference":
                return learner._with_reference.trace(  # pyright: ignore[reportFunctionMemberAccess]
                    batch, params, bounds=work.bounds
                )
            engine = Engine(self.model, params, mesh=self.mesh, dtype=learner.config.dtype)
            P, S = work.prompt_rows, work.prompt_width
            return engine._generate.trace(
                params,
                _struct((P, S), jnp.int32, rows),
                _struct((P,), jnp.int32, rows),
                _struct((P,), jnp.uint32, rows),
                _struct((), jnp.uint32, whole),
                num_samples=work.group_size,
                max_tokens=work.max_tokens,
                transform=LogitTransform.of(self.sampling),
                stop_token_ids=self.sampling.stop_token_ids,
            )

    def resident_bytes(self, phase: str) -> int:
        """Bytes that lie on a device during a phase without being its arguments: moments, reference, policy."""
        policy, state = local_bytes(self.state.params), local_bytes(self.state)
        reference = policy if "reference" in self.phases else 0
        return {
            "rollout": state - policy + reference,
            "reference": state,
            "update": reference,
        }[phase]


def make_programs(
    config: ConfigDict,
    model: ModelConfig,
    devices: Any,
    *,
    prompt_tokens: int,
    on_cpu: bool,
) -> Programs:
    """The programs that ``training.rl.train`` would run with this config on these devices.

    Args:
      devices: real ones, a topology's, or stand-ins for them.
      on_cpu: whether the run itself is on CPU devices.

    Raises:
      ConfigError, ValueError: what the trainer itself would refuse: sizes that do not divide, unknown settings.
    """
    mesh = make_mesh(**config.mesh, devices=devices)
    shards = num_row_shards(mesh)
    check_settings(config, shards)
    updates = config.train.num_epochs * config.train.num_minibatches
    optimizer = make_optimizer(
        OptimizerConfig(num_steps=config.num_steps * updates, **config.optimizer)
    )
    sampling = sampling_params(
        config, (0,)
    )  # which ids end a response changes nothing that is planned
    learner = make_learner(
        model,
        optimizer,
        mesh,
        state_shardings(model, optimizer, mesh),
        step_config(config, sampling),
    )
    return Programs(
        model=model,
        mesh=mesh,
        learner=learner,
        state=abstract_state(model, optimizer, mesh),
        sampling=sampling,
        work=measure_work(
            config,
            prompt_tokens=prompt_tokens,
            num_shards=shards,
            num_column_shards=num_column_shards(mesh),
            on_cpu=on_cpu,
        ),
        phases=tuple(p for p in PHASES if p != "reference" or uses_reference(config)),
    )


def local_bytes(tree: Any) -> int:
    """Bytes of ShapeDtypeStructs with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _struct(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
