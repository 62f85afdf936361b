"""The optimizer updates of supervised fine-tuning and of reinforcement learning, on batches of made-up tokens.

The programs are the trainers' own: ``training.sft.make_train_step`` and ``training.step.make_learner``. An ``Update``
is one of them on a batch that lies on the devices already; ``run`` waits until the new state is there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.measure import Program, count_flops, forward_flops
from benchmarks.work import Shape
from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.data.packing import pack_groups, packing_stats
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.training.sft import make_train_step, negative_log_likelihood, place_batch
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import Learner, StepConfig, make_learner
from rlvr_jax.types import Group, Reward, SamplingParams, Task, TrainBatch, TrainState, Trajectory

LEARNING_RATE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Programs:
    """How the updates are compiled.

    Attributes:
      dtype: of activations; parameters and optimizer are float32.
      remat, micro_rows: what the backward pass keeps, and rows whose gradient is computed at once; 0 for all.
      seed: of weights and tokens.
    """

    model: ModelConfig
    mesh: jax.sharding.Mesh
    dtype: str
    remat: str
    micro_rows: int
    seed: int

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return make_optimizer(OptimizerConfig(learning_rate=LEARNING_RATE, num_steps=10**6))

    @functools.cached_property
    def shardings(self) -> TrainState:
        return state_shardings(self.model, self.optimizer, self.mesh)

    def params(self) -> Any:
        """Random parameters, NumPy: those that ``peers.run.write_weights`` gives to the peers."""
        return jax.tree.map(np.array, init_params(self.model, jax.random.key(self.seed)))

    def state(self, params: Any) -> TrainState:
        return init_state(self.model, params, self.optimizer, self.mesh, seed=self.seed)

    def learner(self, sampling: SamplingParams) -> Learner:
        """The trainer's programs for GRPO with a KL to a reference in the loss."""
        return make_learner(
            self.model,
            self.optimizer,
            self.mesh,
            self.shardings,
            StepConfig(
                objective=ObjectiveConfig(kl_loss_coef=0.04),
                transform=LogitTransform.of(sampling),
                dtype=self.dtype,
                remat=self.remat,
                micro_rows=self.micro_rows,
            ),
        )

    def fine_tuning(self) -> Callable[..., Any]:
        """The trainer's program for fine-tuning."""
        loss = functools.partial(
            negative_log_likelihood, model=self.model, dtype=self.dtype, remat=self.remat
        )
        return make_train_step(loss, self.model, self.optimizer, self.mesh, self.shardings)


class Update:
    """A state and the program that moves it on.

    Attributes:
      name: of the kind of update.
      tokens: of all sequences of the batch, each with its prompt: what a trainer computes that shares nothing.
      flops: that the work needs; see ``measure.Flops``.
      fill: share of the batch that is not padding.
      program: what runs.
      arguments: what it is given beside the state.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        state: TrainState,
        arguments: tuple[Any, ...],
        *,
        tokens: int,
        flops: float,
        fill: float,
        mesh: jax.sharding.Mesh,
        **static: Any,
    ) -> None:
        self.name, self.tokens, self.flops, self.fill = name, tokens, flops, fill
        self.program = program
        self.arguments, self._state, self._static, self._mesh = arguments, state, static, mesh

    def run(self) -> None:
        """One update, waited for. Raises RuntimeError when it changed nothing."""
        with jax.set_mesh(self._mesh):
            self._state, metrics = self.program(self._state, *self.arguments, **self._static)
        if jax.device_get(metrics)["update_skipped"]:
            raise RuntimeError("the update was skipped: it is not the work that is measured")
        jax.block_until_ready(self._state)


def sft_update(programs: Programs, *, rows: int, length: int) -> Update:
    """Fine-tuning on ``rows`` sequences of ``length`` tokens, all of them trained on but the first of each."""
    model, mesh = programs.model, programs.mesh
    batch = sequences(model.vocab_size, rows, length, programs.seed)
    pieces = place(programs, batch)
    pairs = rows * length * (length + 1) / 2
    return Update(
        "sft",
        Program(programs.fine_tuning(), mesh),
        programs.state(programs.params()),
        (pieces, None),
        tokens=rows * length,
        flops=3
        * forward_flops(model, tokens=rows * length, targets=rows * (length - 1), pairs=pairs),
        fill=packing_stats(batch)["fill"],
        mesh=mesh,
    )


def rl_update(programs: Programs, shape: Shape, *, samples_per_row: int) -> Update:
    """GRPO with a KL to a reference, whose log-probabilities are there already; prompts shared in rows."""
    model, mesh = programs.model, programs.mesh
    learner = programs.learner(SamplingParams(max_tokens=shape.new_tokens, seed=programs.seed))
    params = programs.params()
    scores = np.where(np.arange(shape.sequences) % 2, 1.0, -1.0).reshape(shape.prompts, shape.group)
    batch = pack_groups(
        made_up_groups(model.vocab_size, shape, programs.seed),
        list(scores),
        length=key_bucket(shape.prompt_len + samples_per_row * shape.new_tokens),
        row_multiple=programs.micro_rows or learner.num_shards,
        min_rows=learner.min_rows,
    )
    minibatch = learner.prepare(batch, learner.place(params), scores=scores, kl_coef=0.0)
    return Update(
        "rl",
        Program(learner._update, mesh),
        programs.state(params),
        (minibatch.batch, None),
        tokens=shape.sequence_tokens,
        flops=count_flops(model, shape).update,
        fill=packing_stats(batch)["fill"],
        mesh=mesh,
        bounds=minibatch.bounds,
        num_samples=minibatch.num_samples,
    )


def place(programs: Programs, batch: TrainBatch) -> TrainBatch:
    """A batch [B, T] on the devices, in micro-batches."""
    rows = batch.tokens.shape[0]
    pieces = rows // (programs.micro_rows or rows)
    return place_batch(batch, mesh=programs.mesh, num_pieces=pieces)


def sequences(vocab_size: int, rows: int, length: int, seed: int) -> TrainBatch:
    """A batch of random sequences, one a row and as long as it: NumPy arrays [rows, length]."""
    shape = (rows, length)
    columns = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    trained = (columns > 0).astype(np.float32)
    zeros = np.zeros(shape, np.float32)
    tokens = np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)
    fields: dict[str, Any] = {
        "tokens": tokens,
        "positions": columns.copy(),
        "segment_ids": np.ones(shape, np.int32),
        "prefix_ids": np.zeros(shape, np.int32),
        "parents": columns - 1,
        "sample_ids": np.repeat(np.arange(rows, dtype=np.int32)[:, None], length, 1),
        "loss_mask": trained,
        "advantages": trained,
        "behavior_logprobs": zeros,
        "ref_logprobs": zeros,
    }
    return TrainBatch(**fields)


def made_up_groups(vocab_size: int, shape: Shape, seed: int) -> list[Group]:
    """P groups of G random answers of fixed length, with log-probabilities of the uniform policy."""
    rng = np.random.default_rng(seed)
    mask = np.arange(shape.prompt_len + shape.new_tokens) >= shape.prompt_len
    groups = []
    for index in range(shape.prompts):
        prompt = rng.integers(0, vocab_size, shape.prompt_len)
        samples = rng.integers(0, vocab_size, (shape.group, shape.new_tokens))
        trajectories = tuple(
            Trajectory(
                tokens=np.concatenate([prompt, tokens]).astype(np.int32),
                response_mask=mask,
                logprobs=np.where(mask, -np.log(vocab_size), 0.0).astype(np.float32),
                turn_starts=(shape.prompt_len,),
                rewards=(Reward(name="made up", value=0.0),),
                stop_reason="length",
                policy_version=(0, 0),
                sample_index=sample,
            )
            for sample, tokens in enumerate(samples)
        )
        task = Task(id=str(index), domain="benchmark", prompt=(), answer=None)
        groups.append(Group(task=task, trajectories=trajectories, step=0))
    return groups
