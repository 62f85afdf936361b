"""The real model: its configuration, its numbers, and its agreement with transformers on the same weights."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import SMOLLM2_135M, ModelConfig
from rlvr_jax.models.decoder import attend_rows, bind
from rlvr_jax.models.weights import load_weights, resolve_model, save_weights
from rlvr_jax.text.tokenizer import load_tokenizer

PARAGRAPH = (
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is named after the "
    "engineer Gustave Eiffel, whose company designed and built the tower from 1887 to 1889."
)
# Logits of transformers 5.24 (torch 2.13, CPU, float32) on these weights: position -> id -> value; the three highest.
REFERENCE_LOGITS = {
    0: {29: 27.3534, 28: 25.5656, 198: 25.0673},
    7: {1009: 21.5698, 4688: 13.4739, 272: 12.8782},
    20: {657: 16.2018, 378: 15.2626, 198: 14.6831},
    51: {378: 15.678, 657: 14.8148, 198: 14.687},
}


@functools.partial(jax.jit, static_argnums=0)
def forward(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """float32[T, V] of one sequence int32[T]."""
    decoder = bind(config, params)
    ones = jnp.ones((1, len(tokens)), jnp.int32)
    hidden, _ = decoder(tokens, jnp.arange(len(tokens)), attend_rows(ones, 0 * ones))
    return decoder.logits(hidden)


@pytest.fixture(scope="module")
def model_path() -> pathlib.Path:
    try:
        return resolve_model("smollm2-135m-instruct")
    except WeightsError as error:
        pytest.skip(f"SmolLM2 is not installed: {error}")


@pytest.fixture(scope="module")
def model(model_path: pathlib.Path) -> tuple[ModelConfig, Any]:
    return load_weights(model_path)


@pytest.fixture(scope="module")
def tokens(model_path: pathlib.Path) -> np.ndarray:
    return np.array(load_tokenizer(model_path).encode(PARAGRAPH), np.int32)


@pytest.fixture(scope="module")
def logits(model: tuple[ModelConfig, Any], tokens: np.ndarray) -> np.ndarray:
    return np.asarray(forward(*model, tokens))


def test_the_gguf_holds_the_published_model(model: tuple[ModelConfig, Any]) -> None:
    config, params = model
    assert config == SMOLLM2_135M
    leaves = jax.tree.leaves(params)
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}
    assert sum(leaf.size for leaf in leaves) == config.num_params == 134_515_008


def test_perplexity_of_a_paragraph_is_6_257(logits: np.ndarray, tokens: np.ndarray) -> None:
    """25 when the query and key rows stay in GGUF's order."""
    logprobs = np.asarray(jax.nn.log_softmax(logits[:-1]))
    nll = -logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    assert np.exp(nll.mean()) == pytest.approx(6.257, abs=0.01)


def test_logits_equal_recorded_ones_of_transformers(logits: np.ndarray) -> None:
    for position, expected in REFERENCE_LOGITS.items():
        ids = list(expected)
        assert np.argsort(-logits[position])[:3].tolist() == ids
        np.testing.assert_allclose(
            logits[position, ids], list(expected.values()), rtol=0, atol=1e-3
        )


@pytest.mark.slow
def test_logits_equal_transformers_on_the_converted_model(
    model: tuple[ModelConfig, Any],
    model_path: pathlib.Path,
    tokens: np.ndarray,
    logits: np.ndarray,
    tmp_path: pathlib.Path,
) -> None:
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    tokenizer = load_tokenizer(model_path)
    save_weights(
        tmp_path / "hf", *model, tokenizer_files=tokenizer.files(), max_shard_bytes=200 << 20
    )
    assert len(list(tmp_path.glob("hf/*.safetensors"))) > 1
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32
    )
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-3)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")(PARAGRAPH)["input_ids"]
    assert ids == tokens.tolist()
    config, params = load_weights(tmp_path / "hf")
    assert config == model[0]
    for ours, theirs in zip(jax.tree.leaves(model[1]), jax.tree.leaves(params), strict=True):
        assert ours.tobytes() == theirs.tobytes()
