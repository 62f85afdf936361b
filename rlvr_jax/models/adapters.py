"""Low-rank adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024) as a transform of the decoder's parameters.

A run trains two thin matrices A [in, r] and B [r, out] beside each kernel W [in, out] it targets, and nothing else; the
model computes with W + alpha / r * A @ B. B starts at zero, so the adapted model starts as the base. DoRA also trains
the norms of the columns of that sum, which start as those of W. Base and reference are the same arrays: a KL to the
base costs no second copy of it.

    adapters = init_adapters(adapter, base, jax.random.key(0))          # what is trained, stacked over layers
    logprobs, _ = batch_logprobs(model, with_adapters(base, adapters, adapter), batch, ...)

``with_adapters`` only puts them beside the kernels (``linear.AdaptedKernel``); sums are made a layer at a
time where they are used. ``merge_adapters`` makes plain parameters of both. ``peft.py`` writes adapters alone. The base
may be kept in few bits (QLoRA, see ``frozen.py``); base then means that: the reference, and what is merged into.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, Params, abstract_params, widened
from rlvr_jax.models.linear import AdaptedKernel, column_norms, computed_kernel
from rlvr_jax.models.quantized import Quantization, QuantizedKernel

# The kernels that go through ``linear.matmul``; experts' do not.
ADAPTABLE = re.compile(r"(dense_)?layers/(attn/[qkvo]|mlp/(gate|up|down))")

# Logical axes of every adapter that a model may have: A is spread as its kernel's rows, the rest as its columns.
ADAPTER_AXES: dict[str, tuple[str | None, ...]] = {
    f"{path}/{part}": spread
    for path, axes in PARAM_AXES.items()
    if ADAPTABLE.fullmatch(path)
    for part, spread in {
        "a": (axes[0], axes[1], None),
        "b": (axes[0], None, axes[2]),
        "magnitude": (axes[0], axes[2]),
    }.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Which kernels are adapted, and how. Hashable: a static argument.

    Attributes:
      rank: r, columns of A and rows of B.
      alpha: A @ B is multiplied by alpha / rank.
      targets: regular expression that the whole path of a kernel must match, ``layers/attn/q`` to ``layers/mlp/down``;
        the layers without experts at the start of a mixture, ``dense_layers``, count as ``layers``.
      dora: train the norms of the columns too.
      quantize: keep the base's kernels as ``nf4`` or ``int8``, adapted or not; ``none`` leaves them float32.
      double_quant: keep the scales of that in 8 bits too.

    Raises:
      ValueError: a rank or alpha that is not positive, no regular expression, an unknown way to quantise.
    """

    rank: int
    alpha: float
    targets: str
    dora: bool = False
    quantize: str = "none"
    double_quant: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(
                f"adapter.rank is {self.rank}; expected at least 1, or 0 to train all parameters"
            )
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"adapter.alpha is {self.alpha}; expected a number > 0")
        try:
            re.compile(self.targets)
        except re.error as error:
            raise ValueError(
                f"adapter.targets is {self.targets!r}, no regular expression ({error}); expected one that matches "
                "paths such as layers/attn/q: 'layers/(attn|mlp)/.*' adapts all"
            ) from error
        if self.double_quant and self.quantize == "none":
            raise ValueError(
                "adapter.double_quant is on and adapter.quantize is 'none': there are no scales; expected nf4 or int8"
            )
        _ = self.quantization  # raises for a kind that there is not

    @property
    def quantization(self) -> Quantization | None:
        """How the base's kernels are kept; None for float32."""
        if self.quantize == "none":
            return None
        return Quantization(kind=self.quantize, double=self.double_quant)

    @property
    def scale(self) -> float:
        """By which A @ B is multiplied."""
        return self.alpha / self.rank


def adapter_config(*, rank: int, **settings: Any) -> AdapterConfig | None:
    """The section ``adapter`` of a config; None, all parameters are trained, when its rank is 0.

    Raises:
      ValueError: see ``AdapterConfig``; or a base in few bits is asked for, which cannot be trained itself.
    """
    if not rank and settings.get("quantize", "none") != "none":
        raise ValueError(
            f"adapter.quantize is {settings['quantize']!r} and adapter.rank 0: parameters in few bits are not trained; "
            "expected none, or a rank of adapters to train beside them"
        )
    return AdapterConfig(rank=rank, **settings) if rank else None


def target_kernels(config: AdapterConfig, base: Params) -> dict[str, Any]:
    """Path -> kernel [L, in, out] of those that are adapted, out of ``base``, arrays or their shapes.

    Raises:
      ValueError: there are none; the message lists what can be.
    """
    leaves = tree_paths(base, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
    kernels = {path: leaf for path, leaf in leaves.items() if ADAPTABLE.fullmatch(path)}
    chosen = {
        path: leaf
        for path, leaf in kernels.items()
        if re.fullmatch(config.targets, path.removeprefix("dense_"))
    }
    if not chosen:
        raise ValueError(
            f"adapter.targets {config.targets!r} matches no kernel; expected to match one of {', '.join(kernels)}: "
            "change config.adapter.targets"
        )
    return chosen


def init_adapters(config: AdapterConfig, base: Params, key: jax.Array) -> Params:
    """Adapters that change nothing yet: A uniform in +-1/sqrt(in) (as PEFT), B zero, magnitudes the base's norms.

    Returns:
      Nested dict with ``a: float32[L, in, r]``, ``b: float32[L, r, out]`` and, with DoRA,
      ``magnitude: float32[L, out]`` in the place of each kernel.
    """
    tree: dict[str, Any] = {}
    for path, kernel in target_kernels(config, base).items():
        layers, rows, columns = kernel.shape
        node = tree
        for name in path.split("/"):
            node = node.setdefault(name, {})
        key_of = jax.random.fold_in(key, zlib.crc32(path.encode()))
        shape, bound = (layers, rows, config.rank), rows**-0.5
        node["a"] = jax.random.uniform(key_of, shape, minval=-bound, maxval=bound)
        node["b"] = jnp.zeros((layers, config.rank, columns))
        if config.dora:
            node["magnitude"] = jax.lax.map(lambda w: column_norms(computed_kernel(w)), kernel)
    return tree


def abstract_adapters(config: AdapterConfig, model: ModelConfig) -> Params:
    """Shapes and dtypes of the adapters, without making them."""
    return jax.eval_shape(
        lambda base: init_adapters(config, base, jax.random.key(0)), abstract_params(model)
    )


def with_adapters(base: Params, adapters: Params, config: AdapterConfig) -> Params:
    """Parameters that the decoder computes with; no array is made. Only the adapters have gradients."""

    def add(node: Any, of_node: Any) -> Any:
        if isinstance(node, Mapping):
            return {
                name: add(child, of_node[name]) if name in of_node else child
                for name, child in node.items()
            }
        return AdaptedKernel(kernel=node, **of_node, scale=config.scale)

    return add(base, adapters)


def merge_adapters(base: Params, adapters: Params, config: AdapterConfig) -> Params:
    """Plain float32 parameters of the same maths, where ``base`` is: NumPy on the host, or spread over the mesh."""

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, AdaptedKernel | QuantizedKernel):
            return leaf
        kernel = leaf.kernel if isinstance(leaf, AdaptedKernel) else leaf
        spread = kernel.codes if isinstance(kernel, QuantizedKernel) else kernel
        if isinstance(spread, jax.Array):
            return _merge_layers(leaf, spread.sharding)
        layers = range(kernel.shape[0])
        return np.stack([np.asarray(computed_kernel(leaf[layer])) for layer in layers])

    return jax.tree.map(
        plain,
        with_adapters(base, adapters, config),
        is_leaf=lambda leaf: isinstance(leaf, AdaptedKernel | QuantizedKernel),
    )


def _merge_layers(
    stacked: AdaptedKernel | QuantizedKernel, sharding: jax.sharding.Sharding
) -> jax.Array:
    merge = jax.jit(lambda kernel: jax.lax.map(computed_kernel, kernel), out_shardings=sharding)
    return merge(stacked)


def checksum(base: Params) -> int:
    """32 bits of parameters, host or mesh alike: adapters are of one base, and checkpoints name it by this.

    A sum of integers, the same in any order and on any mesh: of a hash of every value's bits and place.
    """

    def of_leaf(leaf: jax.Array) -> jax.Array:
        codes = jnp.issubdtype(leaf.dtype, jnp.integer)
        of_float = jax.lax.bitcast_convert_type
        bits = leaf.astype(jnp.uint32) if codes else of_float(widened(leaf), jnp.uint32)
        for axis in range(leaf.ndim):
            bits = _mixed(bits + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis))
        return jnp.sum(bits, dtype=jnp.uint32)

    total = 0
    for leaf in jax.tree.leaves(base):
        total = (total * 31 + int(jax.jit(of_leaf)(leaf))) % 2**32
    return total


def _mixed(bits: jax.Array) -> jax.Array:
    """A permutation of uint32 in which every bit changes half of the others (the end of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
