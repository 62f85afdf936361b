"""Token ids from text and back: one class over Hugging Face ``tokenizers``, whatever file it came from.

The one idea: text is data. ``encode`` never turns text into special tokens unless the caller says that the text is
trusted (``allow_special=True``, used for what a chat template writes, never for what a user or a model wrote). No token
is added (no BOS), and nothing is truncated or padded, whatever the file asks for: lengths are the caller's business.
Special tokens are those the file marks as special; other added tokens (``<think>`` in some models) are ordinary
vocabulary, as they are to the library. Characters that a vocabulary cannot spell (eight bytes of
valid UTF-8 are missing from SmolLM2's, U+0004 among them) are left out.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from etils import epath
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rlvr_jax.errors import WeightsError, require


class Tokenizer:
    """A vocabulary with its special tokens and its chat template.

    Args:
      backend: the tokenizer proper; its truncation and padding are switched off.
      settings: what ``tokenizer_config.json`` holds; ``eos_token`` is needed, ``pad_token`` defaults to it.
      chat_template: Jinja source, or None when the model has none.
      stop_token_ids: ids that end a response beside ``eos_token``.

    Raises:
      WeightsError: when there is no end-of-sequence token, or a named special token is not in the vocabulary.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        settings: Mapping[str, Any],
        chat_template: str | None = None,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._settings = dict(settings)
        added = backend.get_added_tokens_decoder()
        self.chat_template = chat_template
        self.special_tokens: dict[str, int] = {t.content: i for i, t in added.items() if t.special}
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocab.values(), default=-1)
        self.text_vocab_size: int = 1 + max(
            {*vocab.values()} - {*self.special_tokens.values()}, default=-1
        )
        eos_id = self._named_id("eos_token")
        if eos_id is None:
            raise WeightsError(
                "the tokenizer names no end-of-sequence token; expected eos_token in tokenizer_config.json: add it"
            )
        self.eos_id: int = eos_id
        self.bos_id: int | None = self._named_id("bos_token")
        pad_id = self._named_id("pad_token")
        self.pad_id: int = eos_id if pad_id is None else pad_id
        self.stop_token_ids: tuple[int, ...] = tuple(sorted({eos_id, *stop_token_ids}))

    @property
    def named_tokens(self) -> dict[str, str]:
        """The tokens that have a role, by role (``bos_token``, ``eos_token``, ...), as templates expect them."""
        return {
            role: token
            for role in self._settings
            if role.endswith("_token") and (token := _token_text(self._settings[role])) is not None
        }

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of ``text``; special tokens written in it are plain text unless ``allow_special``."""
        backend = self._trusting if allow_special else self._backend
        return backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Returns the text of ``ids``, nothing stripped.

        Bytes that are not UTF-8, and ids past the vocabulary (an embedding may be padded), become U+FFFD: a sampled
        token that has no text must show, and must not end a run.
        """
        text, run = [], []
        for token_id in (*map(int, ids), self.vocab_size):
            if 0 <= token_id < self.vocab_size:
                run.append(token_id)
                continue
            text += [self._backend.decode(run, skip_special_tokens=skip_special), "\ufffd"]
            run = []
        return "".join(text[:-1])

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for: for an added token, its own name in UTF-8.

        Raises:
          ValueError: when the id is not in the vocabulary.
        """
        token = self._backend.id_to_token(int(token_id))
        if token is None:
            raise ValueError(
                f"token id {token_id} is not in the vocabulary; expected 0 to {self.vocab_size - 1}"
            )
        if token_id in self._added_ids:
            return token.encode()
        if isinstance(self._backend.decoder, decoders.ByteLevel):
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()  # SentencePiece writes a space as U+2581

    def files(self) -> dict[str, str]:
        """Returns the Hugging Face files of this tokenizer, name to text; ``load_tokenizer`` reads them back."""
        settings = {k: v for k, v in self._settings.items() if k != "chat_template"}
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        generation = {
            "bos_token_id": self.bos_id,
            "eos_token_id": list(self.stop_token_ids),
            "pad_token_id": self.pad_id,
        }
        files = {
            "tokenizer.json": self._trusting.to_str(pretty=True),
            "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
            "generation_config.json": json.dumps(generation, indent=2) + "\n",
        }
        if self.chat_template is not None:
            files["chat_template.jinja"] = self.chat_template
        return files

    @functools.cached_property
    def _trusting(self) -> tokenizers.Tokenizer:
        # A second object, because the switch is a property of the object and callers run in threads.
        backend = copy.deepcopy(self._backend)
        backend.encode_special_tokens = False
        return backend

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    def _named_id(self, role: str) -> int | None:
        token = _token_text(self._settings.get(role))
        if token is None:
            return None
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise WeightsError(
                f"{role} is {token!r}, which is not in the vocabulary of {self.vocab_size} tokens; "
                "tokenizer.json and tokenizer_config.json are of two models: take both from one"
            )
        return token_id


class HasVocabSize(Protocol):
    """A model's configuration, as far as its tokenizer is concerned."""

    @property
    def vocab_size(self) -> int: ...


def check_vocab(tokenizer: Tokenizer, config: HasVocabSize) -> None:
    """Raises WeightsError when text, or the end of a response, has ids that the model's embedding does not have.

    Other special tokens may be past it: Gemma 3's tokenizer has one for images, and its text models no row for that.
    """
    needed = max(tokenizer.text_vocab_size, 1 + max(tokenizer.stop_token_ids))
    if needed > config.vocab_size:
        raise WeightsError(
            f"wrong tokenizer for the model: it has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} "
            "rows; expected at most as many tokens as rows: use the tokenizer that came with the weights"
        )


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads a tokenizer from a Hugging Face directory or from a ``.gguf`` file.

    Args:
      path: a directory (local, or a ``gs://`` URL) with ``tokenizer.json`` and ``tokenizer_config.json`` (the chat
        template inside it or in ``chat_template.jinja``; further stop ids from ``generation_config.json``), or a GGUF
        with GPT-2 BPE metadata.

    Raises:
      WeightsError: when files are missing or damaged, or of a kind that is not supported.
    """
    path = epath.Path(path)
    if path.is_dir():
        return _from_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return _from_gguf(path)
    raise WeightsError(
        f"no tokenizer at {path}; expected a directory with tokenizer.json and tokenizer_config.json, or a .gguf file"
    )


def _from_directory(path: epath.Path) -> Tokenizer:
    tokenizer_file = path / "tokenizer.json"
    if not tokenizer_file.exists():
        raise WeightsError(
            f"{path} has no tokenizer.json; expected one beside the weights. With only a SentencePiece or vocab.json "
            "tokenizer, make it once: transformers.AutoTokenizer.from_pretrained(dir).save_pretrained(dir)"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer_file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise WeightsError(
            f"{tokenizer_file} cannot be read ({error}); expected the tokenizers library's JSON: copy the file again"
        ) from error
    settings = _read_json(path / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(
        template, list
    ):  # several named templates; the one called default is for plain chat
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    template_file = path / "chat_template.jinja"
    if template_file.exists():
        template = template_file.read_text(encoding="utf-8")
    stop_ids: Any = []
    if (path / "generation_config.json").exists():
        stop_ids = _read_json(path / "generation_config.json").get("eos_token_id") or []
    return Tokenizer(
        backend,
        settings=settings,
        chat_template=template,
        stop_token_ids=[stop_ids] if isinstance(stop_ids, int) else stop_ids,
    )


def _read_json(path: epath.Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{path.parent} has no {path.name}; expected it beside tokenizer.json"
        ) from None
    except ValueError as error:
        raise WeightsError(
            f"{path} is not JSON ({error}); expected an object: copy the file again"
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}; expected a JSON object")
    return content


# How GGUF names the split before BPE. The merges were learned on such pieces, so a wrong split gives wrong ids.
_GGUF_PRE_TOKENIZERS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
}
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4  # token types; 1 is an ordinary token


def _from_gguf(path: epath.Path) -> Tokenizer:
    try:
        fields = require("gguf", "smollm2").GGUFReader(path).fields
    except (ValueError, IndexError) as error:
        raise WeightsError(
            f"{path} cannot be read as GGUF ({error}); copy the file again"
        ) from error

    def read(key: str, *, default: Any = None) -> Any:
        if key in fields:
            return fields[key].contents()
        if default is not None:
            return default
        raise WeightsError(f"{path} has no {key}; expected a GGUF that holds its tokenizer")

    kind, split = read("tokenizer.ggml.model"), read("tokenizer.ggml.pre", default="gpt-2")
    if kind != "gpt2" or split not in _GGUF_PRE_TOKENIZERS:
        raise WeightsError(
            f"{path} has a tokenizer of model {kind!r} and pre-tokenizer {split!r}; expected 'gpt2' with one of "
            f"{sorted(_GGUF_PRE_TOKENIZERS)}: use the Hugging Face directory of the same model"
        )
    tokens: list[str] = read("tokenizer.ggml.tokens")
    types: list[int] = read("tokenizer.ggml.token_type", default=[1] * len(tokens))
    merges = [tuple(merge.split(" ")) for merge in read("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_GGUF_PRE_TOKENIZERS[split])
    backend.decoder = decoders.ByteLevel()
    for token_type, special in ((_GGUF_CONTROL, True), (_GGUF_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind == token_type
            ]
        )
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    named = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{name}_token_id"].contents()]
        for name, role in roles.items()
        if f"tokenizer.ggml.{name}_token_id" in fields
    }
    template = fields.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        settings={**named, "clean_up_tokenization_spaces": False},
        chat_template=None if template is None else template.contents(),
    )


def _token_text(entry: Any) -> str | None:
    """A token in ``tokenizer_config.json`` is a string, an object with ``content``, or null."""
    return entry.get("content") if isinstance(entry, Mapping) else entry


def _byte_of_symbol() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_SYMBOL = _byte_of_symbol()
