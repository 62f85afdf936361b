"""Accelerators by their published figures, and topologies by name: ``v5p:8x8x8``, ``h100:64``, ``local``.

The figures are what the vendors print, not what a program gets: a roofline made of them is a bound that no run beats.
"""

from __future__ import annotations

import dataclasses
import math
import re

from rlvr_jax.errors import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator.

    Attributes:
      platform: ``tpu`` or ``gpu``.
      bf16_flops: dense matmul peak, FLOP/s. Float32 matmuls of XLA:TPU run as bfloat16 passes, and are counted alike.
      memory_bytes: of the device.
      memory_bytes_per_s: between the device and its memory.
      link_bytes_per_s: what a chip can send to its neighbours (ICI, NVLink) at once, in one direction.
      node_chips: how many chips the links join; 0 for a whole slice.
      network_bytes_per_s: what a chip can send to other nodes; 0 where ``node_chips`` is.
      dimensions: of a TPU topology.
      max_chips: of a slice; 0 for no limit.
      source: where the figures are published.
    """

    platform: str
    bf16_flops: float
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    node_chips: int = 0
    network_bytes_per_s: float = 0.0
    dimensions: int = 0
    max_chips: int = 0
    source: str


_CLOUD = "cloud.google.com/tpu/docs/"
CHIPS: dict[str, Chip] = {
    "v4": Chip(
        platform="tpu",
        bf16_flops=275e12,
        memory_bytes=32 * GIB,
        memory_bytes_per_s=1228e9,
        link_bytes_per_s=300e9,
        dimensions=3,
        max_chips=4096,
        source=_CLOUD + "v4",
    ),
    "v5e": Chip(
        platform="tpu",
        bf16_flops=197e12,
        memory_bytes=16 * GIB,
        memory_bytes_per_s=819e9,
        link_bytes_per_s=200e9,
        dimensions=2,
        max_chips=256,
        source=_CLOUD + "v5e",
    ),
    "v5p": Chip(
        platform="tpu",
        bf16_flops=459e12,
        memory_bytes=95 * GIB,
        memory_bytes_per_s=2765e9,
        link_bytes_per_s=600e9,
        dimensions=3,
        max_chips=6144,
        source=_CLOUD + "v5p",
    ),
    "v6e": Chip(
        platform="tpu",
        bf16_flops=918e12,
        memory_bytes=32 * GIB,
        memory_bytes_per_s=1640e9,
        link_bytes_per_s=448e9,
        dimensions=2,
        max_chips=256,
        source=_CLOUD + "v6e",
    ),
    "a100": Chip(
        platform="gpu",
        bf16_flops=312e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2039e9,
        link_bytes_per_s=300e9,
        node_chips=8,
        network_bytes_per_s=25e9,
        source="NVIDIA A100 80GB SXM and DGX A100 data sheets",
    ),
    "h100": Chip(
        platform="gpu",
        bf16_flops=989e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3350e9,
        link_bytes_per_s=450e9,
        node_chips=8,
        network_bytes_per_s=50e9,
        source="NVIDIA H100 SXM and DGX H100 data sheets",
    ),
    "h200": Chip(
        platform="gpu",
        bf16_flops=989e12,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4800e9,
        link_bytes_per_s=450e9,
        node_chips=8,
        network_bytes_per_s=50e9,
        source="NVIDIA H200 SXM and DGX H200 data sheets",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Topology:
    """Devices to plan for.

    Attributes:
      name: as it was asked for.
      chip: a name of ``CHIPS``; None for the devices of this process.
      num_devices: of all hosts; 0 for ``local``, until JAX is asked.
    """

    name: str
    chip: str | None
    num_devices: int

    @property
    def platform(self) -> str:
        """``tpu``, ``gpu`` or ``local``."""
        return CHIPS[self.chip].platform if self.chip else "local"


def parse_topology(name: str) -> Topology:
    """Reads ``local``, ``CHIP:AxB`` or ``CHIP:AxBxC`` (TPU, chips), ``CHIP:N`` (GPU).

    Raises:
      ConfigError: none of these; the message names what is known.
    """
    if name == "local":
        return Topology(name=name, chip=None, num_devices=0)
    kind, _, size = name.partition(":")
    chip = CHIPS.get(kind)
    if chip is None or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        raise ConfigError(f"unknown topology {name!r}; expected {known_topologies()}")
    sizes = [int(part) for part in size.split("x")]
    if len(sizes) != (chip.dimensions or 1):
        example = "x".join(["4"] * chip.dimensions) if chip.dimensions else "8"
        raise ConfigError(
            f"topology {name!r} has {len(sizes)} sizes; a {kind} has {chip.dimensions or 1}: write {kind}:{example}"
        )
    num_devices = math.prod(sizes)
    if chip.max_chips and num_devices > chip.max_chips:
        raise ConfigError(
            f"topology {name!r} has {num_devices} chips; a {kind} slice has at most {chip.max_chips}"
        )
    return Topology(name=name, chip=kind, num_devices=num_devices)


def known_topologies() -> str:
    """For messages: what can be written."""
    tpus = ", ".join(
        f"{name}:{'x'.join('ABC'[: chip.dimensions])}"
        for name, chip in CHIPS.items()
        if chip.dimensions
    )
    gpus = ", ".join(f"{name}:N" for name, chip in CHIPS.items() if not chip.dimensions)
    return f"local, {tpus} (chips along each side) or {gpus} (number of GPUs)"


def chip_of_device(kind: str) -> str | None:
    """The name in ``CHIPS`` of a device kind as JAX spells it; None for one that is not in the table."""
    text = kind.lower()
    named = {"tpu v5 lite": "v5e", "tpu v5p": "v5p", "tpu v5": "v5p", "tpu v6": "v6e"}
    for spelling, name in (named | {"tpu v4": "v4"} | {n: n for n in CHIPS}).items():
        if spelling in text:
            return name
    return None
