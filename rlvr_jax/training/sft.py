"""Supervised fine-tuning on conversations: one straight line from files to weights that RL can start from.

The loss is the negative log-likelihood of the assistant's tokens, averaged over all trained tokens of a batch, through
the forward pass, the optimizer and the checkpoints of ``training/rl.py``. A run leaves in its folder ``metrics.jsonl``,
``checkpoints/``, ``summary.json`` and ``model/``, a Hugging Face directory that ``load_pretrained`` takes; if it
trained adapters, they are merged in there, and alone in ``adapter/``. Running it again resumes: a run that was killed
ends in the same parameters, bit for bit, as one that was not.
"""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from rlvr_jax.algorithms.aggregation import loss_weights
from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.data.loader import ChatDataset, chat_dataset
from rlvr_jax.data.sources import Source, open_source, split_source
from rlvr_jax.distributed.mesh import make_mesh, num_row_shards
from rlvr_jax.distributed.placement import put
from rlvr_jax.distributed.processes import PreemptionNotice, is_first, on_first
from rlvr_jax.distributed.sharding import replicated, row_sharding, spec
from rlvr_jax.errors import ConfigError
from rlvr_jax.metrics import MetricsLogger
from rlvr_jax.models.adapters import AdapterConfig, adapter_config, checksum, merge_adapters
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import REMAT_POLICIES, Params, compiler_options
from rlvr_jax.models.moe import Load
from rlvr_jax.models.peft import check_layout, save_adapters
from rlvr_jax.models.policy_head import LogitTransform, RowBounds, replayed_logprobs
from rlvr_jax.models.weights import save_weights
from rlvr_jax.training.lean import AnyOptimizer, check_host_memory
from rlvr_jax.training.policy import check_base, load_pretrained
from rlvr_jax.training.router import (
    add_router_loss,
    check_router,
    router_metrics,
    whole_load,
)
from rlvr_jax.training.state import (
    abstract_state,
    check_param_dtype,
    init_state,
    learning_rate_schedule,
    make_optimizer,
    model_shardings,
    optimizer_config,
    state_shardings,
)
from rlvr_jax.training.step import Metrics, check_columns, gradient_step, policy_params
from rlvr_jax.training.workdir import open_workdir, preempted
from rlvr_jax.types import TrainBatch, TrainState

SAVE_DEADLINE_S = 4 * 3600.0  # for process 0 to write the model, while the others wait
# (params, batch [B, T]) -> (float32[B, T], nats, 0 where nothing is trained; the load of the experts, if there are any)
Loss = Callable[[Params, TrainBatch], tuple[jax.Array, Load | None]]

COLUMNS = {
    "loss": "loss",
    "eval/loss": "eval loss",
    "grad_norm": "grad norm",
    "perf/tokens_per_s": "tok/s",
}


def train(config: ConfigDict, workdir: str | Path, *, fresh: bool = False) -> dict[str, Any]:
    """Fine-tunes ``config.model`` on ``config.data``.

    Args:
      config: as ``configs/sft_chat.py``.
      workdir: gets checkpoints, metrics, the model. What is there is resumed.
      fresh: start over.

    Returns:
      The summary, also in ``summary.json``: ``eval_loss_before`` and ``eval_loss_after`` (nats a token over the
      held-out conversations; None when none are held out), ``steps``, ``seconds`` (of all runs of this folder),
      ``seed``, ``device``, ``data`` (how many conversations were read, truncated and dropped).

    Raises:
      ConfigError, ValueError: a setting or a record that cannot work.
      WeightsError: no such model.
      CheckpointError: a checkpoint could not be written; the one before is intact.
      Preempted: SIGTERM came; the run was saved after the step at hand.
      ProcessError: another process of the run was lost.
    """
    clock = time.perf_counter()

    # The model, on its mesh.
    mesh = make_mesh(**config.mesh)
    adapter = adapter_config(**config.adapter)
    quantization = None if adapter is None else adapter.quantization
    check_param_dtype(config.param_dtype, adapter)
    pretrained = load_pretrained(
        config.model, mesh=mesh, quantization=quantization, param_dtype=config.param_dtype
    )
    model, tokenizer = pretrained.config, pretrained.tokenizer
    optimized = optimizer_config(config, num_steps=config.num_steps)
    learning_rate = learning_rate_schedule(optimized)
    optimizer = make_optimizer(optimized)
    if adapter is not None:
        check_layout(adapter, model)
    shardings = state_shardings(model, optimizer, mesh, adapter)
    _check_settings(config, model, num_row_shards(mesh))
    check_columns(config.train.row_length, mesh)
    check_router(model, "train.router_aux_loss_coef", config.train.router_aux_loss_coef)
    _check_row_shards(mesh)
    if config.train.remat == "offload":
        check_host_memory(mesh, "train.remat")

    # What it learns from, and what it is judged on.
    sources = [open_source(source) for source in config.data.sources]
    held_out: list[Source] = []
    if config.data.held_out:
        # The split does not follow config.seed: no seed may train on what another holds out.
        pairs = [split_source(source, config.data.held_out, seed=0) for source in sources]
        sources, held_out = [kept for kept, _ in pairs], [rest for _, rest in pairs]
    read = functools.partial(
        chat_dataset,
        render=pretrained.chat.render_with_mask,
        length=config.train.row_length,
        batch_size=config.train.batch_rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    data = read(
        sources,
        seed=config.seed,
        weights=config.data.weights or None,
        num_epochs=config.data.num_epochs or None,
    )

    # What is computed.
    loss = functools.partial(
        negative_log_likelihood, model=model, dtype=config.dtype, remat=config.train.remat
    )
    train_step = make_train_step(
        loss,
        model,
        optimizer,
        mesh,
        shardings,
        adapter=adapter,
        router_aux_loss_coef=config.train.router_aux_loss_coef,
    )
    eval_step = jax.jit(
        functools.partial(sum_and_count, loss=loss),
        out_shardings=replicated(mesh),
        compiler_options=compiler_options(mesh),
    )
    micro_rows = config.train.micro_rows or config.train.batch_rows
    place = functools.partial(
        place_batch, mesh=mesh, num_pieces=config.train.batch_rows // micro_rows
    )

    def evaluate(params: Params) -> dict[str, float]:
        """Loss over the held-out conversations, nats a token; nothing when none are held out."""
        if not held_out:
            return {}
        sums = [eval_step(params, place(batch)) for batch in read(held_out, seed=0, num_epochs=1)]
        total, count = np.sum(jax.device_get(sums), axis=0)
        return {"eval/loss": float(total / count)}

    for part in filter(None, (sources, held_out)):
        next(read(part, seed=config.seed, num_epochs=1), None)  # raises as the first step would
    folder = open_workdir(workdir, config, fresh=fresh)  # nothing is wrong with the settings
    with (
        jax.set_mesh(mesh),
        Checkpointer(folder / "checkpoints", keep=config.checkpoint.keep) as checkpointer,
        MetricsLogger(
            folder if is_first() else None,
            total_steps=config.num_steps,
            console=is_first(),
            columns=COLUMNS,
        ) as logger,
        PreemptionNotice() as notice,
    ):
        # Where it starts: the newest checkpoint, or the pretrained weights.
        step, seconds = 0, 0.0
        base, base_checksum = None, None
        if adapter is not None:
            base = put(pretrained.params, model_shardings(model, mesh, adapter))
            base_checksum = checksum(pretrained.params)
        restored = checkpointer.restore(abstract_state(model, optimizer, mesh, adapter))
        if restored is not None:
            check_base(base_checksum, restored.host["base"], config.model, folder)
            step, state = restored.step, restored.state
            data.set_state(restored.host["data"])
            before = restored.host["eval_before"]
            seconds = restored.host["seconds"]
            logger.info(f"resuming at step {step} of {config.num_steps}")
        else:
            start = pretrained.params if base is None else base
            state = init_state(model, start, optimizer, mesh, seed=config.seed, adapter=adapter)
            before = evaluate(policy_params(state.params, base, adapter))
        first_step = step
        pretrained = None  # its weights are not needed any more
        logger.truncate(step)

        def save() -> None:
            host = {
                "data": data.get_state(),
                "eval_before": before,
                "base": base_checksum,
                "seconds": seconds + time.perf_counter() - clock,
            }
            checkpointer.save(step, state, host)

        last: tuple[int, dict[str, Any]] | None = None
        began = time.perf_counter()
        while step < config.num_steps:
            if notice.reached(step):
                if last is not None:
                    logger.log(*jax.device_get(last))
                save()
                checkpointer.wait()
                raise preempted(step, config.num_steps, folder)
            batch = next(data, None)
            if batch is None:  # config.data.num_epochs are over
                break
            pieces = place(batch)
            with jax.transfer_guard("disallow"):
                state, metrics = train_step(state, pieces, base)
            if last is not None:  # while the devices work: the step before, whose numbers are there
                logger.log(*jax.device_get(last))
            now = time.perf_counter()
            metrics["learning_rate"] = learning_rate(step)
            last = step, metrics | _host_metrics(batch, data, seconds=now - began)
            step, began = step + 1, now
            if step == config.num_steps:
                break
            if held_out and config.eval.every and step % config.eval.every == 0:
                logger.log(*jax.device_get(last))
                last = None
                logger.log(step - 1, evaluate(policy_params(state.params, base, adapter)))
                began = time.perf_counter()
            if config.checkpoint.every and step % config.checkpoint.every == 0:
                save()
        if last is not None:
            logger.log(*jax.device_get(last))
        after = evaluate(policy_params(state.params, base, adapter))
        if step > first_step:
            if after:
                logger.log(step - 1, after)
            save()
            seconds += time.perf_counter() - clock

    trained, base = _on_host(state.params), _on_host(base)
    summary = {
        "eval_loss_before": before.get("eval/loss"),
        "eval_loss_after": after.get("eval/loss"),
        "steps": step,
        "seconds": seconds,
        "seed": config.seed,
        "device": jax.devices()[0].device_kind,
        "data": data.counts,
    }

    def report() -> dict[str, Any]:
        params = trained
        if adapter is not None:
            save_adapters(folder / "adapter", adapter, model, trained, base=config.model)
            params = merge_adapters(base, trained, adapter)
            params = jax.tree.map(lambda leaf: leaf.astype(config.param_dtype), params)
        shutil.rmtree(folder / "model", ignore_errors=True)
        save_weights(folder / "model", model, params, tokenizer_files=tokenizer.files())
        (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        return summary

    return on_first("report", report, deadline_s=SAVE_DEADLINE_S)


def negative_log_likelihood(
    params: Params, batch: TrainBatch, *, model: ModelConfig, dtype: str, remat: str
) -> tuple[jax.Array, Load | None]:
    """-log p(token | what precedes it in its conversation): float32[B, T], nats, 0 where ``loss_mask`` is 0.

    And the load of the experts over the trained tokens; None without experts.
    """
    logprobs, _, load = replayed_logprobs(
        model,
        params,
        batch,
        transform=LogitTransform(),
        bounds=RowBounds(batch.tokens.shape[1], prefix_width=0),
        dtype=jnp.dtype(dtype),
        remat=remat,
    )
    return -logprobs, load


def update(
    state: TrainState,
    pieces: TrainBatch,
    base: Params | None = None,
    *,
    loss: Loss,
    optimizer: AnyOptimizer,
    adapter: AdapterConfig | None = None,
    router_aux_loss_coef: float = 0.0,
    experts_per_token: int = 0,
) -> tuple[TrainState, Metrics]:
    """One optimizer step on ``sum(loss) / number of trained tokens``, both over the whole batch.

    The denominator is global, so that the gradient is the same for any number of pieces; see ``gradient_step``.

    Args:
      state: as its type says.
      pieces: arrays [A, B, T]: A micro-batches of B rows.
      base: the frozen parameters, when ``adapter`` is trained.
      loss: of every trained token.
      optimizer: optax's, or a lean one.
      router_aux_loss_coef: of the load-balancing loss of a mixture of experts, which is added.
      experts_per_token: of that mixture.

    Returns:
      (new state, metrics: float32[] each).
    """
    coef, k = router_aux_loss_coef, experts_per_token
    weights = loss_weights(
        pieces.loss_mask, pieces.sample_ids, mode="token-mean", num_samples=pieces.tokens.size
    )

    def score(params: Params, batch: TrainBatch) -> tuple[jax.Array, Load | None]:
        return loss(policy_params(params, base, adapter), batch)

    def loss_fn(params: Params, piece: tuple[TrainBatch, jax.Array]) -> tuple[jax.Array, Metrics]:
        batch, batch_weights = piece
        nats, load = score(params, batch)
        mean = jnp.sum(batch_weights * nats)
        metrics = {"loss": mean}
        return add_router_loss(mean, metrics, load, coef=coef, experts_per_token=k, whole=whole)

    whole = whole_load(lambda piece: score(state.params, piece)[1], pieces, coef=coef)
    state, metrics = gradient_step(
        state,
        (pieces, weights),
        loss_fn=loss_fn,
        optimizer=optimizer,
        trains=jnp.sum(weights) > 0,
    )
    return state, router_metrics(metrics, experts_per_token=k)


def make_train_step(
    loss: Loss,
    model: ModelConfig,
    optimizer: AnyOptimizer,
    mesh: jax.sharding.Mesh,
    shardings: TrainState,
    *,
    adapter: AdapterConfig | None = None,
    router_aux_loss_coef: float = 0.0,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """``update`` jitted for a mesh: (state, pieces, base) -> (state, metrics). The state is donated."""
    return jax.jit(
        functools.partial(
            update,
            loss=loss,
            optimizer=optimizer,
            adapter=adapter,
            router_aux_loss_coef=router_aux_loss_coef,
            experts_per_token=model.experts_per_token,
        ),
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=compiler_options(mesh, backward=True),
    )


def sum_and_count(params: Params, pieces: TrainBatch, *, loss: Loss) -> jax.Array:
    """float32[2]: the summed loss of a batch [A, B, T], and its number of trained tokens."""
    total = jnp.sum(jax.lax.map(lambda piece: jnp.sum(loss(params, piece)[0]), pieces))
    return jnp.stack([total, jnp.sum(pieces.loss_mask > 0).astype(jnp.float32)])


def place_batch(batch: TrainBatch, *, mesh: jax.sharding.Mesh, num_pieces: int) -> TrainBatch:
    """This process's rows [B, T] -> its part of global arrays [num_pieces, B * processes / num_pieces, T]."""
    sharding = NamedSharding(mesh, PartitionSpec(None, *spec("rows", "columns")))

    def place(rows: Any) -> jax.Array:
        pieces = rows.reshape(num_pieces, -1, rows.shape[-1])
        return jax.make_array_from_process_local_data(sharding, pieces)

    return jax.tree.map(place, batch)


def _host_metrics(batch: TrainBatch, data: ChatDataset, *, seconds: float) -> dict[str, Any]:
    """What the host knows of a step; tokens are those of all processes, taken to have as many as this one."""
    real = int(np.count_nonzero(batch.segment_ids)) * jax.process_count()
    return {
        "perf/tokens_per_s": real / seconds,
        "perf/step_s": seconds,
        "data/fill": real / (batch.segment_ids.size * jax.process_count()),
        **{f"data/{name}": count for name, count in data.counts.items()},
    }


def _on_host(params: Params) -> Params:
    """NumPy copies of sharded arrays, whole; every process takes part."""

    def gather(array: jax.Array) -> np.ndarray:
        if array.is_fully_addressable:
            return np.asarray(array)
        return multihost_utils.process_allgather(array, tiled=True)

    return jax.tree.map(gather, params)


def _check_row_shards(mesh: jax.sharding.Mesh) -> None:
    """Raises ConfigError when two processes hold the same rows of a batch: each reads its own."""
    rows = num_row_shards(mesh)
    held = row_sharding(mesh).addressable_devices_indices_map((rows,)).values()
    own = len({str(index) for index in held})
    if own * jax.process_count() != rows:
        raise ConfigError(
            f"a process has {len(mesh.local_devices)} of the devices of mesh {dict(mesh.shape)}, and with them {own} "
            f"of {rows} shards of a batch's rows; expected {rows} / {jax.process_count()} processes, so that none is "
            "read twice: give config.mesh a data, fsdp or expert axis that is a multiple of the number of processes"
        )


def _check_settings(config: ConfigDict, model: ModelConfig, num_shards: int) -> None:
    """Raises ConfigError for what cannot work, before anything is computed."""
    rows, micro_rows, length = (
        config.train.batch_rows,
        config.train.micro_rows or config.train.batch_rows,
        config.train.row_length,
    )
    if rows < 1 or micro_rows < 1 or rows % micro_rows:
        raise ConfigError(
            f"train.batch_rows ({rows}) must be a positive multiple of train.micro_rows ({micro_rows}); change either"
        )
    if micro_rows % num_shards:
        raise ConfigError(
            f"train.micro_rows ({micro_rows}; all of train.batch_rows when 0) must be divisible by the data, fsdp and "
            f"expert axes of the mesh ({num_shards}); change config.train.micro_rows, config.train.batch_rows or "
            "config.mesh"
        )
    if length > model.max_length:
        raise ConfigError(
            f"train.row_length ({length}) is more than the context of {config.model} ({model.max_length} tokens); "
            "lower config.train.row_length"
        )
    if config.train.remat not in REMAT_POLICIES:
        raise ConfigError(
            f"train.remat is {config.train.remat!r}; expected one of {', '.join(REMAT_POLICIES)}"
        )
    if config.dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype is {config.dtype!r}; expected float32 or bfloat16")
    for key, value in (
        ("num_steps", config.num_steps),
        ("checkpoint.keep", config.checkpoint.keep),
    ):
        if value < 1:
            raise ConfigError(f"{key} is {value}; expected at least 1: change config.{key}")
