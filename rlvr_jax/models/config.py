"""The shape of a decoder, whatever family it came from."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How RoPE's frequencies are stretched for contexts longer than the first pretraining's; formulas in ``rope.py``.

    Attributes:
      kind: ``linear`` and ``dynamic`` (NTK) use ``factor`` alone; ``llama3``, ``yarn`` and ``longrope`` what follows.
      factor: new length / old length.
      original_length: of the first pretraining, in tokens.
      attention_factor: by which cos and sin are multiplied (``yarn``, ``longrope``).
      low_frequency_factor, high_frequency_factor: of ``llama3``.
      beta_fast, beta_slow, truncate: of ``yarn``.
      short_factors, long_factors: a divisor for each frequency (``longrope``), up to ``original_length`` and beyond.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_length: int = 0
    attention_factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Numbers that fix the maths of the decoder. Letters: V, D, F, N, K, H, L, E of the house style.

    The defaults are the llama layout; every other family sets some of the fields below the first block.

    Attributes:
      family: the published layout (``families.FAMILIES``) that the weights are saved in; no maths.
      max_length: the context, in tokens. It chooses among RoPE's frequencies where these depend on it (``rope.py``).
      rope_scaling: None for plain RoPE.
      partial_rotary_factor: the part of each head that is rotated, from its start.
      nope_layers: layers that are not rotated at all.
      sliding_window: keys that a token of a local layer sees, itself included.
      local_layers: which layers are local.
      local_rope_theta: base of the local layers' RoPE, never scaled; None for that of all layers.
      qkv_bias, o_bias, mlp_bias: whether these projections add a bias.
      qk_norm: RMS norm of queries and keys before RoPE: of each ``head``, or over ``all`` heads at once.
      pre_norm, post_norm: whether attention and MLP have a norm before, and after (both: sandwich norms).
      norm_plus_one: norms multiply by 1 + scale.
      activation: of the gate.
      embed_scale: by which embeddings are multiplied, rounded to the activations' dtype.
      attn_scale_dim: scores are divided by its square root; None for H.
      attn_softcap, final_softcap: scores and logits become cap * tanh(x / cap); 0 for neither.
      num_experts: E; 0 for a dense MLP.
      experts_per_token: how many of them each token is sent to.
      norm_expert_weights: whether the weights of a token's experts add up to 1.
      routed_scale: by which these weights are multiplied.
      router_scores: what the router makes of its logits.
      router_bias: whether a bias, which does not enter the weights, is added to the scores when experts are chosen.
      expert_groups, groups_per_token: a token is sent to experts of its best groups alone (neighbours make a group).
      shared_mlp_dim: of an MLP beside the experts that every token goes through; 0 for none.
      shared_gate: whether the token decides how much of it is added.
      num_dense_layers, dense_mlp_dim: so many layers at the start have no experts but a dense MLP, of this size.
      router_loss_coef: published weight of the load-balancing loss.

    Raises:
      ValueError: when num_heads is not a multiple of num_kv_heads, or fields contradict one another.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_length: int = 2048
    tie_embeddings: bool = True

    family: str = "llama"
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0
    nope_layers: tuple[int, ...] = ()
    sliding_window: int = 0
    local_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    pre_norm: bool = True
    post_norm: bool = False
    norm_plus_one: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    attn_scale_dim: int | None = None
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    num_experts: int = 0
    experts_per_token: int = 0
    norm_expert_weights: bool = True
    routed_scale: float = 1.0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    expert_groups: int = 1
    groups_per_token: int = 1
    shared_mlp_dim: int = 0
    shared_gate: bool = False
    num_dense_layers: int = 0
    dense_mlp_dim: int = 0
    router_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        for name in ("local_layers", "nope_layers"):
            outside = [layer for layer in getattr(self, name) if not 0 <= layer < self.num_layers]
            if outside:
                raise ValueError(
                    f"{name} has {outside}; expected layers from 0 to {self.num_layers - 1} (num_layers)"
                )
        if self.local_layers and self.sliding_window < 1:
            raise ValueError(
                f"local_layers need a sliding_window of at least 1; got {self.sliding_window}"
            )
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "longrope":
            expected = -(-int(self.head_dim * self.partial_rotary_factor) // 2)
            got = (len(scaling.short_factors), len(scaling.long_factors))
            if got != (expected, expected):
                raise ValueError(
                    f"longrope has {got[0]} short and {got[1]} long factors; expected {expected} of each, one for a "
                    "frequency: half of what is rotated of a head"
                )
        if not self.pre_norm and not self.post_norm:
            raise ValueError("pre_norm and post_norm are both off; expected at least one of them")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; expected 1 to num_experts ({self.num_experts})"
            )
        most = self.num_layers - 1 if self.num_experts else 0
        if not 0 <= self.num_dense_layers <= most:
            raise ValueError(
                f"num_dense_layers is {self.num_dense_layers}; expected 0 to {most}: a layer with experts must be left"
            )
        for wanted, size in (
            ("num_dense_layers", "dense_mlp_dim"),
            ("shared_gate", "shared_mlp_dim"),
        ):
            if getattr(self, wanted) and getattr(self, size) < 1:
                raise ValueError(
                    f"{wanted} is {getattr(self, wanted)} and {size} {getattr(self, size)}; expected at least 1"
                )
        self._check_groups()

    def _check_groups(self) -> None:
        groups, chosen = self.expert_groups, self.groups_per_token
        if groups == chosen == 1:
            return
        size = self.num_experts // max(groups, 1)
        if not 1 <= chosen <= groups or size * groups != self.num_experts or size < 2:
            raise ValueError(
                f"expert_groups is {groups} and groups_per_token {chosen}; expected {self.num_experts} experts divided "
                "into groups of at least 2, and 1 to all of them for a token"
            )
        if self.experts_per_token > chosen * size:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; expected at most {chosen * size}, the experts of "
                f"groups_per_token ({chosen}) groups of {size}"
            )

    @property
    def stacks(self) -> dict[str, range]:
        """The layers that are alike and stacked, by their name among the parameters: which of the model's they are.

        What has experts is in ``layers``.
        """
        first = self.num_dense_layers
        dense = {"dense_layers": range(first)} if first else {}
        return dense | {"layers": range(first, self.num_layers)}

    @property
    def attn_scale(self) -> float | None:
        """By which scores are multiplied; None for H^-0.5."""
        return None if self.attn_scale_dim is None else self.attn_scale_dim**-0.5

    @property
    def num_params(self) -> int:
        """Number of parameters, tied embeddings counted once."""
        D, E = self.embed_dim, self.num_experts
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * D * (q + kv) + self.qkv_bias * (q + 2 * kv) + self.o_bias * D
        attention += {"none": 0, "head": 2 * self.head_dim, "all": q + kv}[self.qk_norm]
        norms = 2 * D * (self.pre_norm + self.post_norm)

        def mlp(size: int) -> int:
            return 3 * D * size + (self.mlp_bias * (2 * size + D) if size else 0)

        experts = E * (3 * D * self.mlp_dim + D + self.router_bias)
        experts += mlp(self.shared_mlp_dim) + self.shared_gate * D
        dense = self.num_dense_layers
        mlps = dense * mlp(self.dense_mlp_dim)
        mlps += (self.num_layers - dense) * (experts if E else mlp(self.mlp_dim))
        heads = 1 if self.tie_embeddings else 2
        return heads * self.vocab_size * D + self.num_layers * (attention + norms) + mlps + D


SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    num_layers=30,
    embed_dim=576,
    mlp_dim=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    norm_eps=1e-5,
    max_length=8192,
)
