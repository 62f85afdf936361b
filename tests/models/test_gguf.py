"""GGUF: every kind of block against its definition, and the RoPE scalings that a file may carry."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import abstract_params
from rlvr_jax.models.rope import scaled_frequencies
from rlvr_jax.models.weights import load_weights

gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
Kind = gguf.GGMLQuantizationType

CONFIG = ModelConfig(
    vocab_size=40,
    num_layers=1,
    embed_dim=256,  # K-quants have blocks of 256
    mlp_dim=256,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    max_length=512,
)


def write(
    path: pathlib.Path, up: np.ndarray, kind: Any, extra: dict[str, Any] | None = None
) -> Any:
    """A llama whose ``ffn_up`` has blocks of a kind, uint8[256, bytes of a row]; returns its other parameters."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), abstract_params(CONFIG)
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONFIG.max_length)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    extra = extra or {}
    if "linear" in extra:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(extra["linear"])
    if "factors" in extra:
        writer.add_tensor("rope_freqs.weight", np.asarray(extra["factors"], np.float32))
    layer = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf[0].T), params["layers"])
    tensors = {
        "token_embd": params["embed"]["embedding"],
        "output_norm": params["final_norm"]["scale"],
        "blk.0.attn_norm": layer["attn_norm"]["scale"],
        "blk.0.attn_q": layer["attn"]["q"],
        "blk.0.attn_k": layer["attn"]["k"],
        "blk.0.attn_v": layer["attn"]["v"],
        "blk.0.attn_output": layer["attn"]["o"],
        "blk.0.ffn_norm": layer["mlp_norm"]["scale"],
        "blk.0.ffn_gate": layer["mlp"]["gate"],
        "blk.0.ffn_down": layer["mlp"]["down"],
    }
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.add_tensor("blk.0.ffn_up.weight", up, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


def loaded_up(path: pathlib.Path) -> np.ndarray:
    """As the file has it: [out, in]."""
    return load_weights(path)[1]["layers"]["mlp"]["up"][0].T


@pytest.mark.parametrize(
    ("name", "steps"), [("Q4_0", 16), ("Q4_1", 15), ("Q5_0", 32), ("Q5_1", 31), ("Q8_0", 254)]
)
def test_blocks_of_32_are_within_a_step_of_what_was_quantised(
    tmp_path: pathlib.Path, name: str, steps: int
) -> None:
    weight = np.random.default_rng(1).normal(size=(256, 256)).astype(np.float32)
    write(tmp_path / "model.gguf", gguf.quants.quantize(weight, Kind[name]), Kind[name])
    got = loaded_up(tmp_path / "model.gguf")
    blocks, found = (x.reshape(-1, 32) for x in (weight, got))
    # Symmetric kinds span twice the largest magnitude, the others the block's own range.
    span = 2 * np.abs(blocks).max(-1) if name.endswith("_0") else np.ptp(blocks, axis=-1)
    assert np.all(np.abs(found - blocks) <= 1.01 * span[:, None] / steps)
    assert np.abs(found - blocks).max() > 0


def half(bytes_of: np.ndarray) -> float:
    return float(bytes_of.view(np.float16)[0])


def q4_k(block: np.ndarray) -> np.ndarray:
    """d, dmin: half; 12 bytes of eight 6-bit scales and minima; 128 of 4-bit values: d * scale * q - dmin * min."""
    d, dmin, packed, values = half(block[:2]), half(block[2:4]), block[4:16].astype(int), block[16:]
    out = np.zeros(256)
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            low = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        q = values[32 * (j // 2) : 32 * (j // 2) + 32] >> (4 * (j % 2)) & 15
        out[32 * j : 32 * j + 32] = d * scale * q - dmin * low
    return out


def q6_k(block: np.ndarray) -> np.ndarray:
    """128 bytes of low 4 bits, 64 of high 2 bits, 16 signed scales, d: d * scale * (q - 32)."""
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    d = half(block[208:210])
    out = np.zeros(256)
    for i in range(256):
        part, at, row = i // 128, i % 32, i % 128 // 32
        nibble = int(low[64 * part + 32 * (row % 2) + at]) >> (4 * (row // 2)) & 15
        q = nibble | (int(high[32 * part + at]) >> (2 * row) & 3) << 4
        out[i] = d * int(scales[i // 16]) * (q - 32)
    return out


@pytest.mark.parametrize(("name", "decode"), [("Q4_K", q4_k), ("Q6_K", q6_k)])
def test_k_quants_are_decoded_by_their_definition(
    tmp_path: pathlib.Path, name: str, decode: Any
) -> None:
    size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
    blocks = np.random.default_rng(2).integers(0, 256, (256, size)).astype(np.uint8)
    for at in {"Q4_K": (0, 2), "Q6_K": (208,)}[name]:
        blocks[:, at : at + 2] = np.array([0.03], np.float16).view(np.uint8)
    write(tmp_path / "model.gguf", blocks, Kind[name])
    got = loaded_up(tmp_path / "model.gguf")
    np.testing.assert_allclose(got, [decode(block) for block in blocks], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q5_K"])
def test_the_other_k_quants_are_read(tmp_path: pathlib.Path, name: str) -> None:
    size = gguf.GGML_QUANT_SIZES[Kind[name]][1]
    blocks = np.zeros((256, size), np.uint8)
    blocks[::2, -4:] = np.array([0.5, 0.5], np.float16).view(np.uint8)
    write(tmp_path / "model.gguf", blocks, Kind[name])
    expected = gguf.dequantize(blocks, Kind[name])
    np.testing.assert_array_equal(loaded_up(tmp_path / "model.gguf"), expected)


def test_the_scaling_of_llama_3_is_a_tensor_of_factors(tmp_path: pathlib.Path) -> None:
    factors = np.linspace(1, 32, 64).astype(np.float32)
    up = np.ones((256, 256), np.float32)
    write(tmp_path / "model.gguf", up, Kind.F32, {"factors": factors})
    config, _ = load_weights(tmp_path / "model.gguf")
    assert config.rope_scaling is not None
    got = scaled_frequencies(config.rope_scaling, 128, config.rope_theta, config.max_length)
    plain = config.rope_theta ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(got, plain / factors, rtol=1e-6)


def test_linear_scaling_is_read(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "model.gguf", np.ones((256, 256), np.float32), Kind.F32, {"linear": 4.0})
    scaling = load_weights(tmp_path / "model.gguf")[0].rope_scaling
    assert scaling is not None and (scaling.kind, scaling.factor) == ("linear", 4.0)
