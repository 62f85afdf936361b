"""A mixture of experts in place of the MLP: every token goes to the k experts that its router prefers.

Tokens are sorted by expert, so that each expert's are one stretch of rows, and ``jax.lax.ragged_dot`` multiplies every
stretch by its own kernel: no capacity, no token is dropped. The router is float32 in every compute dtype.

The preference is a softmax of the router's logits, or their sigmoids with a bias that takes part in choosing alone
(DeepSeek-V3, arXiv 2412.19437). Its publishers move that bias to even the load out, without a gradient; here it stays
as it was published.

On a mesh every device routes its own tokens. Where experts are divided over the ``expert`` axis, its devices show one
another their tokens, each adds up what its own experts say of all of them, and the sums go back to where the tokens
came from: an all-gather and a reduce-scatter, exact whatever the load.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.distributed.sharding import axis_size, per_device
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.linear import ACTIVATIONS, init_kernel

# Of one device. Beyond it, the tokens of the expert axis are taken a device's at a time: all k copies of all of them
# would not fit into memory, and so many fill a matrix product anyway.
TOKENS_AT_ONCE = 2048


class Routing(NamedTuple):
    """Where the tokens of a layer went; of a whole model, stacked on axis 0.

    experts: int32[N, k], the chosen ones; probs: float32[N, E], the router's distribution (scores over their sum).
    """

    experts: jax.Array
    probs: jax.Array


class Load(NamedTuple):
    """How the tokens of a layer were spread over its experts; of a whole model, stacked on axis 0.

    choices: float32[E], how many times each was chosen; probs: float32[E], the router's probabilities, summed.
    """

    choices: jax.Array
    probs: jax.Array


class Experts(nnx.Module):
    """sum over the chosen experts e of weight_e * down_e(activation(gate_e x) * up_e x) (Shazeer et al. 2017)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        c = self.config = config
        self.router = init_kernel(rngs, c.embed_dim, c.num_experts)
        self.router_bias = nnx.Param(jnp.zeros((c.num_experts,))) if c.router_bias else None
        self.gate = init_kernel(rngs, c.num_experts, c.embed_dim, c.mlp_dim)
        self.up = init_kernel(rngs, c.num_experts, c.embed_dim, c.mlp_dim)
        self.down = init_kernel(rngs, c.num_experts, c.mlp_dim, c.embed_dim)

    def __call__(
        self, x: jax.Array, replayed: jax.Array | None = None
    ) -> tuple[jax.Array, Routing]:
        """dtype[N, D] -> (dtype[N, D], where the tokens went).

        Args:
          x: the tokens; on a mesh, N must be divisible by the axes that tokens are spread over.
          replayed: int[N, k], experts to use instead of the router's choice, whose weights are still the router's;
            -1 where the router chooses.
        """
        flat, into = ("tokens", None), ("experts", None, "mlp")
        axes = {"gate": into, "up": into, "down": ("experts", "mlp", None), "ids": ("experts",)}
        mixture = per_device(
            functools.partial(_mixture, self.config),
            arguments=(flat, (), axes, flat),
            results=(flat, flat, flat),
        )
        kernels = {
            "gate": self.gate[...],
            "up": self.up[...],
            "down": self.down[...],
            "ids": jnp.arange(self.config.num_experts),
        }
        bias = None if self.router_bias is None else self.router_bias[...]
        out, experts, probs = mixture(x, (self.router[...], bias), kernels, replayed)
        return out, Routing(experts, probs)


def _mixture(
    config: ModelConfig,
    x: jax.Array,
    router: tuple[jax.Array, jax.Array | None],
    kernels: dict[str, jax.Array],
    replayed: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sums, choices, probabilities) of a device's tokens [n, D]; ``kernels`` and ``ids`` are those of its experts."""
    kernel, bias = router
    logits = jnp.dot(x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    softmax = config.router_scores == "softmax"
    scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
    preferred = _in_best_groups(config, scores if bias is None else scores + bias[None, :])
    experts = jax.lax.top_k(preferred, config.experts_per_token)[1]
    if replayed is not None:
        experts = jnp.where(replayed < 0, experts, replayed)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.norm_expert_weights:
        weights = weights / jnp.sum(weights, axis=1, keepdims=True)
    if config.routed_scale != 1.0:
        weights = weights * config.routed_scale
    probs = scores if softmax else scores / jnp.sum(scores, axis=1, keepdims=True)

    own_part = functools.partial(_own_part, config, kernels)
    if axis_size("expert") == 1:
        out = own_part((x, experts, weights))
    else:
        everyones = jax.lax.all_gather((x, experts, weights), "expert")  # [devices, n, ...]
        if x.shape[0] > TOKENS_AT_ONCE:
            out = jax.lax.map(jax.checkpoint(own_part), everyones)
        else:
            out = own_part(jax.tree.map(lambda part: part.reshape(-1, part.shape[-1]), everyones))
        out = out.reshape(-1, x.shape[1])
        out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
    if axis_size("tensor") > 1:
        out = jax.lax.psum(out, "tensor")
    return out.astype(x.dtype), experts, probs


def _in_best_groups(config: ModelConfig, preferred: jax.Array) -> jax.Array:
    """float32[n, E], -inf outside a token's best groups: those with the largest sums of their two best experts."""
    if config.groups_per_token == config.expert_groups:
        return preferred
    grouped = preferred.reshape(preferred.shape[0], config.expert_groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(grouped, 2)[0].sum(-1), config.groups_per_token)[1]
    inside = jax.nn.one_hot(best, config.expert_groups, dtype=bool).any(1)
    return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(preferred.shape)


def _own_part(
    config: ModelConfig,
    kernels: dict[str, jax.Array],
    tokens: tuple[jax.Array, jax.Array, jax.Array],
) -> jax.Array:
    """float32[N, D], what the experts of a device add to (x [N, D], experts [N, k], weights [N, k])."""
    x, experts, weights = tokens
    (N, k), num_own = experts.shape, kernels["ids"].shape[0]
    slots = (experts - kernels["ids"][0]).reshape(-1)
    divided = num_own < config.num_experts
    if divided:
        slots = jnp.where((slots >= 0) & (slots < num_own), slots, num_own)  # others' come last
    order = jnp.argsort(slots, stable=True)  # [N * k]: (token, choice) by expert
    sizes = jnp.bincount(slots, length=num_own).astype(jnp.int32)
    inside = (jnp.arange(N * k) < jnp.sum(sizes))[:, None]

    def own(rows: jax.Array) -> jax.Array:
        """Without the rows that are in no stretch: what a product makes of them, either way, is left open."""
        return jnp.where(inside, rows, 0) if divided else rows

    def by_expert(rows: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(
            rows, kernel.astype(x.dtype), sizes, preferred_element_type=jnp.float32
        )

    rows = own(x[order // k])
    gate = ACTIVATIONS[config.activation](by_expert(rows, kernels["gate"])).astype(x.dtype)
    out = own(by_expert(gate * by_expert(rows, kernels["up"]).astype(x.dtype), kernels["down"]))
    return jnp.einsum("nkd,nk->nd", out[jnp.argsort(order)].reshape(N, k, -1), weights)


def expert_load(routing: Routing, counted: jax.Array) -> Load:
    """The load of a layer.

    Args:
      routing: of the layer: int32[N, k] and float32[N, E].
      counted: bool[N], the tokens that count.
    """
    chosen = jax.nn.one_hot(routing.experts, routing.probs.shape[-1], dtype=jnp.float32).sum(1)
    return Load(*(jnp.sum(jnp.where(counted[:, None], x, 0.0), 0) for x in (chosen, routing.probs)))


def load_balancing_loss(
    load: Load, *, experts_per_token: int, whole: Load | None = None
) -> jax.Array:
    """E * sum over experts of (share of the choices) * (mean router probability), over all layers' tokens at once.

    1 * k when the load is even, more when it is not (Fedus et al. 2021, equations 4 to 6; as transformers computes it).

    Args:
      load: of all layers, stacked: float32[L, E] each.
      experts_per_token: k.
      whole: the load of the whole batch when ``load`` is that of a part: the losses of all parts add up to the batch's,
        and so do their gradients.

    Returns:
      float32[]. Its gradient goes through the probabilities alone.
    """
    choices = (load if whole is None else whole).choices.sum(0)  # [E]
    total = jnp.maximum(jnp.sum(choices) / experts_per_token, 1.0)  # tokens, in each layer anew
    share, mean = choices / total, load.probs.sum(0) / total
    return share.shape[0] * jnp.sum(jax.lax.stop_gradient(share) * mean)
