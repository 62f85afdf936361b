"""Adapters: nothing at the start, the gradient of the merged maths, the same model when merged or written for PEFT."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.adapters import (
    ADAPTER_AXES,
    AdapterConfig,
    abstract_adapters,
    adapter_config,
    checksum,
    init_adapters,
    merge_adapters,
    target_kernels,
    with_adapters,
)
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import STRICT, abstract_params, attend_rows, bind, init_params
from rlvr_jax.models.linear import AdaptedKernel, matmul
from rlvr_jax.models.peft import check_layout, load_adapters, save_adapters
from rlvr_jax.models.weights import save_weights

ALL = AdapterConfig(rank=4, alpha=6.0, targets="layers/(attn|mlp)/.*")
DORA = dataclasses.replace(ALL, dora=True)
TOKENS = jnp.arange(24, dtype=jnp.int32) * 5 % 128
SEGMENTS = jnp.ones((2, 12), jnp.int32)


def model_of(**fields):
    sizes = dict(vocab_size=128, num_layers=2, embed_dim=32, mlp_dim=64, num_heads=4)
    return ModelConfig(**{**sizes, "num_kv_heads": 2, "head_dim": 8, **fields})


def random_adapters(config, model, seed=1):
    """As training leaves them: B is not zero any more."""
    leaves, treedef = jax.tree.flatten(abstract_adapters(config, model))
    rng = np.random.default_rng(seed)
    means = [float(leaf.ndim == 2) for leaf in leaves]  # magnitudes are near 1
    return treedef.unflatten(
        [
            jnp.asarray(rng.normal(mean, 0.1, leaf.shape), jnp.float32)
            for mean, leaf in zip(means, leaves, strict=True)
        ]
    )


def forward(model, params, dtype=jnp.float32):
    positions = jnp.tile(jnp.arange(12, dtype=jnp.int32), 2)
    attend = attend_rows(SEGMENTS, jnp.zeros_like(SEGMENTS), prefix_width=0)
    return bind(model, params)(TOKENS, positions, attend, dtype=dtype)[0]


def hidden_of(model, params, dtype=jnp.float32):
    run = functools.partial(forward, model, dtype=dtype)
    return jax.jit(run, compiler_options=STRICT)(params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_new_adapters_change_no_bit(dtype):
    model = model_of()
    base = init_params(model, jax.random.key(0))
    adapters = init_adapters(ALL, base, jax.random.key(1))
    assert all(np.any(leaf) == (path[-1] == "a") for path, leaf in tree_paths(adapters).items())
    adapted = hidden_of(model, with_adapters(base, adapters, ALL), dtype)
    np.testing.assert_array_equal(
        np.asarray(adapted, np.float32), np.asarray(hidden_of(model, base, dtype), np.float32)
    )


def test_new_magnitudes_change_nothing_but_for_rounding():
    model = model_of()
    base = init_params(model, jax.random.key(0))
    base["layers"]["mlp"]["down"] = base["layers"]["mlp"]["down"].at[:, :, 0].set(0)  # as if pruned
    adapters = init_adapters(DORA, base, jax.random.key(1))
    adapted = hidden_of(model, with_adapters(base, adapters, DORA))
    np.testing.assert_allclose(adapted, hidden_of(model, base), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "dtype"), [(ALL, jnp.float32), (ALL, jnp.bfloat16), (DORA, jnp.bfloat16)]
)
def test_merged_parameters_are_the_same_model_bit_for_bit(config, dtype):
    model = model_of(qkv_bias=True)
    base = jax.tree.map(np.asarray, init_params(model, jax.random.key(0)))
    adapters = random_adapters(config, model)
    merged = merge_adapters(base, adapters, config)
    want = base["layers"]["mlp"]["down"].astype(np.float64)
    part = {
        name: np.asarray(x, np.float64) for name, x in adapters["layers"]["mlp"]["down"].items()
    }
    want = want + 1.5 * part["a"] @ part["b"]
    if config.dora:
        want *= (part["magnitude"] / np.linalg.norm(want, axis=1))[:, None]
    np.testing.assert_allclose(merged["layers"]["mlp"]["down"], want, atol=1e-6)
    adapted = hidden_of(model, with_adapters(base, adapters, config), dtype)
    np.testing.assert_array_equal(
        np.asarray(adapted, np.float32), np.asarray(hidden_of(model, merged, dtype), np.float32)
    )
    assert not np.array_equal(adapted, hidden_of(model, base, dtype))


def test_gradients_of_a_product_are_those_of_float64():
    rng = np.random.default_rng(0)
    x, w, a, b, g = (rng.normal(size=s) for s in ((9, 12), (12, 7), (12, 3), (3, 7), (9, 7)))
    scale = 0.7

    def loss(x, a, b, w):
        kernel = AdaptedKernel(kernel=w, a=a, b=b, scale=scale)
        return jnp.sum(matmul(x, kernel) * jnp.asarray(g, jnp.float32))

    args = [jnp.asarray(v, jnp.float32) for v in (x, a, b, w)]
    of_x, of_a, of_b, of_w = jax.grad(loss, argnums=(0, 1, 2, 3))(*args)
    np.testing.assert_allclose(of_x, g @ (w + scale * a @ b).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_a, scale * x.T @ g @ b.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_b, scale * a.T @ x.T @ g, rtol=1e-5, atol=1e-5)
    assert not np.any(of_w)  # frozen


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_magnitudes_take_the_norms_for_constants(dtype):
    rng = np.random.default_rng(0)
    shapes = dict(kernel=(12, 7), a=(12, 3), b=(3, 7), magnitude=(7,))
    parts = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    x, g = (jnp.asarray(rng.normal(size=s), dtype) for s in ((9, 12), (9, 7)))

    def ours(parts, x):
        return jnp.sum((matmul(x, AdaptedKernel(**parts, scale=0.7)) * g).astype(jnp.float32))

    def explicit(parts, x):
        total = parts["kernel"] + 0.7 * parts["a"] @ parts["b"]
        norms = jax.lax.stop_gradient(jnp.linalg.norm(total, axis=0))
        product = x.astype(jnp.float32) @ total * (parts["magnitude"] / norms)[None]
        return jnp.sum(product * g.astype(jnp.float32))

    (of_parts, of_x), (want, want_x) = (
        jax.grad(f, argnums=(0, 1))(parts, x) for f in (ours, explicit)
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 0.05
    assert not np.any(of_parts.pop("kernel"))
    for name, leaf in (of_parts | {"x": of_x}).items():
        right = np.asarray((want | {"x": want_x})[name], np.float32)
        allowed = tolerance * np.abs(right).max()
        np.testing.assert_allclose(np.asarray(leaf, np.float32), right, atol=allowed, err_msg=name)


@pytest.mark.parametrize("config", [ALL, DORA], ids=["lora", "dora"])
def test_gradients_of_a_model_are_those_of_the_merged_maths(config):
    model = model_of()
    base = init_params(model, jax.random.key(0))
    adapters = random_adapters(config, model)

    def loss(params):
        return jnp.sum(jnp.sin(forward(model, params)))

    def explicit(adapters):
        params = jax.tree.map(lambda leaf: leaf, base)
        for part in ("attn", "mlp"):
            for name, ab in adapters["layers"][part].items():
                total = params["layers"][part][name] + config.scale * ab["a"] @ ab["b"]
                if config.dora:
                    norms = jax.lax.stop_gradient(jnp.linalg.norm(total, axis=1))
                    total *= (ab["magnitude"] / norms)[:, None]
                params["layers"][part][name] = total
        return loss(params)

    def ours(adapters):
        return loss(with_adapters(base, adapters, config))

    got, want = (jax.jit(jax.grad(of))(adapters) for of in (ours, explicit))
    assert tree_paths(got).keys() == tree_paths(want).keys()
    for path, leaf in tree_paths(got).items():
        np.testing.assert_allclose(leaf, tree_paths(want)[path], rtol=1e-4, atol=1e-4, err_msg=path)
    assert set(tree_paths(adapters)) <= set(ADAPTER_AXES)


def test_targets_are_whole_paths_and_wrong_settings_say_what_to_do():
    shapes = abstract_params(model_of(num_experts=4, experts_per_token=2))
    assert list(target_kernels(ALL, shapes)) == [f"layers/attn/{name}" for name in "koqv"]
    some = AdapterConfig(rank=2, alpha=2.0, targets="layers/attn/[qv]")
    assert target_kernels(some, shapes)["layers/attn/v"].shape == (2, 32, 16)
    with pytest.raises(ValueError, match=r"'attn' matches no kernel; expected .*layers/attn/k"):
        target_kernels(AdapterConfig(rank=2, alpha=2.0, targets="attn"), shapes)
    phi3 = model_of(family="phi3", tie_embeddings=False)
    check_layout(some, phi3)
    with pytest.raises(
        ValueError, match=r"part of .*qkv_proj, without layers/attn/k; .*all or none"
    ):
        check_layout(dataclasses.replace(some, dora=True), phi3)
    with pytest.raises(ValueError, match="no regular expression"):
        AdapterConfig(rank=2, alpha=2.0, targets="(")
    with pytest.raises(ValueError, match=r"alpha is 0\.0"):
        AdapterConfig(rank=2, alpha=0.0, targets=".*")
    with pytest.raises(ValueError, match="rank is -1"):
        adapter_config(rank=-1, alpha=1.0, targets=".*")
    assert adapter_config(rank=0, alpha=1.0, targets=".*") is None


def test_the_checksum_of_a_base_sees_one_changed_bit():
    base = {"a": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    other = {"a": np.ones((3, 2), np.float32), "b": np.array([0, 1e-45], np.float32)}
    assert checksum(base) == checksum(jax.tree.map(np.copy, base)) != checksum(other)
    shifted = base | {"a": base["a"] + 1}  # all values alike: places must not cancel
    assert checksum(base) != checksum(shifted)
    rows = jax.sharding.NamedSharding(make_mesh(1, 3, 1, devices=jax.devices()[:3]), P("fsdp"))
    assert checksum(base) == checksum(base | {"a": jax.device_put(base["a"], rows)})


@pytest.mark.parametrize(
    ("family", "targets", "dora"),
    [
        ("llama", ALL.targets, False),
        ("llama", "layers/attn/.*", True),
        ("phi3", ALL.targets, True),
        ("phi3", "layers/(attn/[qv]|mlp/up)", False),
    ],
)
def test_what_is_saved_is_by_the_definition_of_peft_the_merged_model(
    family, targets, dora, tmp_path
):
    """weight + lora_alpha / r * lora_B @ lora_A, its rows of length lora_magnitude_vector, in float64."""
    config = AdapterConfig(rank=4, alpha=6.0, targets=targets, dora=dora)
    model = model_of(family=family, tie_embeddings=False)
    base = jax.tree.map(np.asarray, init_params(model, jax.random.key(0)))
    adapters = random_adapters(config, model)
    save_adapters(tmp_path / "adapter", config, model, adapters, base="some/base")
    save_adapters(tmp_path / "adapter", config, model, adapters, base="some/base")  # replaces it
    save_weights(tmp_path / "base", model, base)
    plain = merge_adapters(base, adapters, config)
    save_weights(tmp_path / "merged", model, plain)

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "some/base"
    assert settings["use_dora"] == dora
    weights = load_file(tmp_path / "base" / "model.safetensors")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    arrays = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(arrays) == (2 + dora) * model.num_layers * len(settings["target_modules"])
    for name in [name for name in arrays if name.endswith("lora_A.weight")]:
        a, b = arrays[name], arrays[name.replace("lora_A", "lora_B")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        kind = module.rpartition(".")[2]
        assert kind in settings["target_modules"]
        rank = settings["rank_pattern"].get(kind, settings["r"])
        alpha = settings["alpha_pattern"].get(kind, settings["lora_alpha"])
        assert (a.shape[0], b.shape[1]) == (rank, rank)
        total = weights[f"{module}.weight"] + alpha / rank * (b.astype(np.float64) @ a)
        if dora:
            magnitude = arrays[name.replace("lora_A.weight", "lora_magnitude_vector")]
            total *= (magnitude / np.linalg.norm(total, axis=1))[:, None]
        weights[f"{module}.weight"] = total
    assert weights.keys() == merged.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(merged[name], weight, atol=1e-6, err_msg=name)

    again, loaded = load_adapters(tmp_path / "adapter", model)
    assert (again.rank, again.alpha, again.dora) == (4, 6.0, dora)
    if family == "llama":
        jax.tree.map(np.testing.assert_array_equal, loaded, adapters)
    got = merge_adapters(base, loaded, again)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), got, plain)


def test_the_layers_before_those_with_experts_are_adapted_too(tmp_path):
    model = model_of(
        family="dots1", qk_norm="head", num_experts=4, experts_per_token=2, router_scores="sigmoid", router_bias=True,
        num_layers=3, num_dense_layers=1, dense_mlp_dim=24, shared_mlp_dim=64,
    )  # fmt: skip
    adapters = random_adapters(ALL, model)
    assert set(adapters) == {"dense_layers", "layers"}
    base = init_params(model, jax.random.key(0))
    merged = merge_adapters(base, adapters, ALL)
    np.testing.assert_allclose(
        hidden_of(model, with_adapters(base, adapters, ALL)), hidden_of(model, merged), atol=1e-5
    )
    assert np.abs(hidden_of(model, merged) - hidden_of(model, base)).max() > 1e-2
    save_adapters(tmp_path, ALL, model, adapters, base="some/base")
    names = {
        name.removeprefix("base_model.model.model.layers.").removesuffix(".lora_A.weight")
        for name in load_file(tmp_path / "adapter_model.safetensors")
        if "lora_A" in name
    }
    attention = {f"{layer}.self_attn.{x}_proj" for layer in range(3) for x in "qkvo"}
    assert names == attention | {f"0.mlp.{x}_proj" for x in ("gate", "up", "down")}
    targets = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert {name.partition(".")[2] for name in names} == set(targets)
    again, loaded = load_adapters(tmp_path, model)
    assert set(target_kernels(again, base)) == set(target_kernels(ALL, base))
    jax.tree.map(np.testing.assert_array_equal, loaded, adapters)


def test_ranks_and_scales_of_a_file_may_differ_and_what_cannot_be_read_is_named(tmp_path):
    model = model_of()
    base = jax.tree.map(np.asarray, init_params(model, jax.random.key(0)))
    config = dataclasses.replace(ALL, targets="layers/attn/[qv]")
    adapters = random_adapters(config, model)
    save_adapters(tmp_path, config, model, adapters, base="some/base")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    arrays = load_file(tmp_path / "adapter_model.safetensors")

    def written(settings=settings, arrays=arrays):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        save_file(arrays, tmp_path / "adapter_model.safetensors")
        return tmp_path

    varied = settings | {"use_rslora": True, "alpha_pattern": {"layers.1.self_attn.q_proj": 60.0}}
    again, loaded = load_adapters(written(varied), model)
    got = merge_adapters(base, loaded, again)["layers"]["attn"]
    for layer, (name, scale) in ((0, ("q", 3.0)), (1, ("q", 30.0)), (1, ("v", 3.0))):
        part = adapters["layers"]["attn"][name]
        want = base["layers"]["attn"][name][layer] + scale * part["a"][layer] @ part["b"][layer]
        np.testing.assert_allclose(got[name][layer], want, atol=1e-5, err_msg=name)

    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    for change, match in (
        (dict(settings=settings | {"bias": "all"}), r"bias 'all' \(expected 'none'\)"),
        (dict(settings=settings | {"peft_type": "VERA"}), "'VERA'"),
        (dict(settings=settings | {"r": None}), "no r"),
        (dict(arrays={k: v for k, v in arrays.items() if k != name}), f"without {name}"),
        (dict(arrays=arrays | {name: arrays[name].T.copy()}), r"q_proj has shapes .*expected"),
        (dict(arrays=arrays | {"extra": arrays[name]}), "extra is not part"),
        (dict(arrays={}), "it has none"),
        (
            dict(arrays={k: v for k, v in arrays.items() if "layers.1.self_attn.v" not in k}),
            r"layers/attn/v/a in 1 of 2 layers",
        ),
    ):
        with pytest.raises(WeightsError, match=match):
            load_adapters(written(**change), model)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"adapter_model\.safetensors"):
        load_adapters(tmp_path, model)
