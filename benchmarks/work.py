"""The work that is measured: shapes, random weights, number prompts, and a reward anybody can compute.

Token i is the decimal number i, and the end-of-text id lies outside the model's vocabulary: every sample has exactly
``new_tokens`` tokens. The peers are given the same prompts, the same reward and the same number of tokens.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from rlvr_jax.models.config import SMOLLM2_135M, ModelConfig
from rlvr_jax.text.tokenizer import Tokenizer
from rlvr_jax.types import Message, Task

MODELS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(
        vocab_size=512,
        num_layers=4,
        embed_dim=128,
        mlp_dim=512,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        rope_theta=100000.0,
    ),
    "smollm2": SMOLLM2_135M,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """How much is sampled and trained in a step: P prompts, G samples each, fixed lengths in tokens."""

    prompts: int
    group: int
    prompt_len: int
    new_tokens: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.group

    @property
    def sampled_tokens(self) -> int:
        return self.sequences * self.new_tokens

    @property
    def sequence_tokens(self) -> int:
        """Tokens of all samples with their prompts: what a trainer that shares nothing computes."""
        return self.sequences * (self.prompt_len + self.new_tokens)

    @property
    def shared_tokens(self) -> int:
        """Tokens of all samples, each prompt counted once."""
        return self.prompts * self.prompt_len + self.sampled_tokens


SHAPES = {
    "tiny": Shape(prompts=32, group=8, prompt_len=16, new_tokens=32),
    "smollm2": Shape(prompts=8, group=8, prompt_len=64, new_tokens=64),
}


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """One token a number below ``vocab_size``; special ids lie above. A conversation is its first message."""
    vocabulary = {str(number): number for number in range(vocab_size)}
    vocabulary |= {"<pad>": vocab_size, "<eos>": vocab_size + 1, "<unk>": vocab_size + 2}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    settings = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return Tokenizer(
        backend,
        settings={**settings, "padding_side": "left"},
        chat_template="{{ messages[0]['content'] }}",
    )


def number_tasks(vocab_size: int, shape: Shape, seed: int) -> list[Task]:
    """P prompts of exactly ``prompt_len`` tokens, the same as the peers' for a seed."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (shape.prompts, shape.prompt_len))
    return [
        Task(
            id=f"{seed}-{index}",
            domain="benchmark",
            prompt=(Message(role="user", content=" ".join(map(str, row))),),
            answer=None,
        )
        for index, row in enumerate(ids.tolist())
    ]


def even_fraction(task: Task, response: str) -> float:
    """Share of even numbers in the response: the reward of the work, judged in a worker process."""
    numbers = response.split()
    return sum(int(number) % 2 == 0 for number in numbers) / max(1, len(numbers))
