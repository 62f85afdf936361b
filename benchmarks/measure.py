"""What a step costs, measured from outside: compilations, memory, foreign load, the peak; and on what machine."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.work import Shape
from rlvr_jax.distributed.sharding import replicated, row_sharding
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.planning.chips import CHIPS, chip_of_device

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_PEAK_ROWS, _PEAK_SIZE, _PEAK_REPEATS = 2048, 1024, 8


class CompileLog:
    """Counts the compilations of this process from now on, and their seconds, by function name."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            name = str(kwargs.get("fun_name", "?"))
            self.counts[name.removeprefix("jit(").removesuffix(")")] += 1
            self.seconds += duration_secs


class Program:
    """A jitted function that remembers what its first call found in memory, for ``peak_bytes``."""

    def __init__(self, function: Callable[..., Any], mesh: jax.sharding.Mesh) -> None:
        self._function, self._mesh = function, mesh
        self._call: tuple[Any, Any, int] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), args
            )
            self._call = shapes, kwargs, live_bytes()
        return self._function(*args, **kwargs)

    def _cache_size(self) -> int:
        return self._function._cache_size()  # pyright: ignore[reportFunctionMemberAccess]

    def peak_bytes(self) -> int:
        """Bytes of arrays while the program runs: all that were alive, its results, its temporaries, on all devices.

        XLA's own account of the compiled program, so exact, and free of the runtime's and the compiler's memory.
        """
        assert self._call is not None, "the program has not run"
        args, kwargs, alive = self._call
        with jax.set_mesh(self._mesh):
            lowered = self._function.lower(*args, **kwargs)  # pyright: ignore[reportFunctionMemberAccess]
        memory = lowered.compile().memory_analysis()
        extra = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return alive + self._mesh.size * (extra - memory.alias_size_in_bytes)


def live_bytes() -> int:
    """Bytes of all arrays on this process's devices, replicas counted each."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        * len(array.sharding.addressable_devices)
        for array in jax.live_arrays()
    )


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def cache_bytes(model: ModelConfig, shape: Shape, dtype: str) -> int:
    """Bytes of the keys and values of a rollout: each prompt once, each sample's own tokens."""
    slots = shape.prompts * key_bucket(shape.prompt_len)
    slots += shape.sequences * key_bucket(shape.new_tokens)
    per_slot = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    return slots * per_slot * jnp.dtype(dtype).itemsize


def memory_bound_bytes(model: ModelConfig, cache: int) -> int:
    """(params x (policy 4 + gradients 4 + Adam 8 + reference 4) + cache) and a quarter on top."""
    return int(1.25 * (model.num_params * (4 + 4 + 8 + 4) + cache))


def matmul_peak(mesh: jax.sharding.Mesh, dtype: str) -> float:
    """FLOP/s of a large matrix product in ``dtype``, all devices of the mesh at once, best of a few."""
    rows = jnp.ones((_PEAK_ROWS * mesh.size, _PEAK_SIZE), dtype)
    kernel = jnp.ones((_PEAK_SIZE, _PEAK_SIZE), dtype)
    rows = jax.device_put(rows, row_sharding(mesh))
    kernel = jax.device_put(kernel, replicated(mesh))

    @jax.jit
    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.dot(x, y, preferred_element_type=jnp.float32).astype(x.dtype)

    product(rows, kernel).block_until_ready()
    best = float("inf")
    for _ in range(_PEAK_REPEATS):
        start = time.perf_counter()
        product(rows, kernel).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * rows.shape[0] * _PEAK_SIZE**2 / best


def peak_flops(mesh: jax.sharding.Mesh, dtype: str) -> tuple[float, str]:
    """FLOP/s that shares are of, and what it is: the published bfloat16 peak of known accelerators, so that the share
    is the model FLOPs utilisation (MFU); elsewhere ``matmul_peak``."""
    kind = mesh.devices.flat[0].device_kind
    chip = chip_of_device(kind)
    if chip is None:
        return matmul_peak(mesh, dtype), f"large {dtype} products, measured"
    flops = CHIPS[chip].bf16_flops
    return flops * mesh.size, f"{mesh.size} x {kind}: {flops / 1e12:g} TFLOP/s bfloat16, published"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations the work needs, by phase.

    A matrix product of [m, k] and [k, n] is 2 m k n; products with weights, the head, and attention over the keys a
    token may see are counted, each prompt once; norms, softmax, sampling, Adam, padding and what a backward pass
    computes again are not. A backward pass is twice its forward pass.
    """

    rollout: float
    reference: float
    update: float

    @property
    def step(self) -> float:
        return self.rollout + self.reference + self.update


def count_flops(model: ModelConfig, shape: Shape) -> Flops:
    """Operations of one step; see ``Flops``."""
    prompt, new = shape.prompt_len, shape.new_tokens
    # Keys seen: token t of a prompt sees t + 1; token t of an answer the prompt and t + 1.
    pairs = shape.prompts * prompt * (prompt + 1) / 2
    pairs += shape.sequences * (new * prompt + new * (new + 1) / 2)
    forward = forward_flops(
        model, tokens=shape.shared_tokens, targets=shape.sampled_tokens, pairs=pairs
    )
    return Flops(rollout=forward, reference=forward, update=3 * forward)


def forward_flops(model: ModelConfig, *, tokens: int, targets: int, pairs: float) -> float:
    """Of ``tokens`` through a dense decoder, ``targets`` of them predicted; ``pairs`` of query and key are compared."""
    attention_weights = (
        2 * model.embed_dim * (model.num_heads + model.num_kv_heads) * model.head_dim
    )
    body = 2 * model.num_layers * (attention_weights + 3 * model.embed_dim * model.mlp_dim)
    head = 2 * model.vocab_size * model.embed_dim
    attention = 4 * model.num_layers * model.num_heads * model.head_dim * pairs
    return body * tokens + head * targets + attention


def cpu_seconds() -> tuple[float, float] | None:
    """(busy seconds of the whole machine, of this process), or None where the kernel does not tell."""
    try:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
    except OSError:
        return None
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy, own.user + own.system


def foreign_share(
    before: tuple[float, float] | None, after: tuple[float, float] | None, wall_s: float
) -> float:
    """Share of the machine that others used meanwhile, 0 to 1; NaN where the kernel does not tell."""
    if before is None or after is None:
        return float("nan")
    others = (after[0] - before[0]) - (after[1] - before[1])
    return max(0.0, others) / wall_s / (os.cpu_count() or 1)


def gib(size: int) -> float:
    """Bytes as GiB, for a report."""
    return round(size / 2**30, 3)


def describe_machine() -> dict[str, Any]:
    """Date, processor, devices and versions: what a number is worth nothing without."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "device": f"{jax.device_count()} x {device.platform} {device.device_kind}",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
