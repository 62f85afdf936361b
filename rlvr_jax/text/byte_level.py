"""A tokenizer that needs no files: one token a byte, and the marks of ChatML. For smoke tests and tiny models."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rlvr_jax.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level_tokenizer() -> Tokenizer:
    """256 bytes, then ``<|im_start|>`` (256) and ``<|im_end|>`` (257, the end of a response)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    )
    return Tokenizer(backend, settings={"eos_token": "<|im_end|>"}, chat_template=CHATML)
