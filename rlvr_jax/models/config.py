"""The shape of a decoder, whatever family it came from."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Numbers that fix the maths of the decoder. Letters: V, D, F, N, K, H, L of the house style.

    Raises:
      ValueError: when num_heads is not a multiple of num_kv_heads.
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

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"
            )

    @property
    def num_params(self) -> int:
        """Number of parameters, tied embeddings counted once."""
        attention = 2 * self.embed_dim * (self.num_heads + self.num_kv_heads) * self.head_dim
        layer = attention + 3 * self.embed_dim * self.mlp_dim + 2 * self.embed_dim
        heads = 1 if self.tie_embeddings else 2
        return heads * self.vocab_size * self.embed_dim + self.num_layers * layer + self.embed_dim


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
