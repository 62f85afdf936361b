"""The parts of a decoder layer: norms, projections around attention, the gated MLP, and their order.

Every family is a setting of these: where the norms are, what has a bias, what is normed before RoPE. A part that a
configuration does not ask for has no parameters and leaves nothing in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.distributed.sharding import constrain
from rlvr_jax.models.attention import KeyValues, grouped_query_attention
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.linear import ACTIVATIONS, init_kernel, matmul
from rlvr_jax.models.moe import Experts, Routing
from rlvr_jax.models.rope import Table, rotate


class AttentionRule(NamedTuple):
    """How a layer scores keys and which it may see, beyond what the masks of ``attend`` say.

    scale: of the scores, None for H^-0.5; softcap: of the scores, 0 for none; window: how many keys back a query sees,
    itself included, None for all (int32[] in a scan over local and global layers); positions: int32[N], of the queries.
    """

    scale: float | None
    softcap: float
    window: int | jax.Array | None
    positions: jax.Array

    def near(self, mask: jax.Array, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """bool[B, Q, S]: mask without the keys outside the window, for positions int32[B, Q] and int32[B, S]."""
        if self.window is None:
            return mask
        return mask & (queries[:, :, None] - keys[:, None, :] < self.window)

    def attention(self, q: jax.Array, stretches: Sequence[KeyValues]) -> jax.Array:
        """See ``grouped_query_attention``."""
        return grouped_query_attention(q, stretches, scale=self.scale, softcap=self.softcap)


# (q [N, heads, H], k [N, K, H], v [N, K, H], cache of the layer, rule) -> (out [N, heads, H], cache)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any, AttentionRule], tuple[jax.Array, Any]]


def _bias(wanted: bool, size: int) -> Any:
    return nnx.Param(jnp.zeros((size,))) if wanted else None


class RMSNorm(nnx.Module):
    """x / rms(x) * scale, float32 inside (Zhang & Sennrich 2019)."""

    def __init__(self, dim: int, config: ModelConfig) -> None:
        self.config = config
        self.scale = nnx.Param(jnp.zeros((dim,)) if config.norm_plus_one else jnp.ones((dim,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(
            jnp.mean(wide * wide, -1, keepdims=True) + self.config.norm_eps
        )
        scale = self.scale[...] + 1.0 if self.config.norm_plus_one else self.scale[...]
        return (normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


class Attention(nnx.Module):
    """Projections, and norms of queries and keys, around ``attend``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        q_dim, kv_dim = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        self.q = init_kernel(rngs, c.embed_dim, q_dim)
        self.k = init_kernel(rngs, c.embed_dim, kv_dim)
        self.v = init_kernel(rngs, c.embed_dim, kv_dim)
        self.o = init_kernel(rngs, q_dim, c.embed_dim)
        self.q_bias = _bias(c.qkv_bias, q_dim)
        self.k_bias = _bias(c.qkv_bias, kv_dim)
        self.v_bias = _bias(c.qkv_bias, kv_dim)
        self.o_bias = _bias(c.o_bias, c.embed_dim)
        if c.qk_norm != "none":
            by_head = c.qk_norm == "head"
            self.q_norm = RMSNorm(c.head_dim if by_head else q_dim, c)
            self.k_norm = RMSNorm(c.head_dim if by_head else kv_dim, c)

    def __call__(
        self, x: jax.Array, rope: Table, attend: Attend, rule: AttentionRule, cache: Any
    ) -> tuple[jax.Array, Any]:
        q = matmul(x, self.q[...], self.q_bias)
        k = matmul(x, self.k[...], self.k_bias)
        if self.config.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._heads(q), self._heads(k)
        if self.config.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        v = self._heads(matmul(x, self.v[...], self.v_bias))
        out, cache = attend(q, k, v, cache, rule)
        return matmul(out.reshape(x.shape[0], -1), self.o[...], self.o_bias), cache

    def _heads(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, self.config.head_dim)


class MLP(nnx.Module):
    """down(activation(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, config: ModelConfig, size: int, *, rngs: nnx.Rngs) -> None:
        c = config
        self.activation = c.activation
        self.gate = init_kernel(rngs, c.embed_dim, size)
        self.up = init_kernel(rngs, c.embed_dim, size)
        self.down = init_kernel(rngs, size, c.embed_dim)
        self.gate_bias = _bias(c.mlp_bias, size)
        self.up_bias = _bias(c.mlp_bias, size)
        self.down_bias = _bias(c.mlp_bias, c.embed_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = matmul(x, self.gate[...], self.gate_bias).astype(jnp.float32)
        gate = ACTIVATIONS[self.activation](gate).astype(x.dtype)
        return matmul(gate * matmul(x, self.up[...], self.up_bias), self.down[...], self.down_bias)


class SharedExpert(MLP):
    """The MLP beside the experts, times sigmoid(w x) where the token decides how much of it is added (Qwen2-MoE)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, config.shared_mlp_dim, rngs=rngs)
        self.token_gate = init_kernel(rngs, config.embed_dim, 1) if config.shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = super().__call__(x)
        if self.token_gate is None:
            return out
        # A sum, not a product of matrices: with one column these add up in another order for another number of rows.
        gate = jnp.sum(x.astype(jnp.float32) * self.token_gate[...].T, -1, keepdims=True)
        return (jax.nn.sigmoid(gate) * out.astype(jnp.float32)).astype(x.dtype)


class Layer(nnx.Module):
    """Attention and MLP, each added to the stream, with norms before, after, or both.

    The MLP is a mixture of experts where the model has them and the layer is not ``dense``.
    """

    def __init__(self, config: ModelConfig, *, dense: bool = False, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.routed = bool(c.num_experts) and not dense
        if c.pre_norm:
            self.attn_norm = RMSNorm(c.embed_dim, c)
        self.attn = Attention(c, rngs=rngs)
        if c.post_norm:
            self.attn_post_norm = RMSNorm(c.embed_dim, c)
        if c.pre_norm:
            self.mlp_norm = RMSNorm(c.embed_dim, c)
        if self.routed:
            self.experts = Experts(c, rngs=rngs)
            if c.shared_mlp_dim:
                self.shared = SharedExpert(c, rngs=rngs)
        else:
            self.mlp = MLP(c, c.dense_mlp_dim if dense else c.mlp_dim, rngs=rngs)
        if c.post_norm:
            self.mlp_post_norm = RMSNorm(c.embed_dim, c)

    def __call__(
        self,
        x: jax.Array,
        rope: Table,
        attend: Attend,
        rule: AttentionRule,
        cache: Any,
        replayed: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """dtype[N, D] -> (dtype[N, D], cache, where the tokens went if there are experts); see ``Experts``."""
        pre, post = self.config.pre_norm, self.config.post_norm
        out, cache = self.attn(self.attn_norm(x) if pre else x, rope, attend, rule, cache)
        x = constrain(x + (self.attn_post_norm(out) if post else out), "tokens", None)
        out, routing = self.mlp_norm(x) if pre else x, None
        if self.routed:
            shared = self.shared(out) if self.config.shared_mlp_dim else None
            out, routing = self.experts(out, replayed)
            out = out if shared is None else out + shared
        else:
            out = self.mlp(out)
        x = constrain(x + (self.mlp_post_norm(out) if post else out), "tokens", None)
        return x, cache, routing
