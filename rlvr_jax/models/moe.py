"""A mixture of experts in place of the MLP: every token goes to the k experts that its router prefers.

Tokens are sorted by expert, so that each expert's are one stretch of rows, and ``jax.lax.ragged_dot`` multiplies every
stretch by its own kernel: no capacity, no token is dropped. The router is float32 in every compute dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.linear import ACTIVATIONS, init_kernel


class Routing(NamedTuple):
    """Where the tokens of a layer went; of a whole model, stacked on axis 0.

    experts: int32[N, k], the chosen ones; probs: float32[N, E], the router's distribution.
    """

    experts: jax.Array
    probs: jax.Array


class Experts(nnx.Module):
    """sum over the chosen experts e of weight_e * down_e(activation(gate_e x) * up_e x) (Shazeer et al. 2017)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.router = init_kernel(rngs, c.embed_dim, c.num_experts)
        self.gate = init_kernel(rngs, c.num_experts, c.embed_dim, c.mlp_dim)
        self.up = init_kernel(rngs, c.num_experts, c.embed_dim, c.mlp_dim)
        self.down = init_kernel(rngs, c.num_experts, c.mlp_dim, c.embed_dim)

    def __call__(
        self, x: jax.Array, replayed: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """dtype[N, D] -> (dtype[N, D], where the tokens went).

        Args:
          x: the tokens.
          replayed: int32[N, k], experts to use instead of the router's choice; their weights are still the router's.
        """
        c, (N, D) = self.config, x.shape
        k = c.experts_per_token
        logits = jnp.dot(x, self.router[...].astype(x.dtype), preferred_element_type=jnp.float32)
        probs = jax.nn.softmax(logits, axis=-1)
        experts = jax.lax.top_k(probs, k)[1] if replayed is None else replayed
        weights = jnp.take_along_axis(probs, experts, axis=1)
        if c.norm_expert_weights:
            weights = weights / jnp.sum(weights, axis=1, keepdims=True)

        order = jnp.argsort(experts.reshape(-1), stable=True)  # [N * k]: (token, choice) by expert
        sizes = jnp.bincount(experts.reshape(-1), length=c.num_experts).astype(jnp.int32)
        rows = x[order // k]

        def by_expert(rows: jax.Array, kernel: nnx.Param) -> jax.Array:
            return jax.lax.ragged_dot(
                rows, kernel[...].astype(x.dtype), sizes, preferred_element_type=jnp.float32
            )

        gate = ACTIVATIONS[c.activation](by_expert(rows, self.gate)).astype(x.dtype)
        out = by_expert(gate * by_expert(rows, self.up).astype(x.dtype), self.down)
        out = out[jnp.argsort(order)].reshape(N, k, D)
        return jnp.einsum("nkd,nk->nd", out, weights).astype(x.dtype), Routing(experts, probs)


def load_balancing_loss(routing: Routing, counted: jax.Array) -> jax.Array:
    """E * sum over experts of (share of the choices) * (mean router probability), over all layers' tokens at once.

    1 * k when the load is even, more when it is not (Fedus et al. 2021, equations 4 to 6; as transformers computes it).

    Args:
      routing: of all layers, stacked: int32[L, N, k] and float32[L, N, E].
      counted: bool[N], the tokens that count: no padding.

    Returns:
      float32[]. Its gradient goes through the probabilities alone.
    """
    L, _, E = routing.probs.shape
    weight = counted.astype(jnp.float32)
    total = L * jnp.maximum(jnp.sum(weight), 1.0)
    chosen = jax.nn.one_hot(routing.experts, E, dtype=jnp.float32).sum(2)  # [L, N, E]
    share = jnp.einsum("lne,n->e", chosen, weight) / total
    mean = jnp.einsum("lne,n->e", routing.probs, weight) / total
    return E * jnp.sum(share * mean)
