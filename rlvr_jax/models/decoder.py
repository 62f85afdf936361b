"""The one decoder of all families, on flat tokens [N, D]: embedding, layers stacked on axis 0, final norm, head.

What a layer does is in ``layers.py``; which of its parts a model has, in its ``ModelConfig``. Trainer, prefill and
decode run the same ``Layer``; only ``attend`` differs (which keys a query looks at) and whether the layers are scanned
(training, prefill: compile time does not grow with depth) or unrolled (decode: a scan would copy every weight at every
token). Activations have the dtype of ``dtype``. Parameters are float32 or bfloat16; what is no kernel of a layer is
widened to float32 where it is used, so that gradients add up in float32 and are rounded to the parameter's dtype once.

``init_params`` makes the nested dict of parameters, ``bind`` turns such a dict back into the module:

    params = init_params(config, jax.random.key(0))
    model = bind(config, params)
    hidden, _ = model(tokens, positions, attend_rows(segment_ids, prefix_ids))   # tokens: int32[B * T]
    logits = model.logits(hidden)                                                # float32[B * T, V]
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from rlvr_jax.distributed.columns import flat_tokens, whole_rows
from rlvr_jax.distributed.sharding import axis_size, constrain, path_name
from rlvr_jax.models.attention import (
    Keys,
    KeyValues,
    row_masks,
)
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.layers import Attend, AttentionRule, Layer, RMSNorm
from rlvr_jax.models.linear import (
    MATMUL,
    AdaptedKernel,
    Kernel,
    computed_kernel,
    in_few_bits,
    init_kernel,
    matmul,
    matmul_by_rows,
    soft_cap,
)
from rlvr_jax.models.moe import Routing
from rlvr_jax.models.quantized import QuantizedKernel
from rlvr_jax.models.rope import Table, layer_tables

Params = Any  # nested dict of arrays
THREADS_PER_DEVICE = 4  # of XLA:CPU, for exchanges in any order (``compiler_options``)

# Logical axes of every parameter that a model may have; distributed.sharding maps them to mesh axes.
PARAM_AXES: dict[str, tuple[str | None, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "layers/attn_norm/scale": ("layers", None),
    "layers/attn_post_norm/scale": ("layers", None),
    "layers/attn/q": ("layers", "embed", "heads"),
    "layers/attn/k": ("layers", "embed", "kv_heads"),
    "layers/attn/v": ("layers", "embed", "kv_heads"),
    "layers/attn/o": ("layers", "heads", "embed"),
    "layers/attn/q_bias": ("layers", "heads"),
    "layers/attn/k_bias": ("layers", "kv_heads"),
    "layers/attn/v_bias": ("layers", "kv_heads"),
    "layers/attn/o_bias": ("layers", None),
    "layers/attn/q_norm/scale": ("layers", None),
    "layers/attn/k_norm/scale": ("layers", None),
    "layers/mlp_norm/scale": ("layers", None),
    "layers/mlp_post_norm/scale": ("layers", None),
    "layers/mlp/gate": ("layers", "embed", "mlp"),
    "layers/mlp/up": ("layers", "embed", "mlp"),
    "layers/mlp/down": ("layers", "mlp", "embed"),
    "layers/mlp/gate_bias": ("layers", "mlp"),
    "layers/mlp/up_bias": ("layers", "mlp"),
    "layers/mlp/down_bias": ("layers", None),
    "layers/experts/router": ("layers", "embed", None),
    "layers/experts/router_bias": ("layers", None),
    "layers/experts/gate": ("layers", "experts", "expert_embed", "mlp"),
    "layers/experts/up": ("layers", "experts", "expert_embed", "mlp"),
    "layers/experts/down": ("layers", "experts", "mlp", "expert_embed"),
    "layers/shared/gate": ("layers", "embed", "mlp"),
    "layers/shared/up": ("layers", "embed", "mlp"),
    "layers/shared/down": ("layers", "mlp", "embed"),
    "layers/shared/token_gate": ("layers", "embed", None),
    "final_norm/scale": (None,),
    "head/kernel": ("embed", "vocab"),
}
PARAM_AXES |= {
    f"dense_{path}": axes
    for path, axes in PARAM_AXES.items()
    if re.match("layers/(?!experts|shared)", path)
}

GATHERED = ("embed", "expert_embed")  # axes of parameters that are whole where they are used

# By default XLA keeps bf16 intermediates in float32 where it likes, which differs from program to program: 3e-2 nats
# between sampler and trainer.
STRICT: dict[str, Any] = {"xla_allow_excess_precision": False}

NO_WINDOW = 1 << 30  # of a layer that sees all keys, in a model where others do not

REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(MATMUL),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[MATMUL],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "none": None,
}


class Embed(nnx.Module):
    """Token embedding, also the head when tied."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.embed_dim)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape) * 0.02)


class Head(nnx.Module):
    """Output projection of untied models."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.kernel = init_kernel(rngs, config.embed_dim, config.vocab_size)


class Decoder(nnx.Module):
    """Embedding, stacked layers, final norm, head."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embed(config, rngs=rngs)

        def stack(count: int, *, dense: bool) -> Layer:
            @nnx.split_rngs(splits=count)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def layer(rngs: nnx.Rngs) -> Layer:
                return Layer(config, dense=dense, rngs=rngs)

            return layer(rngs)

        for name, layers in config.stacks.items():
            setattr(self, name, stack(len(layers), dense=name == "dense_layers"))
        self.final_norm = RMSNorm(config.embed_dim, config)
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
        hidden, caches, _ = self.routed(tokens, positions, attend, caches, dtype=dtype, remat=remat)
        return hidden, caches

    def routed(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Any = None,
        *,
        replayed: jax.Array | None = None,
        observe: Callable[[Routing], Any] = lambda routing: routing,
        dtype: Any = jnp.float32,
        remat: str = "none",
    ) -> tuple[jax.Array, Any, Any]:
        """As a call, and what ``observe`` makes of the routing of each layer with experts, stacked; None without any.

        ``replayed``, int[layers with experts, N, k], is where the tokens shall go instead: see ``Experts``.
        """
        chex.assert_rank([tokens, positions], 1)
        of_layer, all_alike = self._rules(positions)

        def scan(name: str, x: jax.Array, caches: Any, replayed: Any) -> tuple[jax.Array, Any]:
            graphdef, stacked = nnx.split(getattr(self, name))

            def body(x: jax.Array, of_scan: tuple[Any, Any, Any, Any]) -> tuple[jax.Array, Any]:
                state, cache, index, experts = of_scan
                rope, rule = of_layer(0 if index is None else index)
                layer = nnx.merge(graphdef, jax.tree.map(_widened_vector, state))
                x, cache, routing = layer(x, rope, attend, rule, cache, experts)
                return x, (cache, None if routing is None else observe(routing))

            if remat != "none":
                body = jax.checkpoint(body, policy=REMAT_POLICIES[remat], prevent_cse=False)
            layers = self.config.stacks[name]
            index = None if all_alike else jnp.arange(layers.start, layers.stop)
            caches = jax.tree.map(lambda cache: cache[layers.start : layers.stop], caches)
            return jax.lax.scan(body, x, (stacked, caches, index, replayed))

        x, done, observed = self._embedded(tokens, dtype), [], None
        for name in self.config.stacks:
            x, (part, observed) = scan(name, x, caches, replayed if name == "layers" else None)
            done.append(part)
        caches = jax.tree.map(lambda *parts: jnp.concatenate(parts), *done)
        return self.final_norm(x), caches, observed

    def unrolled(
        self,
        layers: Sequence[Layer],
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        caches: Sequence[Any],
        *,
        dtype: Any = jnp.float32,
    ) -> tuple[jax.Array, list[Any], list[Routing | None]]:
        """The maths of ``routed`` with ``layers`` from ``unstack``, one after another, for decoding."""
        of_layer, _ = self._rules(positions)
        x = self._embedded(tokens, dtype)
        new_caches, routings = [], []
        for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            rope, rule = of_layer(index)
            x, cache, routing = _dense_after(layer, x)(x, rope, attend, rule, cache)
            new_caches.append(cache)
            routings.append(routing)
        return self.final_norm(x), new_caches, routings

    def _embedded(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        x = self.embed.embedding[...][tokens].astype(dtype)  # its gradient adds up in float32
        if self.config.embed_scale != 1.0:
            x = x * jnp.asarray(self.config.embed_scale, dtype)
        return constrain(x, "tokens", None)

    def _rules(
        self, positions: jax.Array
    ) -> tuple[Callable[[int | jax.Array], tuple[Table, AttentionRule]], bool]:
        """RoPE and rule of a layer by its index (an int, or int32[] in a scan), and whether all layers' are alike."""
        c = self.config
        tables, table_of = layer_tables(c, positions)
        all_tables = [jnp.stack(part) for part in zip(*tables, strict=True)] if tables[1:] else []
        windows = [
            c.sliding_window if layer in c.local_layers else NO_WINDOW
            for layer in range(c.num_layers)
        ]

        def of_layer(index: int | jax.Array) -> tuple[Table, AttentionRule]:
            table = _pick(table_of, index)
            if isinstance(table, int):
                rope = tables[table]
            else:
                rope = (all_tables[0][table], all_tables[1][table])
            window = _pick(windows, index)
            return rope, AttentionRule(
                scale=c.attn_scale,
                softcap=c.attn_softcap,
                window=None if isinstance(window, int) and window == NO_WINDOW else window,
                positions=positions,
            )

        return of_layer, len(tables) == 1 and len(set(windows)) == 1

    def unstack(self, dtype: Any) -> list[Layer]:
        """The layers one by one, kernels cast to ``dtype`` and gathered (but for experts and the tensor axis): one
        copy, made once a program. Adapters are merged into their kernels: they cost decoding nothing. Kernels in few
        bits stay so, or there would be a dense copy of the model: they and their adapters are merged at every token."""
        return [layer for name in self.config.stacks for layer in self._unstack(name, dtype)]

    def _unstack(self, name: str, dtype: Any) -> list[Layer]:
        graphdef, state = nnx.split(getattr(self, name))
        stacked = nnx.to_pure_dict(state)

        def pick(path: Any, param: Kernel, index: int) -> Kernel:
            axes = PARAM_AXES[f"{name}/{path_name(path)}"][1:]
            if in_few_bits(param):
                return param[index]
            kernel = _widened_vector(computed_kernel(param[index]))
            if isinstance(param, AdaptedKernel) or param.ndim > 2:
                kernel = kernel.astype(dtype)
            return constrain(kernel, *(None if axis in GATHERED else axis for axis in axes))

        return [
            nnx.merge(
                graphdef,
                nnx.State(
                    jax.tree_util.tree_map_with_path(
                        functools.partial(pick, index=index),
                        stacked,
                        is_leaf=lambda param: isinstance(param, AdaptedKernel | QuantizedKernel),
                    )
                ),
            )
            for index in range(len(self.config.stacks[name]))
        ]

    @property
    def head_kernel(self) -> jax.Array:
        """What ``logits`` multiplies with: float32[V, D] of the tied embedding, or float32[D, V]."""
        return self.embed.embedding[...] if self.config.tie_embeddings else self.head.kernel[...]

    @property
    def head_axes(self) -> tuple[str | None, ...]:
        """Logical axes of ``head_kernel``."""
        return PARAM_AXES["embed/embedding" if self.config.tie_embeddings else "head/kernel"]

    def gathered_head(self) -> jax.Array:
        """``head_kernel`` gathered, for a loop that uses it many times."""
        axes = (None if axis in GATHERED else axis for axis in self.head_axes)
        return constrain(self.head_kernel, *axes)

    def logits(self, hidden: jax.Array, kernel: jax.Array | None = None) -> jax.Array:
        """float32[N, V] from dtype[N, D]; the head is float32 in every compute dtype.

        ``kernel`` is a copy of ``head_kernel`` to use, for who has placed it otherwise.
        """
        kernel = self.head_kernel if kernel is None else kernel
        product = matmul_by_rows if self.config.tie_embeddings else matmul
        return soft_cap(product(hidden.astype(jnp.float32), kernel), self.config.final_softcap)


def compiler_options(mesh: jax.sharding.Mesh, *, backward: bool = False) -> dict[str, Any]:
    """Of every program that computes log-probabilities on ``mesh``; ``backward`` if it also differentiates them.

    XLA:CPU by default orders a program for more of it to run at once, with arrays made long before they are needed, and
    takes a float32 copy of all bfloat16 activations out of the backward loop over the layers. On several devices the
    better order is taken only where they have threads enough: exchanges of a device that run at once can take all of
    the threads that the devices share, and the last one finds none to join them (a deadlock, seen with eight devices
    on two cores). XLA:CPU has as many threads as the variable NPROC says, or the machine has cores.
    """
    options = dict(STRICT)
    if mesh.devices.flat[0].platform == "cpu":
        threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
        if mesh.size == 1 or threads >= THREADS_PER_DEVICE * mesh.size:
            options["xla_cpu_scheduler_type"] = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
            if backward:
                options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return options


def _dense_after(layer: Layer, x: jax.Array) -> Layer:
    """The layer, whose kernels in few bits cannot be made dense before x is there.

    They do not change from token to token: without this the compiler takes their dense copies, those of all layers, out
    of the loop over tokens.
    """
    graphdef, state = nnx.split(layer)
    params = nnx.to_pure_dict(state)
    if not any(map(in_few_bits, jax.tree.leaves(params, is_leaf=in_few_bits))):
        return layer

    def held(param: Any) -> Any:
        return jax.lax.optimization_barrier((param, x))[0] if in_few_bits(param) else param

    return nnx.merge(graphdef, nnx.State(jax.tree.map(held, params, is_leaf=in_few_bits)))


def _pick(values: Sequence[int], index: int | jax.Array) -> int | jax.Array:
    """values[index]; an int when the index is one, or all values are the same."""
    if isinstance(index, int) or len(set(values)) == 1:
        return values[index if isinstance(index, int) else 0]
    return jnp.asarray(values, jnp.int32)[index]


@functools.lru_cache
def _graphdef(config: ModelConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]


def bind(config: ModelConfig, params: Params) -> Decoder:
    """The module that holds ``params`` (arrays or tracers); costs nothing at run time if they are float32."""
    outer = {name: widened(part) for name, part in params.items() if name not in config.stacks}
    return nnx.merge(_graphdef(config), nnx.State({**params, **outer}))


def widened(tree: Any) -> Any:
    """The same numbers with bfloat16 arrays as float32; the others as they are."""

    def one(leaf: jax.Array) -> jax.Array:
        return leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf

    return jax.tree.map(one, tree)


def _widened_vector(of_layer: jax.Array) -> jax.Array:
    """A layer's norms and biases widened. Its kernels are cast by the products, which keep them as they are."""
    return widened(of_layer) if of_layer.ndim == 1 else of_layer


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, float32: normal(0, 1/sqrt(fan_in)) kernels, normal(0, 0.02) embedding."""
    return nnx.to_pure_dict(nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def abstract_params(config: ModelConfig) -> Params:
    """Shapes and dtypes of the parameters, without making them."""
    return jax.tree.map(lambda leaf: leaf, _abstract_params(config))  # dicts of the caller's own


@functools.lru_cache
def _abstract_params(config: ModelConfig) -> Params:
    return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def attend_rows(
    segment_ids: jax.Array, prefix_ids: jax.Array, prefix_width: int | None = None
) -> Attend:
    """``attend`` for packed rows; the flat tokens are those of int32[B, T], as by ``flat_tokens``. Keeps no cache.

    Prefix and own tokens are two stretches, as in the sampler, so that both add up in the same order. On a mesh with a
    context axis a device gathers the keys and values of its rows, and attends to them from its own tokens: scores are
    divided over the axis, and evenly so, since masked ones are computed like the others.

    Args:
      segment_ids, prefix_ids: int32[B, T] as in ``TrainBatch``.
      prefix_width: the segments that others continue lie in the first so many columns, 0 if there are none; None if
        they lie anywhere. What is outside is not looked at, so it must be an upper bound.
    """
    B, T = segment_ids.shape
    keys, shards = None, axis_size("context")
    if shards > 1:
        columns = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        segment_ids, prefix_ids, columns = map(flat_tokens, (segment_ids, prefix_ids, columns))
        keys = Keys(whole_rows(segment_ids, B), columns.reshape(B * shards, -1))
        segment_ids, prefix_ids = (x.reshape(B * shards, -1) for x in (segment_ids, prefix_ids))
    prefix, own = row_masks(segment_ids, prefix_ids, keys)
    masks = [own] if prefix_width == 0 else [prefix[:, :, :prefix_width], own]

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, rule: AttentionRule
    ) -> tuple[jax.Array, Any]:
        k, v = (whole_rows(x, B).swapaxes(1, 2) for x in (k, v))
        at, key_at = rule.positions.reshape(B * shards, -1), whole_rows(rule.positions, B)
        stretches = [
            KeyValues(k[:, :, :width], v[:, :, :width], rule.near(mask, at, key_at[:, :width]))
            for mask in masks
            for width in [mask.shape[2]]
        ]
        return rule.attention(q, stretches), cache

    return attend


def by_head(x: jax.Array, num_rows: int) -> jax.Array:
    """dtype[B * S, K, H] -> dtype[B, K, S, H], the layout of keys and values."""
    return x.reshape(num_rows, -1, *x.shape[1:]).swapaxes(1, 2)
