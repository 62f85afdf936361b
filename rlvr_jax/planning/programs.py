"""The real step functions of a config, traced for a mesh from shapes alone: rollout, reference, update, or all fused.

Nothing is computed and no weight exists; arguments are ShapeDtypeStructs with the shardings a run would have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from ml_collections import ConfigDict

from rlvr_jax.distributed.mesh import make_mesh, num_column_shards, num_row_shards
from rlvr_jax.distributed.sharding import batch_sharding
from rlvr_jax.models.adapters import AdapterConfig, adapter_config
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params
from rlvr_jax.models.frozen import abstract_base
from rlvr_jax.models.peft import check_layout
from rlvr_jax.planning.work import Work, measure_work
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.training.fused import make_fused_step
from rlvr_jax.training.lean import HOST_MEMORY
from rlvr_jax.training.rl import (
    check_settings,
    sampling_params,
    step_config,
    uses_reference,
)
from rlvr_jax.training.router import check_router
from rlvr_jax.training.state import (
    abstract_state,
    make_optimizer,
    optimizer_config,
    state_shardings,
)
from rlvr_jax.training.step import Learner, Minibatch, make_learner, policy_params
from rlvr_jax.types import SamplingParams, TrainState

PHASES = ("rollout", "reference", "update")
FUSED = "fused"  # all of them as one program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """A config's programs on a mesh. ``trace`` gives one of them.

    Attributes:
      state: the train state as ShapeDtypeStructs.
      frozen: the parameters that stay as they were, reference and base of adapters alike; None where there are none.
      phases: those of ``PHASES`` that the config runs, or ``FUSED``.
    """

    config: ConfigDict
    model: ModelConfig
    learner: Learner
    state: TrainState
    frozen: Params | None
    sampling: SamplingParams
    work: Work
    phases: tuple[str, ...]

    @property
    def base(self) -> Params | None:
        """The parameters beside which adapters are trained."""
        return None if self.learner.config.adapter is None else self.frozen

    @property
    def policy(self) -> Params:
        """What is sampled from."""
        return policy_params(self.state.params, self.base, self.learner.config.adapter)

    def trace(self, phase: str) -> jax.stages.Traced:
        """A phase: its ``jaxpr``, and ``lower()``."""
        learner, work = self.learner, self.work
        of_batch = batch_sharding(learner.mesh)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_batch), work.batch
        )
        minibatch = Minibatch(batch, work.bounds, work.num_samples)
        if phase == "update":
            return learner.trace_update(self.state, minibatch, self.base)
        if phase == "reference":
            return learner.trace_reference(minibatch, self.frozen)
        if phase == FUSED:
            return self._trace_fused()
        engine = Engine(
            self.model,
            self.policy,
            mesh=learner.mesh,
            dtype=learner.config.dtype,
            record_experts=self.config.rollout.router_replay,
        )
        return engine.trace(
            work.prompt_rows,
            work.prompt_width,
            params=self.sampling,
            num_samples=work.group_size,
        )

    def _trace_fused(self) -> jax.stages.Traced:
        """Of the fused schedule; nobody is there to judge, and nothing asks."""
        absent: Any = None
        config = self.config
        step = make_fused_step(
            self.learner,
            tokenizer=absent,
            chat=absent,
            judge=absent,
            params=self.sampling,
            group_size=self.work.group_size,
            overlong_buffer=config.algorithm.overlong_buffer,
            mask_truncated=config.algorithm.mask_truncated,
            record_experts=config.rollout.router_replay,
            deadline_s=1.0,
        )
        reference = self.frozen if uses_reference(config) else None
        return step.trace(
            self.state,
            reference,
            config.tasks.tasks_per_step,
            self.work.prompt_width,
            base=self.base,
        )

    def resident_bytes(self, phase: str) -> int:
        """Bytes that lie on a device during a phase without being its arguments: moments, reference, policy."""
        arguments = {
            "rollout": self.policy,
            "reference": self.frozen,
            "update": (self.state, self.base),
            FUSED: (self.state, self.frozen),
        }[phase]
        return local_bytes((self.state, self.frozen)) - local_bytes(arguments)


def make_programs(
    config: ConfigDict,
    model: ModelConfig,
    devices: Any,
    *,
    prompt_tokens: int,
    on_cpu: bool,
    stop_token_ids: tuple[int, ...] = (0,),
) -> Programs:
    """The programs that ``training.rl.train`` would run with this config on these devices.

    Args:
      devices: real ones, a topology's, or stand-ins for them.
      on_cpu: whether the run itself is on CPU devices.
      stop_token_ids: of the tokenizer; their number is some bytes of the rollout.

    Raises:
      ConfigError, ValueError: what the trainer itself would refuse: sizes that do not divide, unknown settings.
    """
    mesh = make_mesh(**config.mesh, devices=devices)
    shards = num_row_shards(mesh)
    check_settings(config, shards)
    check_model(config, model)
    updates = config.train.num_epochs * config.train.num_minibatches
    optimizer = make_optimizer(optimizer_config(config, num_steps=config.num_steps * updates))
    sampling = sampling_params(config, stop_token_ids)
    step = step_config(config, sampling)
    learner = make_learner(
        model, optimizer, mesh, state_shardings(model, optimizer, mesh, step.adapter), step
    )
    frozen = None
    if step.adapter is not None or step.use_reference:
        frozen = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract_frozen(model, step.adapter, config.param_dtype),
            learner.base_shardings,
        )
    phases = tuple(p for p in PHASES if p != "reference" or step.use_reference)
    return Programs(
        config=config,
        model=model,
        learner=learner,
        state=abstract_state(model, optimizer, mesh, step.adapter),
        frozen=frozen,
        sampling=sampling,
        work=measure_work(
            config,
            model,
            prompt_tokens=prompt_tokens,
            num_shards=shards,
            num_column_shards=num_column_shards(mesh),
            on_cpu=on_cpu,
        ),
        phases=(FUSED,) if config.schedule == "fused" else phases,
    )


def check_model(config: ConfigDict, model: ModelConfig) -> None:
    """Raises ConfigError or ValueError for settings that the trainer refuses for this model."""
    check_router(model, "algorithm.router_aux_loss_coef", config.algorithm.router_aux_loss_coef)
    check_router(model, "rollout.router_replay", config.rollout.router_replay)
    adapter = adapter_config(**config.adapter)
    if adapter is not None:
        check_layout(adapter, model)


def abstract_frozen(model: ModelConfig, adapter: AdapterConfig | None, param_dtype: str) -> Params:
    """Shapes and dtypes of the reference, or of the base of adapters."""
    quantization = None if adapter is None else adapter.quantization
    shapes = abstract_base(model, quantization)
    if quantization is not None:
        return shapes
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, param_dtype), shapes)


def local_bytes(tree: Any) -> int:
    """Bytes of ShapeDtypeStructs with shardings on one device; what waits on the host is not there."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )
