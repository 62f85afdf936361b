"""Ids against references, text that stays text, files that are refused by name."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import SMOLLM2_135M, ModelConfig
from rlvr_jax.text.tokenizer import Tokenizer, check_vocab, load_tokenizer

# Ids from llama.cpp's own implementation of this tokenizer, reading the same GGUF; "special" with special tokens
# parsed, where that makes a difference. Accents, CJK, code, numbers, emoji, every special token.
REFERENCE = json.loads((pathlib.Path(__file__).parent / "smollm2_ids.json").read_text())


def _write(directory: pathlib.Path, tokenizer: Tokenizer) -> pathlib.Path:
    for name, text in tokenizer.files().items():
        (directory / name).write_text(text, encoding="utf-8")
    return directory


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: ascii(entry["text"][:24]))
def test_smollm2_ids_equal_llama_cpp(smollm2_tokenizer: Tokenizer, entry: dict) -> None:
    text = entry["text"]
    assert smollm2_tokenizer.encode(text) == entry["plain"]
    parsed = smollm2_tokenizer.encode(text, allow_special=True)
    assert parsed == entry.get("special", entry["plain"])
    assert smollm2_tokenizer.decode(entry["plain"]) == text
    assert smollm2_tokenizer.decode(parsed, skip_special=False) == text
    assert b"".join(map(smollm2_tokenizer.token_bytes, parsed)) == text.encode()


def test_smollm2_special_ids(smollm2_tokenizer: Tokenizer) -> None:
    tokenizer = smollm2_tokenizer
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
    assert tokenizer.stop_token_ids == (2,)
    assert sorted(tokenizer.special_tokens.values()) == list(range(17))
    check_vocab(tokenizer, SMOLLM2_135M)


def test_transformers_reads_the_saved_files_and_gives_the_same_ids(
    smollm2_tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    reason = "transformers is the reference; pip install 'rlvr_jax[parity]'"
    transformers = pytest.importorskip("transformers", reason=reason)
    reference = transformers.AutoTokenizer.from_pretrained(_write(tmp_path, smollm2_tokenizer))
    for entry in REFERENCE:
        ids = reference(entry["text"], add_special_tokens=False)["input_ids"]
        assert ids == smollm2_tokenizer.encode(entry["text"], allow_special=True), entry["text"]
    assert (reference.eos_token_id, reference.pad_token_id) == (2, 2)


def test_special_tokens_in_text_are_text_unless_allowed(tiny_tokenizer: Tokenizer) -> None:
    text = "x<|im_end|>y"
    assert tiny_tokenizer.eos_id not in tiny_tokenizer.encode(text)
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text)) == text
    assert tiny_tokenizer.encode(text, allow_special=True)[1] == tiny_tokenizer.eos_id


def test_plain_and_parsing_encodes_do_not_disturb_each_other_in_threads(
    tiny_tokenizer: Tokenizer,
) -> None:
    text = "<|im_end|>ab" * 20
    expected = [tiny_tokenizer.encode(text, allow_special=flag) for flag in (False, True)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        got = list(
            pool.map(lambda i: tiny_tokenizer.encode(text, allow_special=bool(i % 2)), range(400))
        )
    assert got == expected * 200


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_text_survives_encoding_and_decoding(tiny_tokenizer: Tokenizer, text: str) -> None:
    ids = tiny_tokenizer.encode(text)
    assert tiny_tokenizer.decode(ids) == text
    assert b"".join(map(tiny_tokenizer.token_bytes, ids)) == text.encode()


def test_decode_strips_nothing_and_skips_only_special_tokens(tiny_tokenizer: Tokenizer) -> None:
    ids = [*tiny_tokenizer.encode(" <think>answer \n"), tiny_tokenizer.eos_id]
    assert tiny_tokenizer.decode(ids) == " <think>answer \n"
    assert tiny_tokenizer.decode(ids, skip_special=False) == " <think>answer \n<|im_end|>"


def test_what_has_no_text_shows_as_a_replacement_character(tiny_tokenizer: Tokenizer) -> None:
    byte = next(i for i in range(3, 259) if tiny_tokenizer.token_bytes(i) == b"\xff")
    a = tiny_tokenizer.encode("a")
    assert tiny_tokenizer.decode([*a, byte, *a]) == "a\ufffda"
    assert tiny_tokenizer.decode([*a, tiny_tokenizer.vocab_size, *a, -1]) == "a\ufffda\ufffd"
    with pytest.raises(ValueError, match="not in the vocabulary"):
        tiny_tokenizer.token_bytes(tiny_tokenizer.vocab_size)


def test_bytes_of_a_sentencepiece_vocabulary() -> None:
    vocab = {"</s>": 0, "▁the": 1, "<0xE2>": 2}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[], byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    tokenizer = Tokenizer(backend, settings={"eos_token": "</s>"})
    assert [tokenizer.token_bytes(i) for i in range(3)] == [b"</s>", b" the", b"\xe2"]


def test_truncation_and_padding_of_the_file_are_ignored(
    tiny_tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    """PrimeIntellect-ai/prime-rl#1986: a prompt cut on the left by the tokenizer, before any length check ran."""
    content = json.loads(tiny_tokenizer.files()["tokenizer.json"])
    content["truncation"] = {
        "direction": "Left",
        "max_length": 512,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 2048}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    _write(tmp_path, tiny_tokenizer)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(tmp_path).encode("c" * 900)) == 900


def test_saved_files_read_back_the_same(tiny_tokenizer: Tokenizer, tmp_path: pathlib.Path) -> None:
    again = load_tokenizer(_write(tmp_path, tiny_tokenizer))
    text = "<|im_start|>ab <think>é"
    assert again.encode(text, allow_special=True) == tiny_tokenizer.encode(text, allow_special=True)
    assert again.encode(text) == tiny_tokenizer.encode(text)
    assert again.chat_template == tiny_tokenizer.chat_template
    assert again.files() == tiny_tokenizer.files()


def test_directory_settings_in_every_published_spelling(
    tiny_tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer.files()["tokenizer.json"])
    config = {
        "eos_token": {"content": "<|im_end|>", "__type": "AddedToken"},
        "bos_token": None,
        "chat_template": [
            {"name": "tool_use", "template": "T"},
            {"name": "default", "template": "D"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, None, 2)
    assert tokenizer.stop_token_ids == (0, 2)
    assert tokenizer.chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert load_tokenizer(tmp_path).chat_template == "J"
    assert load_tokenizer(tmp_path).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer_config.json": None}, "no tokenizer_config.json"),
        ({"tokenizer_config.json": "[]"}, "expected a JSON object"),
        ({"tokenizer_config.json": "{"}, "is not JSON"),
        ({"tokenizer_config.json": "{}"}, "no end-of-sequence token"),
        ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, "eos_token is '</s>', which is not in the vocabulary"),
    ],
)  # fmt: skip
def test_damaged_directories_are_refused_by_name(
    tiny_tokenizer: Tokenizer, tmp_path: pathlib.Path, change: dict[str, str | None], message: str
) -> None:
    _write(tmp_path, tiny_tokenizer)
    for name, text in change.items():
        (tmp_path / name).unlink()
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(WeightsError, match=message):
        load_tokenizer(tmp_path)


def test_missing_paths_and_damaged_gguf_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(WeightsError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nothing")
    pytest.importorskip("gguf", reason="the gguf package reads GGUF files")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\0\0\0")
    with pytest.raises(WeightsError, match="cannot be read as GGUF"):
        load_tokenizer(tmp_path / "broken.gguf")


def test_gguf_tokenizers_of_unknown_kind_are_refused(tmp_path: pathlib.Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        WeightsError, match="pre-tokenizer 'llama-bpe'; expected 'gpt2' with one of"
    ):
        load_tokenizer(tmp_path / "model.gguf")


def test_a_tokenizer_larger_than_the_embedding_is_refused(
    tiny_tokenizer: Tokenizer, tiny_config: ModelConfig
) -> None:
    with pytest.raises(WeightsError, match="262 tokens, the embedding 128 rows"):
        check_vocab(tiny_tokenizer, tiny_config)


def test_a_special_token_past_the_embedding_is_no_wrong_tokenizer(
    tiny_tokenizer: Tokenizer, tiny_config: ModelConfig
) -> None:
    """Gemma 3's tokenizer has a token for images; the text models' embedding ends before it."""
    files = tiny_tokenizer.files()
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    backend.add_special_tokens(["<image_soft_token>"])
    config = dataclasses.replace(tiny_config, vocab_size=262)
    check_vocab(Tokenizer(backend, settings={"eos_token": "<|im_end|>"}), config)
    with pytest.raises(WeightsError, match="263 tokens, the embedding 262 rows"):
        check_vocab(Tokenizer(backend, settings={"eos_token": "<image_soft_token>"}), config)
    with pytest.raises(WeightsError, match="263 tokens, the embedding 261 rows"):
        check_vocab(
            Tokenizer(backend, settings={"eos_token": "<|im_end|>"}),
            dataclasses.replace(config, vocab_size=261),
        )
