"""From a config and the name of a topology to a plan."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
from ml_collections import ConfigDict

from rlvr_jax.errors import ConfigError, WeightsError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.weights import resolve_model
from rlvr_jax.planning.chips import CHIPS, Topology, chip_of_device, parse_topology
from rlvr_jax.planning.estimate import estimate
from rlvr_jax.planning.measure import Phase
from rlvr_jax.planning.plan import USABLE, Plan
from rlvr_jax.planning.programs import check_model
from rlvr_jax.planning.search import (
    WORTH_IT,
    Found,
    apply,
    better_settings,
    flags,
    step_seconds,
)
from rlvr_jax.planning.shapes import model_shape
from rlvr_jax.planning.targets import measure_on
from rlvr_jax.tasks.curriculum import Curriculum
from rlvr_jax.tasks.splits import held_out_tasks
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import Tokenizer, load_tokenizer
from rlvr_jax.training.policy import TINY

PROMPT_TOKENS = 256  # where nothing says how long prompts are
CONFIRMATIONS = 2  # proposals that are compiled, before the last one is said not to fit either
ESTIMATED = "estimated from the shapes; nothing was compiled"


def make_plan(
    config: ConfigDict,
    topology: str,
    *,
    prompt_tokens: int | None = None,
    whole_decode: bool = False,
    estimate_only: bool = False,
    say: Callable[[str], None],
) -> Plan:
    """Plans a run.

    Args:
      config: of a reinforcement learning run.
      topology: as ``parse_topology`` reads it.
      prompt_tokens: of the longest prompt; measured on the config's tasks, if the model's tokenizer is here, when None.
      whole_decode: compile the decode loop at full depth, instead of extrapolating it from two depths.
      estimate_only: compile nothing.
      say: told what is going on.

    Raises:
      ConfigError, ValueError: an unknown topology, or what the trainer itself would refuse.
      WeightsError: no such model.
    """
    target = parse_topology(topology)
    chip, num_devices, memory_bytes = _device(target)
    shape = model_shape(config.model)
    mesh = mesh_sizes(config.mesh, num_devices)
    check_model(config, shape.config)
    tokenizer = find_tokenizer(config)
    if prompt_tokens is None:
        prompt_tokens = PROMPT_TOKENS if tokenizer is None else longest_prompt(config, tokenizer)
    if prompt_tokens + config.rollout.max_tokens > shape.config.max_length:
        raise ConfigError(
            f"a prompt of {prompt_tokens} tokens and rollout.max_tokens={config.rollout.max_tokens} are past the "
            f"model's context of {shape.config.max_length}: lower config.rollout.max_tokens or --prompt-tokens"
        )

    def measured(settings: ConfigDict) -> tuple[dict[str, Phase], list[str]]:
        if estimate_only:
            sizes = mesh_sizes(settings.mesh, num_devices)
            on_cpu = target.chip is None and jax.devices()[0].platform == "cpu"
            found = estimate(
                settings, shape.config, sizes, prompt_tokens=prompt_tokens, on_cpu=on_cpu
            )
            return found, [ESTIMATED]
        return measure_on(
            target,
            settings,
            shape.config,
            prompt_tokens=prompt_tokens,
            whole_decode=whole_decode,
            say=say,
            stop_token_ids=(0,) if tokenizer is None else tuple(tokenizer.stop_token_ids),
        )

    phases, notes = measured(config)
    first = [f"every response is taken to run to {config.rollout.max_tokens} tokens"]
    if config.schedule == "fused":
        first.append("the fused schedule is one program: it needs more than its largest phase")
    plan = Plan(
        topology=topology,
        num_devices=num_devices,
        chip=chip,
        memory_bytes=memory_bytes,
        model=f"{config.model} ({shape.source})",
        num_params=shape.config.num_params,
        assumptions=_assumptions(config, mesh, prompt_tokens),
        phases=phases,
        sampled_tokens=config.tasks.tasks_per_step
        * config.rollout.group_size
        * config.rollout.max_tokens,
        notes=(*first, *notes),
    )
    if chip is None or target.chip is None:
        return plan  # the devices are here: there is nothing to choose among before renting them
    say("searching for better settings")
    found = better_settings(
        config, shape.config, mesh, prompt_tokens=prompt_tokens, chip=chip, measured=phases
    )
    return dataclasses.replace(
        plan, suggestions=_suggestions(plan, config, shape.config, mesh, found, measured)
    )


def mesh_sizes(mesh: Any, num_devices: int) -> dict[str, int]:
    """The axes of ``config.mesh`` in numbers, -1 filled up.

    Raises:
      ConfigError: they do not multiply to the number of devices.
    """
    sizes = dict(mesh)
    known = math.prod(size for size in sizes.values() if size != -1)
    filled = {n: num_devices // known if size == -1 else size for n, size in sizes.items()}
    if list(sizes.values()).count(-1) > 1 or math.prod(filled.values()) != num_devices:
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(
            f"mesh {asked} does not multiply to {num_devices} devices; change config.mesh (at most one axis may be -1 "
            "and takes the rest)"
        )
    return filled


def find_tokenizer(config: ConfigDict) -> Tokenizer | None:
    """The model's tokenizer; None where it is not at hand."""
    if config.model == TINY:
        return byte_level_tokenizer()
    try:
        return load_tokenizer(resolve_model(config.model))
    except WeightsError:
        return None


def longest_prompt(config: ConfigDict, tokenizer: Tokenizer) -> int:
    """Tokens of the longest prompt among the first step's tasks and the held-out ones."""
    chat, seed = ChatTemplate(tokenizer), config.seed
    curriculum = Curriculum(
        config.tasks.domains,
        difficulty=config.tasks.difficulty,
        seed=seed,
        max_levels=config.tasks.max_levels or None,
    )
    tasks = curriculum.sample(0, config.tasks.tasks_per_step)
    for name, levels in curriculum.levels.items():
        tasks += held_out_tasks(name, config.eval.tasks_per_domain, seed, levels)
    return max(len(chat.render_ids(task.prompt)) for task in tasks)


def _device(target: Topology) -> tuple[str | None, int, int | None]:
    """(chip, number of devices, memory of one)."""
    if target.chip is not None:
        return target.chip, target.num_devices, CHIPS[target.chip].memory_bytes
    devices = jax.devices()
    chip = chip_of_device(devices[0].device_kind)
    if devices[0].platform == "cpu":  # they share the host's memory
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return None, len(devices), host // len(jax.local_devices())
    stats = devices[0].memory_stats() or {}
    limit = stats.get("bytes_limit") or (CHIPS[chip].memory_bytes if chip else None)
    return chip, len(devices), limit


def _assumptions(config: ConfigDict, mesh: dict[str, int], prompt_tokens: int) -> dict[str, Any]:
    return {
        "mesh": "x".join(f"{name}={size}" for name, size in mesh.items()),
        "dtype": config.dtype,
        "remat": config.train.remat,
        "micro_rows": config.train.micro_rows,
        "tasks_per_step": config.tasks.tasks_per_step,
        "group_size": config.rollout.group_size,
        "prompt_tokens": prompt_tokens,
        "response_tokens": config.rollout.max_tokens,
        "max_rows": config.rollout.max_rows,
    }


def _suggestions(
    plan: Plan,
    config: ConfigDict,
    model: ModelConfig,
    mesh: dict[str, int],
    found: Found,
    measured: Callable[[ConfigDict], tuple[dict[str, Phase], list[str]]],
) -> tuple[str, ...]:
    """What to change: where the plan does not fit, confirmed by compiling it; else what is estimated to be faster."""
    assert plan.chip is not None and plan.memory_bytes is not None
    if not found.fits:
        if plan.fits:
            return ()
        return (
            f"no mesh, batch or remat policy fits by estimate: the {found.phase} takes at least "
            f"{found.peak_bytes / 2**30:.3g} GiB a device ({flags(found.overrides)}); lower "
            "config.rollout.max_tokens, or use more devices, or larger ones",
        )
    better = apply(config, found.overrides)
    if plan.fits:
        tokens = plan.assumptions["prompt_tokens"]
        now = estimate(config, model, mesh, prompt_tokens=tokens)
        sizes = mesh_sizes(better.mesh, plan.num_devices)
        then = estimate(better, model, sizes, prompt_tokens=tokens)
        ratio = step_seconds(then, plan.chip) / step_seconds(now, plan.chip)
        if not found.overrides or ratio > WORTH_IT:
            return ()
        return (f"{flags(found.overrides)}: {1 - ratio:.0%} less time at best, by estimate",)
    overrides, tokens = found.overrides, plan.assumptions["prompt_tokens"]
    for attempt in range(CONFIRMATIONS):
        phases, _ = measured(better)
        peak = max(phase.peak_bytes for phase in phases.values())
        fits = peak <= USABLE * plan.memory_bytes
        if fits or attempt + 1 == CONFIRMATIONS:
            break
        sizes = mesh_sizes(better.mesh, plan.num_devices)
        found = better_settings(
            better, model, sizes, prompt_tokens=tokens, chip=plan.chip, measured=phases
        )
        if not found.fits or not found.overrides:
            break
        overrides = overrides | found.overrides
        better = apply(better, found.overrides)
    verdict = "fits" if fits else "does not fit either"
    how = "estimated" if phases["update"].how == "estimated" else "compiled"
    return (
        f"{flags(overrides)}: {verdict} ({how}: peak {peak / 2**30:.3g} GiB, at best "
        f"{step_seconds(phases, plan.chip):.3g} s a step)",
    )
