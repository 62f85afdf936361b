"""The one decoder: pre-norm transformer with grouped-query attention, RoPE and SwiGLU, on flat tokens [N, D].

Trainer, prefill and decode run the same ``Layer``; only ``attend`` differs (which keys a query looks at) and whether
the layers are scanned (training, prefill: compile time does not grow with depth) or unrolled (decode: a scan would
copy every weight at every token). Parameters are float32 masters; activations have the dtype of ``dtype``.

``init_params`` makes the nested dict of parameters, ``bind`` turns such a dict back into the module:

    params = init_params(config, jax.random.key(0))
    model = bind(config, params)
    hidden, _ = model(tokens, positions, attend_rows(segment_ids, prefix_ids))   # tokens: int32[B * T]
    logits = model.logits(hidden)                                                # float32[B * T, V]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.distributed.sharding import constrain
from rlvr_jax.models.attention import (
    KeyValues,
    grouped_query_attention,
    row_masks,
)
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.rope import rotary, rotate

Params = Any  # nested dict of arrays
# (q [N, heads, H], k [N, K, H], v [N, K, H], cache of the layer) -> (out [N, heads, H], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]

# Logical axes of every parameter; distributed.sharding maps them to mesh axes.
PARAM_AXES: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "layers/attn_norm/scale": ("layers", None),
    "layers/attn/q": ("layers", "embed", "heads"),
    "layers/attn/k": ("layers", "embed", "kv_heads"),
    "layers/attn/v": ("layers", "embed", "kv_heads"),
    "layers/attn/o": ("layers", "heads", "embed"),
    "layers/mlp_norm/scale": ("layers", None),
    "layers/mlp/gate": ("layers", "embed", "mlp"),
    "layers/mlp/up": ("layers", "embed", "mlp"),
    "layers/mlp/down": ("layers", "mlp", "embed"),
    "final_norm/scale": (None,),
    "head/kernel": ("embed", "vocab"),
}

# Compiler options of every program that computes log-probabilities. By default XLA keeps bf16 intermediates in float32
# where it likes, which differs from program to program: 3e-2 nats between sampler and trainer.
STRICT: dict[str, Any] = {"xla_allow_excess_precision": False}

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "none": None,
}


def matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel in x's dtype, accumulated in float32 and rounded once."""
    product = jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return product.astype(x.dtype)


def _kernel(rngs: nnx.Rngs, fan_in: int, fan_out: int) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), (fan_in, fan_out)) * fan_in**-0.5)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, float32 inside (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((dim,)))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.eps)
        return (normed * self.scale[...][None, :]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections around ``attend``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.q = _kernel(rngs, c.embed_dim, c.num_heads * c.head_dim)
        self.k = _kernel(rngs, c.embed_dim, c.num_kv_heads * c.head_dim)
        self.v = _kernel(rngs, c.embed_dim, c.num_kv_heads * c.head_dim)
        self.o = _kernel(rngs, c.num_heads * c.head_dim, c.embed_dim)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[jax.Array, Any]:
        H = self.config.head_dim
        q = rotate(matmul(x, self.q[...]).reshape(x.shape[0], -1, H), *rope)
        k = rotate(matmul(x, self.k[...]).reshape(x.shape[0], -1, H), *rope)
        v = matmul(x, self.v[...]).reshape(x.shape[0], -1, H)
        out, cache = attend(q, k, v, cache)
        return matmul(out.reshape(x.shape[0], -1), self.o[...]), cache


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = _kernel(rngs, config.embed_dim, config.mlp_dim)
        self.up = _kernel(rngs, config.embed_dim, config.mlp_dim)
        self.down = _kernel(rngs, config.mlp_dim, config.embed_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.silu(matmul(x, self.gate[...]).astype(jnp.float32)).astype(x.dtype)
        return matmul(gate * matmul(x, self.up[...]), self.down[...])


class Layer(nnx.Module):
    """One pre-norm block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.attn_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], attend: Attend, cache: Any
    ) -> tuple[jax.Array, Any]:
        attended, cache = self.attn(self.attn_norm(x), rope, attend, cache)
        x = constrain(x + attended, "rows", None)
        return constrain(x + self.mlp(self.mlp_norm(x)), "rows", None), cache


class Embed(nnx.Module):
    """Token embedding, also the head when tied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.embed_dim)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


class Head(nnx.Module):
    """Output projection of untied models."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.kernel = _kernel(rngs, config.embed_dim, config.vocab_size)


class Decoder(nnx.Module):
    """Embedding, stacked layers, final norm, head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embed(config, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Layer:
            return Layer(config, rngs=rngs)

        self.layers = stack(rngs)
        self.final_norm = RMSNorm(config.embed_dim, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Head(config, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Any = None,
        *,
        dtype: Any = jnp.float32,
        remat: str = "none",
    ) -> tuple[jax.Array, Any]:
        """Hidden states after the final norm, layers scanned.

        Args:
          tokens, positions: int32[N].
          attend: which keys the queries look at.
          caches: pytree of the layers' caches stacked on axis 0, handed to ``attend`` a layer at a time.
          dtype: of the activations.
          remat: what the backward pass keeps, a name of ``REMAT_POLICIES``.

        Returns:
          (dtype[N, D], what ``attend`` returned, stacked).
        """
        chex.assert_rank([tokens, positions], 1)
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        graphdef, stacked = nnx.split(self.layers)

        def body(x: jax.Array, layer_and_cache: tuple[Any, Any]) -> tuple[jax.Array, Any]:
            state, cache = layer_and_cache
            return nnx.merge(graphdef, state)(x, rope, attend, cache)

        if remat != "none":
            body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
        x = constrain(self.embed.embedding[...].astype(dtype)[tokens], "rows", None)
        x, caches = jax.lax.scan(body, x, (stacked, caches))
        return self.final_norm(x), caches

    def unrolled(
        self,
        layers: Sequence[Layer],
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Sequence[Any],
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, list[Any]]:
        """The same maths with ``layers`` from ``unstack``, one after another, for decoding."""
        rope = rotary(positions, self.config.head_dim, self.config.rope_theta)
        x = constrain(self.embed.embedding[...].astype(dtype)[tokens], "rows", None)
        new_caches = []
        for layer, cache in zip(layers, caches, strict=True):
            x, cache = layer(x, rope, attend, cache)
            new_caches.append(cache)
        return self.final_norm(x), new_caches

    def unstack(self, dtype: Any) -> list[Layer]:
        """The layers one by one, kernels cast to ``dtype`` and gathered over fsdp: one copy, made once a program."""
        graphdef, state = nnx.split(self.layers)
        stacked = nnx.to_pure_dict(state)

        def pick(path: Any, param: jax.Array, index: int) -> jax.Array:
            axes = PARAM_AXES["/".join(["layers", *(str(key.key) for key in path)])][1:]
            kernel = param[index] if param.ndim == 2 else param[index].astype(dtype)
            return constrain(kernel, *(None if axis == "embed" else axis for axis in axes))

        return [
            nnx.merge(
                graphdef,
                nnx.State(
                    jax.tree_util.tree_map_with_path(functools.partial(pick, index=index), stacked)
                ),
            )
            for index in range(self.config.num_layers)
        ]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[N, V] from dtype[N, D]; the head is float32 in every compute dtype."""
        wide = hidden.astype(jnp.float32)
        if self.config.tie_embeddings:
            return jax.lax.dot_general(wide, self.embed.embedding[...], (((1,), (1,)), ((), ())))
        return jnp.dot(wide, self.head.kernel[...])


@functools.lru_cache
def _graphdef(config: ModelConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module that holds ``params`` (arrays or tracers); costs nothing at run time."""
    return nnx.merge(_graphdef(config), nnx.State(params))


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, float32: normal(0, 1/sqrt(fan_in)) kernels, normal(0, 0.02) embedding."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without making them."""
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def attend_rows(segment_ids: jax.Array, prefix_ids: jax.Array) -> Attend:
    """``attend`` for packed rows; the flat tokens are those of int32[B, T] row by row. Keeps no cache.

    Prefix and own tokens are two stretches, as in the sampler, so that both add up in the same order.
    """
    masks = row_masks(segment_ids, prefix_ids)
    B = segment_ids.shape[0]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        k, v = by_head(k, B), by_head(v, B)
        return grouped_query_attention(q, [KeyValues(k, v, mask) for mask in masks]), cache

    return attend


def by_head(x: jax.Array, num_rows: int) -> jax.Array:
    """dtype[B * S, K, H] -> dtype[B, K, S, H], the layout of keys and values."""
    return x.reshape(num_rows, -1, *x.shape[1:]).swapaxes(1, 2)
