"""Rotary position embedding (Su et al. 2021), half-split layout as in Hugging Face, and its scalings.

Two scalings depend on the length of the sequence: ``dynamic`` (NTK) and ``longrope``. Some programs decide by the
longest sequence of the batch; then a token's log-probability would depend on its neighbours, and keys in a cache would
be wrong as soon as a sequence grew past the limit. Here the model's context decides, once: up to ``original_length``
the frequencies are those of ``transformers`` for any sequence of the original context, and with a greater
``max_length`` those it has for a sequence of ``max_length`` tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.config import ModelConfig, RopeScaling

Table = tuple[jax.Array, jax.Array]  # cos, sin: float32[N, R/2]


def rotary(positions: jax.Array, head_dim: int, theta: float) -> Table:
    """cos, sin: float32[N, H/2] of plain RoPE."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first R of x: dtype[N, heads, H] by cos, sin: float32[N, R/2]; float32 inside."""
    turned_dim = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :turned_dim].astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if turned_dim < x.shape[-1]:
        turned.append(x[..., turned_dim:].astype(jnp.float32))
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def layer_tables(config: ModelConfig, positions: jax.Array) -> tuple[list[Table], list[int]]:
    """The rotations that the layers of a model use.

    Args:
      positions: int32[N].

    Returns:
      The distinct tables, and for each layer which of them it uses.
    """
    local = set(config.local_layers) if config.local_rope_theta is not None else set()
    kinds = [
        "none" if layer in config.nope_layers else "local" if layer in local else "global"
        for layer in range(config.num_layers)
    ]
    names = sorted(set(kinds))
    return [_table(config, positions, name) for name in names], [names.index(k) for k in kinds]


def _table(config: ModelConfig, positions: jax.Array, kind: str) -> Table:
    dim = int(config.head_dim * config.partial_rotary_factor)
    if kind == "none":
        shape = (positions.shape[0], -(-dim // 2))
        return jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32)
    if kind == "local":
        assert config.local_rope_theta is not None
        return rotary(positions, dim, config.local_rope_theta)
    scaling = config.rope_scaling
    if scaling is None:
        return rotary(positions, dim, config.rope_theta)
    frequency = scaled_frequencies(scaling, dim, config.rope_theta, config.max_length)
    angle = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequency, jnp.float32)[None, :]
    return jnp.cos(angle) * scaling.attention_factor, jnp.sin(angle) * scaling.attention_factor


def scaled_frequencies(scaling: RopeScaling, dim: int, theta: float, max_length: int) -> np.ndarray:
    """Radians a token, float64[ceil(dim / 2)].

    Args:
      scaling: which formula.
      dim: how much of a head is rotated.
      theta: the base.
      max_length: the context the model is used with.
    """
    plain = theta ** (-np.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "dynamic":
        # NTK-aware: the base grows with the length, so that the slowest frequency is that of position interpolation.
        length = max(max_length, scaling.original_length)
        growth = scaling.factor * length / scaling.original_length - (scaling.factor - 1)
        return (theta * growth ** (dim / (dim - 2))) ** (-np.arange(0, dim, 2) / dim)
    if scaling.kind == "llama3":
        return _llama3(scaling, plain)
    if scaling.kind == "yarn":
        return _yarn(scaling, plain, dim, theta)
    longer = max_length > scaling.original_length
    return plain / np.array(scaling.long_factors if longer else scaling.short_factors)


def _llama3(scaling: RopeScaling, plain: np.ndarray) -> np.ndarray:
    """Slow frequencies divided by the factor, fast ones kept, a linear blend between (Llama 3.1)."""
    turns = scaling.original_length * plain / (2 * math.pi)  # in the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(scaling: RopeScaling, plain: np.ndarray, dim: int, theta: float) -> np.ndarray:
    """As llama3's, with the blend linear in the index of the frequency (Peng et al. 2023)."""

    def index_of(num_turns: float) -> float:
        return (
            dim
            * math.log(scaling.original_length / (num_turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)
    return stretched * plain / scaling.factor + (1 - stretched) * plain
