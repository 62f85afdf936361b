"""For which devices a plan is compiled: those of this process, a TPU topology without a TPU, or stand-ins.

Other devices than this process's own are compiled for in a process of their own, since JAX fixes what it can see when
it starts. TPUs need libtpu, which brings the compiler; without it, and for GPUs, the same SPMD program is compiled for
as many virtual CPU devices. Arguments, state and collectives are the same then; temporaries are those of XLA:CPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rlvr_jax.errors import ConfigError
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.chips import Topology
from rlvr_jax.planning.measure import Measured, Phase, measure
from rlvr_jax.planning.programs import FUSED, PHASES

STAND_INS = "compiled for virtual CPU devices: temporaries and traffic are those of XLA:CPU"
NO_LIBTPU = (
    "libtpu is not installed, so the TPU compiler is not used: pip install 'rlvr_jax[tpu]', or without a TPU "
    "pip install --no-deps --target DIR libtpu (the version that jax's tpu extra asks for) and set "
    "TPU_LIBRARY_PATH=DIR/libtpu/libtpu.so"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the other process is asked to measure; ``topology`` None means virtual CPU devices."""

    config: dict[str, Any]
    model: ModelConfig
    topology: str | None
    num_devices: int
    prompt_tokens: int
    stop_token_ids: tuple[int, ...]
    shallow_decode: bool
    only: tuple[str, ...]


def find_libtpu() -> str | None:
    """The TPU compiler: ``TPU_LIBRARY_PATH``, or that of an installed libtpu."""
    path = os.environ.get("TPU_LIBRARY_PATH")
    if path is None and (spec := importlib.util.find_spec("libtpu")) is not None:
        path = str(Path(spec.origin or "").with_name("libtpu.so"))
    return path if path and Path(path).is_file() else None


def measure_on(
    topology: Topology,
    config: ConfigDict,
    model: ModelConfig,
    *,
    prompt_tokens: int,
    whole_decode: bool,
    say: Callable[[str], None],
    stop_token_ids: tuple[int, ...],
) -> tuple[dict[str, Phase], list[str]]:
    """Compiles the phases of a config for a topology.

    Args:
      whole_decode: compile the decode loop at full depth, instead of extrapolating it from two depths.
      say: told what is going on.
      stop_token_ids: of the tokenizer.

    Returns:
      (phases, notes on what was compiled for what).

    Raises:
      ConfigError, ValueError: what the trainer itself would refuse.
    """
    if topology.chip is None:
        on_cpu = jax.devices()[0].platform == "cpu"
        found = measure(
            config,
            model,
            jax.devices(),
            prompt_tokens=prompt_tokens,
            on_cpu=on_cpu,
            shallow_decode=False,
            say=say,
            stop_token_ids=stop_token_ids,
        )
        if found.refused:
            needs = ", ".join(f"{n} {b / 2**30:.1f} GiB" for n, b in found.refused.items())
            raise ConfigError(
                f"the compiler refuses for want of memory: {needs}; lower config.train.micro_rows or "
                "config.rollout.max_rows, or use more devices"
            )
        return found.phases, []

    def ask(tpu: bool, only: Sequence[str]) -> Measured:
        request = Request(
            config=config.to_dict(),
            model=model,
            topology=topology.name if tpu else None,
            num_devices=topology.num_devices,
            prompt_tokens=prompt_tokens,
            stop_token_ids=stop_token_ids,
            shallow_decode=not whole_decode,
            only=tuple(only),
        )
        return _ask(request, say)

    libtpu = find_libtpu() if topology.platform == "tpu" else None
    everything = (*PHASES, FUSED)
    if libtpu is None:
        notes = [NO_LIBTPU] if topology.platform == "tpu" else []
        return ask(False, everything).phases, [*notes, STAND_INS]
    found = ask(True, everything)
    if not found.refused:
        return found.phases, []
    say(
        f"the TPU compiler refuses {', '.join(found.refused)} for want of memory; the rest from stand-ins"
    )
    replaced = {
        name: dataclasses.replace(
            phase,
            memory=dataclasses.replace(
                phase.memory,
                temporaries=phase.memory.temporaries + found.refused[name] - phase.memory.total,
            ),
            how="refused by the TPU compiler for want of memory; traffic of stand-ins",
        )
        for name, phase in ask(False, tuple(found.refused)).phases.items()
    }
    phases = found.phases | replaced
    return {name: phases[name] for name in everything if name in phases}, []


def _ask(request: Request, say: Callable[[str], None]) -> Measured:
    env = dict(os.environ) | {"JAX_PLATFORMS": "cpu"}
    count = request.num_devices if request.topology is None else 1
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    if request.topology is not None:
        env |= {
            "TPU_LIBRARY_PATH": str(find_libtpu()),
            "TPU_SKIP_MDS_QUERY": "1",  # no TPU machine to ask
            "TPU_ACCELERATOR_TYPE": "v5litepod-4",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_MIN_LOG_LEVEL": "3",
        }
    process = subprocess.Popen(
        [sys.executable, "-m", "rlvr_jax.planning.worker"],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert process.stdin and process.stdout and process.stderr
        try:
            process.stdin.write(pickle.dumps(request))
            process.stdin.close()
            log = []
            for line in process.stderr:  # progress is marked; the rest is the libraries' own
                text = line.decode(errors="replace").rstrip()
                say(text[2:]) if text.startswith("> ") else log.append(text)
            answer = process.stdout.read()
        finally:
            process.kill()
    if not answer:
        last = "\n".join(log[-20:])
        raise RuntimeError(f"the compiling process ended with status {process.returncode}:\n{last}")
    result = pickle.loads(answer)
    if isinstance(result, str):
        raise ConfigError(result)
    return result
