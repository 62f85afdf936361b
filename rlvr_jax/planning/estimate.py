"""Memory, traffic and time of a run by formula, at once and for any number of devices: what the search ranks by.

Arguments and state are exact (the trainer's own shapes and shardings); the rest is ``formulas``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from ml_collections import ConfigDict

from rlvr_jax.distributed.mesh import MESH_AXES, ROW_AXES
from rlvr_jax.models.adapters import AdapterConfig, adapter_config
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.planning import formulas
from rlvr_jax.planning.flops import step_flops
from rlvr_jax.planning.formulas import Sizes
from rlvr_jax.planning.measure import Phase
from rlvr_jax.planning.programs import PHASES, abstract_frozen, local_bytes
from rlvr_jax.planning.work import measure_work
from rlvr_jax.training.rl import check_settings, uses_reference
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_trained,
    make_optimizer,
    model_shardings,
    optimizer_config,
    state_shardings,
)


@functools.lru_cache(maxsize=256)  # a search asks for the same meshes again and again
def _state(
    model: ModelConfig,
    kept: OptimizerConfig,
    param_dtype: str,
    sizes: tuple[tuple[str, int], ...],
    adapter: AdapterConfig | None,
) -> tuple[Any, Any, Any, Any]:
    """(all params, frozen ones, trained ones, optimizer state) as ShapeDtypeStructs, over a mesh without devices."""
    names, numbers = zip(*sizes, strict=True)
    mesh: Any = AbstractMesh(numbers, names, axis_types=(AxisType.Auto,) * len(names))
    optimizer = make_optimizer(kept)
    shardings = state_shardings(model, optimizer, mesh, adapter)  # first: most meshes fail here
    params, trained = abstract_params(model), abstract_trained(model, adapter, kept.param_dtype)
    frozen = abstract_frozen(model, adapter, param_dtype)

    def put(leaf: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    opt_state = jax.eval_shape(optimizer.init, trained)
    return jax.tree.map(
        put,
        (params, frozen, trained, opt_state),
        (
            model_shardings(model, mesh),
            model_shardings(model, mesh, adapter),
            shardings.params,
            shardings.opt_state,
        ),
    )


def estimate(
    config: ConfigDict,
    model: ModelConfig,
    mesh: dict[str, int],
    *,
    prompt_tokens: int,
    on_cpu: bool = False,
) -> dict[str, Phase]:
    """Every phase of a config, by formula.

    Args:
      config: of a reinforcement learning run; its own mesh is not read.
      model: shape of its model.
      mesh: sizes of the axes.
      prompt_tokens: of the longest prompt.
      on_cpu: as XLA:CPU would compile it; else as XLA:TPU.

    Raises:
      ConfigError, ValueError: what the trainer itself would refuse.
    """
    check_settings(config, _row_shards(mesh))
    return estimate_checked(config, model, mesh, prompt_tokens=prompt_tokens, on_cpu=on_cpu)


def estimate_checked(
    config: ConfigDict,
    model: ModelConfig,
    mesh: dict[str, int],
    *,
    prompt_tokens: int,
    on_cpu: bool = False,
) -> dict[str, Phase]:
    """``estimate`` of settings that work together; raises ValueError where something does not divide over the mesh."""
    mesh = {axis: mesh.get(axis, 1) for axis in MESH_AXES}
    shards = _row_shards(mesh)
    if config.train.micro_rows % shards:
        raise ValueError(
            f"train.micro_rows ({config.train.micro_rows}) must be divisible by the data, fsdp and expert axes "
            f"({shards}); change config.train.micro_rows or config.mesh"
        )
    columns = mesh["context"]
    work = measure_work(
        config,
        model,
        prompt_tokens=prompt_tokens,
        num_shards=shards,
        num_column_shards=columns,
        on_cpu=on_cpu,
    )
    adapter, reference = adapter_config(**config.adapter), uses_reference(config)
    params, kept, trained, opt_state = _state(
        model,
        optimizer_config(config, num_steps=1),
        config.param_dtype,
        tuple(mesh.items()),
        adapter,
    )
    B, T = work.batch.tokens.shape
    micro_rows = min(config.train.micro_rows or B, B)
    stacks = [params[name] for name in model.stacks]
    outer = {k: v for k, v in params.items() if k not in model.stacks}
    sizes = Sizes(
        model=local_bytes(kept),
        trained=local_bytes(trained),
        float32=sum(
            4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(trained)
        ),
        state=local_bytes((trained, opt_state)),
        waiting=_elsewhere(opt_state),
        base=0 if adapter is None else local_bytes(kept),
        layer=_gathered(stacks, mesh) / model.num_layers,
        experts=_gathered(params["layers"].get("experts", {}), mesh) / model.num_layers,
        head=_gathered(outer, mesh),
        layers=model.num_layers,
        width=2 if config.dtype == "bfloat16" else 4,
        rows=micro_rows // shards,
        length=T // columns,
        keys=T + (T if work.bounds.prefix_width is None else work.bounds.prefix_width),
        pieces=B // micro_rows,
        on_cpu=on_cpu,
    )
    frozen = sizes.model if reference or adapter is not None else 0
    phases = {
        "rollout": formulas.rollout(model, work, sizes, mesh, shards * columns),
        "reference": formulas.scoring(model, work, sizes, mesh, B // shards),
        "update": formulas.update(model, work, sizes, mesh, config.train.remat, B // shards),
    }
    resident = {
        "rollout": sizes.state - sizes.trained + frozen - sizes.base,
        "reference": sizes.state,
        "update": frozen - sizes.base,
    }
    flops = step_flops(model, work, config.train.remat)
    return {
        name: dataclasses.replace(
            phases[name],
            resident_bytes=resident[name],
            flops=flops[name] / math.prod(mesh.values()),
        )
        for name in PHASES
        if name != "reference" or reference
    }


def _row_shards(mesh: dict[str, int]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in ROW_AXES)


def _elsewhere(opt_state: Any) -> int:
    """Bytes of a device's part of what is not on it."""
    here: Any = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind("device")
        ),
        opt_state,
    )
    return local_bytes(here) - local_bytes(opt_state)


def _gathered(params: Any, mesh: dict[str, int]) -> float:
    """Float32 bytes on one device once what lies on the fsdp axis is gathered."""
    total = 0.0
    for leaf in jax.tree.leaves(params):
        axes = [
            a
            for part in leaf.sharding.spec
            if part and "fsdp" not in part
            for a in ((part,) if isinstance(part, str) else part)
        ]
        kept = math.prod(mesh[axis] for axis in axes)
        total += 4 * math.prod(leaf.shape) / kept
    return total
