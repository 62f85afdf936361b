"""Every family against transformers on the same random weights; its config.json read both ways, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlvr_jax.errors import WeightsError
from rlvr_jax.models.config import ModelConfig, RopeScaling
from rlvr_jax.models.decoder import PARAM_AXES, attend_rows, bind
from rlvr_jax.models.families import FAMILIES
from rlvr_jax.models.families.settings import HARMLESS
from rlvr_jax.models.weights import load_weights, open_weights, param_shapes, save_weights
from tests.models.published import GEMMA_3_4B, NUM_PARAMS, PUBLISHED

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def rope(kind: str, theta: float = 777.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **settings}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.5, 2, 2.5, 3, 4],
    "long_factor": [2.0, 3, 4, 5, 6, 8],
}
# Name -> (class of transformers' configuration, what differs from SIZES). Windows are shorter than the sequences.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied-odd-heads": ("LlamaConfig", {"head_dim": 10, "tie_word_embeddings": True, **rope("llama3", **LLAMA3)}),
    "llama-biases-linear": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, **rope("linear", factor=3.0)}),
    "llama-dynamic-gelu": (
        "LlamaConfig", {"max_position_embeddings": 64, "hidden_act": "gelu", **rope("dynamic", factor=3.0)},
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7}),
    "qwen2-windows-yarn": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_key_value_heads": 1}
        | rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0),
    ),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 20, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 20, "sliding_window": 6, "query_pre_attn_scalar": 30, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 20, "sliding_window": 6, "query_pre_attn_scalar": 30, "tie_word_embeddings": False,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window_pattern": 2},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 6, "num_key_value_heads": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"head_dim": 20, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28},
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "mlp_only_layers": [0],
         "shared_expert_intermediate_size": 36, "use_sliding_window": True, "sliding_window": 6},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        {"head_dim": 12, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "n_group": 4,
         "topk_group": 2, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28,
         "n_shared_experts": 2, "routed_scaling_factor": 2.5},
    ),
    "dots1": (
        "Dots1Config",
        {"first_k_dense_replace": 2, "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
         "n_shared_experts": 1, "sliding_window": 6, "max_window_layers": 1, "norm_topk_prob": False},
    ),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "phi3": (
        "Phi3Config",
        {"sliding_window": 20, "partial_rotary_factor": 0.75, "hidden_size": 64, "max_position_embeddings": 256,
         "original_max_position_embeddings": 64, "rope_scaling": LONGROPE},
    ),
}  # fmt: skip
MIXTURES = {"mixtral", "qwen3-moe", "qwen2-moe", "glm4-moe", "dots1"}


@pytest.fixture(scope="module")
def reference() -> Callable[..., Any]:
    """Makes a random model of transformers; norms and biases differ from what they start as."""
    reason = "transformers and torch are the reference; pip install 'rlvr_jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    logging.getLogger("transformers").setLevel(logging.ERROR)

    def make(config_class: str, **settings: Any) -> Any:
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**SIZES, **copy.deepcopy(settings)})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.uniform_(0.5, 1.5)
                elif "bias" in name:
                    weight.normal_(0, 0.3)
            for name, buffer in model.named_buffers():
                if "correction_bias" in name:
                    buffer.normal_(0, 0.3)  # of the size of what sets the scores of experts apart
        return model.eval()

    return make


def reference_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()


@functools.partial(jax.jit, static_argnums=0)
def row_logits(config: ModelConfig, params: Any, tokens: Any, positions: Any, segments: Any) -> Any:
    """float32[B, T, V] of packed rows, int32[B, T] each."""
    decoder = bind(config, params)
    attend = attend_rows(segments, jnp.zeros_like(segments))
    hidden, _ = decoder(tokens.reshape(-1), positions.reshape(-1), attend)
    return decoder.logits(hidden).reshape(*tokens.shape, -1)


def packed(lengths: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of random sequences, one after another, with noise under the padding."""
    tokens = np.random.default_rng(1).integers(3, VOCAB, (len(lengths), width)).astype(np.int32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    for row, sizes in enumerate(lengths):
        start = 0
        for segment, size in enumerate(sizes, 1):
            positions[row, start : start + size] = np.arange(size)
            segments[row, start : start + size] = segment
            start += size
    return tokens, positions, segments


def assert_logits_equal(
    model: Any, config: ModelConfig, params: Any, tolerance: float = 1e-4
) -> None:
    """A long sequence alone in a row, and two short ones packed, are each what transformers makes of them alone."""
    tokens, positions, segments = packed([[37], [19, 11]], 40)
    got = np.asarray(row_logits(config, params, tokens, positions, segments))
    for row, segment in ((0, 1), (1, 1), (1, 2)):
        own = segments[row] == segment
        expected = reference_logits(model, tokens[row, own])
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got[row, own], expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_packed_or_not_and_after_saving(
    reference: Callable[..., Any], tmp_path: pathlib.Path, name: str
) -> None:
    import transformers

    config_class, settings = MODELS[name]
    model = reference(config_class, **settings)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_weights(tmp_path / "theirs")
    assert config.family == model.config.model_type
    assert_logits_equal(model, config, params)

    save_weights(tmp_path / "ours", config, params, max_shard_bytes=40_000)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.random.default_rng(2).integers(3, VOCAB, 37)
    np.testing.assert_array_equal(reference_logits(again, tokens), reference_logits(model, tokens))
    assert load_weights(tmp_path / "ours")[0] == config
    theirs = load_all(tmp_path / "theirs")
    ours = load_all(tmp_path / "ours")
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in ours)


def load_all(directory: pathlib.Path) -> dict[str, np.ndarray]:
    return {k: v for file in directory.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers_at_random_sizes(
    reference: Callable[..., Any], tmp_path: pathlib.Path, name: str, seed: int
) -> None:
    config_class, settings = MODELS[name]
    rng = np.random.default_rng(seed)
    kv_heads, ratio = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    head_dim = 16 if name == "phi3" else 2 * int(rng.integers(3, 12))
    if name in MIXTURES:
        head_dim *= 2  # torch's products of experts take rows of whole 16 bytes only
    layers = int(rng.integers(3 if name in MIXTURES else 1, 7))  # some without experts come first
    sizes = {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * ratio,
        "hidden_size": kv_heads * ratio * head_dim,
        "intermediate_size": 4 * int(rng.integers(2, 23)),
        "tie_word_embeddings": bool(rng.integers(2)),
    }
    if "head_dim" in settings:
        sizes["head_dim"] = 2 * int(rng.integers(3, 12))
    if "layer_types" in settings:
        sizes["layer_types"] = [settings["layer_types"][i % 3] for i in range(layers)]
    if settings.get("sliding_window"):
        sizes["sliding_window"] = int(rng.integers(1, 40))
    model = reference(config_class, **{**settings, **sizes})
    model.save_pretrained(tmp_path / "theirs")
    # Random routers magnify: transformers in float32 is up to 8e-5 from itself in float64 there, and we as much.
    tolerance = 3e-4 if name in MIXTURES else 1e-4
    assert_logits_equal(model, *load_weights(tmp_path / "theirs"), tolerance)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_greater_context_takes_the_frequencies_of_its_whole_length(
    reference: Callable[..., Any], tmp_path: pathlib.Path, kind: str
) -> None:
    name = {"dynamic": "llama-dynamic-gelu", "longrope": "phi3"}[kind]
    config_class, settings = MODELS[name]
    original = 16
    settings = {
        "dynamic": {**settings, "max_position_embeddings": original},
        "longrope": {**settings, "original_max_position_embeddings": original},
    }[kind]
    model = reference(config_class, **settings)
    model.save_pretrained(tmp_path / "theirs")
    config, params = load_weights(tmp_path / "theirs")
    assert config.max_length == original
    tokens, positions, segments = packed([[37]], 37)
    # transformers goes by the length of the sequence, we by that of the context.
    expected = reference_logits(model, tokens[0])
    config = dataclasses.replace(config, max_length=37)
    got = np.asarray(row_logits(config, params, tokens, positions, segments))[0]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_of_a_model_that_sees_images_the_text_model_is_read(
    reference: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    config_class, settings = MODELS["gemma3"]
    model = reference(config_class, **{**settings, "tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    outer = {k: v for k, v in GEMMA_3_4B.items() if k != "text_config"} | {"text_config": text}
    tensors = load_file(tmp_path / "model.safetensors")
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): array for name, array in tensors.items()}
        renamed["vision_tower.vision_model.post_layernorm.weight"] = np.zeros(3, np.float32)
        renamed["multi_modal_projector.mm_soft_emb_norm.weight"] = np.zeros(3, np.float32)
        save_file(renamed, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(outer))
        config, params = load_weights(tmp_path)
        assert config.family == "gemma3_text"
        assert_logits_equal(model, config, params)


# Settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_read_as_they_are_and_survive_saving(name: str) -> None:
    settings = PUBLISHED[name]
    family = FAMILIES[settings["model_type"]]
    config = family.from_hf(settings)
    assert config.num_params == NUM_PARAMS[name]
    shapes = param_shapes(config)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == NUM_PARAMS[name]
    assert all(len(PARAM_AXES[path]) == len(shape) for path, shape in shapes.items())
    assert family.from_hf(json.loads(json.dumps(family.to_hf(config)))) == config


def test_published_settings_mean_what_they_say() -> None:
    configs = {name: FAMILIES[s["model_type"]].from_hf(s) for name, s in PUBLISHED.items()}
    llama = configs["meta-llama/Llama-3.2-1B"]
    assert llama.rope_scaling is not None and llama.rope_scaling.kind == "llama3"
    assert (llama.rope_scaling.factor, llama.max_length) == (32.0, 131072)
    assert configs["HuggingFaceTB/SmolLM3-3B"].nope_layers == (3, 7, 11, 15, 19, 23, 27, 31, 35)
    assert configs["Qwen/Qwen2.5-0.5B-Instruct"].qkv_bias
    assert not configs["Qwen/Qwen2.5-0.5B-Instruct"].local_layers
    gemma2, gemma3 = configs["google/gemma-2-2b"], configs["google/gemma-3-1b-it"]
    assert gemma2.local_layers == tuple(range(0, 26, 2)) and gemma2.sliding_window == 4096
    assert (gemma2.attn_softcap, gemma2.final_softcap, gemma2.embed_scale) == (50.0, 30.0, 48.0)
    assert [i for i in range(26) if i not in gemma3.local_layers] == [5, 11, 17, 23]
    assert (gemma3.rope_theta, gemma3.local_rope_theta) == (1e6, 1e4)
    assert configs["mistralai/Mistral-7B-v0.1"].local_layers == tuple(range(32))
    assert configs["mistralai/Mistral-7B-v0.3"].local_layers == ()
    mixtral, qwen = configs["mistralai/Mixtral-8x7B-v0.1"], configs["Qwen/Qwen3-30B-A3B"]
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.mlp_dim) == (8, 2, 14336)
    assert (qwen.num_experts, qwen.experts_per_token, qwen.mlp_dim) == (128, 8, 768)
    assert qwen.norm_expert_weights and qwen.router_loss_coef == 0.001
    glm, dots = configs["zai-org/GLM-4.5-Air"], configs["rednote-hilab/dots.llm1.base"]
    assert (glm.num_dense_layers, glm.dense_mlp_dim, glm.shared_mlp_dim) == (1, 10944, 1408)
    assert (glm.router_scores, glm.partial_rotary_factor, glm.o_bias) == ("sigmoid", 0.5, False)
    assert (dots.shared_mlp_dim, dots.routed_scale, dots.local_layers) == (2816, 2.5, ())
    olmo3 = configs["allenai/Olmo-3-7B-Think"]
    assert (olmo3.rope_theta, olmo3.local_rope_theta) == (5e5, 5e5)
    assert [i for i in range(8) if i not in olmo3.local_layers] == [3, 7]
    phi = configs["microsoft/Phi-4-mini-instruct"]
    assert phi.rope_scaling is not None and phi.rope_scaling.factor == 32.0
    assert phi.rope_scaling.attention_factor == pytest.approx(1.19024, abs=1e-5)
    assert (phi.max_length, phi.partial_rotary_factor) == (4096, 0.75)


CONFIG_CLASSES = {
    "llama": "LlamaConfig",
    "smollm3": "SmolLM3Config",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "gemma2": "Gemma2Config",
    "gemma3_text": "Gemma3TextConfig",
    "qwen3_moe": "Qwen3MoeConfig",
    "qwen2_moe": "Qwen2MoeConfig",
    "glm4_moe": "Glm4MoeConfig",
    "dots1": "Dots1Config",
    "olmo3": "Olmo3Config",
    "mistral": "MistralConfig",
    "mixtral": "MixtralConfig",
    "olmo2": "Olmo2Config",
    "phi3": "Phi3Config",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_no_setting_of_transformers_is_ignored(name: str) -> None:
    """Every attribute of its configuration class is read, refused at another value, or known as harmless."""
    transformers = pytest.importorskip("transformers", reason="pip install 'rlvr_jax[parity]'")
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2} if name == "dots1" else {}
    settings = getattr(transformers, CONFIG_CLASSES[name])(**sizes).to_dict()
    family = FAMILIES[name]
    config = family.from_hf(settings)
    harmless = {*HARMLESS, *family.harmless}
    kept = []
    for key, value in settings.items():
        if key in harmless:
            continue
        for other in other_values(key, value):
            try:
                changed = family.from_hf({**settings, key: other})
            except (WeightsError, ValueError):
                break
            if changed != config:
                break
        else:
            kept.append(key)
    # Read, and without effect while there are no windows, or because a list of layers is there.
    inert = {"sliding_window", "max_window_layers", "no_rope_layer_interval", "use_sliding_window"}
    inert |= {"original_max_position_embeddings"} | (
        {"intermediate_size"} if name in ("qwen2_moe", "qwen3_moe", "dots1") else set()
    )
    assert set(kept) <= inert


def other_values(key: str, value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value * 2, value + 1]
    if isinstance(value, list):
        count = max(len(value), 1)
        return [["sliding_attention"] * count, [0] * count]
    if isinstance(value, dict):
        return [{"rope_type": "proportional", "factor": 2.0}]
    return [True, 7, "other"]


@pytest.mark.parametrize(
    ("family", "change", "expected"),
    [
        ("qwen2", {"attention_sink_tokens": 4}, r"attention_sink_tokens=4 \(unknown\)"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 28}, "sliding_window=None"),
        ("qwen3", {"layer_types": ["full_attention"]}, "expected full_attention or sliding_attention, 28 times"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 28}, "layer_types="),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}, "expected 'Qwen3ForCausalLM'"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping=50\.0"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "scaling"),
        ("mistral", {"head_dim": None, "num_experts": 8}, "num_experts=8"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]"),
        ("qwen2_moe", {"mlp_only_layers": list(range(24))}, "expected the first layers, fewer than 24"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts=None"),
        ("glm4_moe", {"first_k_dense_replace": 46}, "expected fewer than 46 layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts=1"),
        ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "expected rope_type 'longrope'"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("olmo2", {"clip_qkv": 8.0}, r"clip_qkv=8\.0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "expected an entry for each of 36 layers"),
    ],
)  # fmt: skip
def test_what_changes_the_maths_is_refused_by_name(
    family: str, change: dict[str, Any], expected: str
) -> None:
    settings = next(s for s in PUBLISHED.values() if s["model_type"] == family)
    with pytest.raises(WeightsError, match=expected):
        FAMILIES[family].from_hf({**settings, **change})


def test_a_missing_bias_and_an_extra_one_are_named(
    reference: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    reference("Qwen2Config").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = tensors.pop("model.layers.1.self_attn.k_proj.bias")
    tensors["model.layers.1.self_attn.o_proj.bias"] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        load_weights(tmp_path)
    assert "missing: model.layers.1.self_attn.k_proj.bias;" in str(error.value)
    assert "not part of the model: model.layers.1.self_attn.o_proj.bias:" in str(error.value)


MIXTURE: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}


def test_layers_after_the_last_one_are_left_out(
    reference: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    config_class, settings = MODELS["glm4-moe"]
    model = reference(config_class, **settings)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    for count in (1, 0):
        (tmp_path / "config.json").write_text(
            json.dumps(written | {"num_nextn_predict_layers": count})
        )
        if count:
            assert open_weights(tmp_path).config.num_layers == 3
            continue
        with pytest.raises(WeightsError, match=r"not part of the model: model\.layers\.3\.eh_proj"):
            open_weights(tmp_path)


def test_contradicting_fields_are_refused() -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 9, "num_layers": 2, "embed_dim": 8, "mlp_dim": 8, "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 4,
    }  # fmt: skip
    contradictions: tuple[tuple[dict[str, Any], str], ...] = (
        ({"local_layers": (2,), "sliding_window": 4}, r"local_layers has \[2\]"),
        ({"nope_layers": (-1,)}, r"nope_layers has \[-1\]"),
        ({"local_layers": (0,)}, "need a sliding_window of at least 1"),
        ({"pre_norm": False}, "both off"),
        (
            {"rope_scaling": RopeScaling(kind="longrope", factor=2.0)},
            "0 short and 0 long factors; expected 2",
        ),
        ({"num_experts": 2, "experts_per_token": 3}, "experts_per_token is 3"),
        ({**MIXTURE, "num_dense_layers": 2}, "num_dense_layers is 2; expected 0 to 1"),
        ({**MIXTURE, "num_dense_layers": 1}, "num_dense_layers is 1 and dense_mlp_dim 0"),
        ({"num_dense_layers": 1, "dense_mlp_dim": 8}, "num_dense_layers is 1; expected 0 to 0"),
        ({**MIXTURE, "expert_groups": 3}, "expert_groups is 3 and groups_per_token 1"),
        ({**MIXTURE, "expert_groups": 4}, "into groups of at least 2"),
        (
            {**MIXTURE, "experts_per_token": 3, "expert_groups": 2},
            "expected at most 2, the experts of",
        ),
    )
    for change, message in contradictions:
        with pytest.raises(ValueError, match=message):
            ModelConfig(**sizes, **change)
