"""A policy: weights on a mesh, with the tokenizer and chat template that belong to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, init_params
from rlvr_jax.models.weights import load_weights, resolve_model
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import Tokenizer, check_vocab, load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What a model directory or file holds: NumPy params on the host, float32."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    chat: ChatTemplate


TINY = "tiny-random"


def load_pretrained(name_or_path: str | Path) -> Pretrained:
    """Loads weights, tokenizer and chat template.

    Args:
      name_or_path: ``smollm2-135m-instruct``, a Hugging Face directory, a GGUF file, or ``tiny-random`` (random weights
        on bytes, for smoke tests).

    Raises:
      WeightsError: nothing there, damaged, or the tokenizer is of another model.
    """
    if name_or_path == TINY:
        return _tiny_random()
    path = resolve_model(name_or_path)
    tokenizer = load_tokenizer(path)
    config, params = load_weights(path)
    check_vocab(tokenizer, config)
    return Pretrained(
        config=config, params=params, tokenizer=tokenizer, chat=ChatTemplate(tokenizer)
    )


def _tiny_random() -> Pretrained:
    tokenizer = byte_level_tokenizer()
    config = ModelConfig(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    params = jax.tree.map(np.asarray, init_params(config, jax.random.key(0)))
    return Pretrained(
        config=config, params=params, tokenizer=tokenizer, chat=ChatTemplate(tokenizer)
    )
