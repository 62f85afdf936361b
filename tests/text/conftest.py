"""A vocabulary small enough to reason about: 256 bytes, one merge (``ab``), three special tokens, two plain added."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.weights import resolve_model
from rlvr_jax.text.tokenizer import Tokenizer, load_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_backend() -> tokenizers.Tokenizer:
    symbols = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    backend.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)]
    )
    return backend


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(
        tiny_backend,
        settings={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        chat_template=CHATML,
    )


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(resolve_model("smollm2-135m-instruct"))
    except WeightsError as error:
        pytest.skip(f"SmolLM2 is not installed: {error}")
