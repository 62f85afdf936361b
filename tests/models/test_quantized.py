"""Kernels in few bits: the codes they should have, the same numbers in every program, on every mesh and as they are
read, and a merged model that is the one that was trained."""

import dataclasses
import functools
import json
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.errors import WeightsError
from rlvr_jax.models import peft
from rlvr_jax.models.adapters import (
    AdapterConfig,
    adapter_config,
    checksum,
    init_adapters,
    merge_adapters,
    with_adapters,
)
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.frozen import abstract_base, base_shardings, quantize_base
from rlvr_jax.models.linear import AdaptedKernel, matmul
from rlvr_jax.models.quantized import NF4, Quantization, QuantizedKernel, quantize_kernel
from rlvr_jax.models.weights import open_weights, read_params, save_weights
from tests.models.test_adapters import hidden_of, model_of, random_adapters

KINDS = ["nf4", "int8"]
AXES = (None, None)
MODEL = model_of(embed_dim=128, num_heads=8, head_dim=16, mlp_dim=256)


def quantized(kernel, kind, double=False):
    how = Quantization(kind=kind, double=double)
    return jax.jit(functools.partial(quantize_kernel, quantization=how, axes=AXES))(kernel)


def expected(kernel, kind):
    """(codes, scales, kernel) by the definition, in float64: of every block, the nearest value of all."""
    rows, columns = kernel.shape
    blocks = kernel.astype(np.float64).reshape(rows // 64, 64, columns)
    values = NF4.astype(np.float64) if kind == "nf4" else np.arange(-127, 128.0)
    scales = np.abs(blocks).max(1) / values[-1]
    safe = np.where(scales > 0, scales, 1)[:, None]
    codes = np.abs((blocks / safe)[..., None] - values).argmin(-1)
    return codes.reshape(rows, columns), scales, (values[codes] * safe).reshape(rows, columns)


def test_the_values_of_nf4_are_the_quantiles_of_a_normal_distribution():
    """Dettmers et al. 2023, section 3 and appendix E: eight positive ones, seven negative, and 0."""
    quantile = statistics.NormalDist().inv_cdf
    offset = (1 - 1 / (2 * 15) + 1 - 1 / (2 * 16)) / 2
    positive = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    values = np.sort([*positive, 0.0, *negative])
    np.testing.assert_allclose(values / values[-1], NF4, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_definition(kind):
    kernel = np.random.default_rng(0).normal(size=(192, 256)).astype(np.float32)
    kernel[64:128, 3] = 0
    got = quantized(kernel, kind)
    codes, scales, dense = expected(kernel, kind)
    kept = np.asarray(got.codes)
    if kind == "nf4":
        kept = np.stack([kept >> 4, kept & 15], 1).reshape(codes.shape)
    else:
        kept = kept.astype(np.int64) + 127
    assert np.mean(kept == codes) > 1 - 1e-4  # the rest lies half-way, to float32
    np.testing.assert_allclose(got.scales, scales, rtol=1e-6)
    same = kept == codes
    np.testing.assert_allclose(np.asarray(got.dense())[same], dense[same], rtol=1e-6)
    assert not np.any(got.dense()[64:128, 3])
    assert got.shape == kernel.shape

    double = quantized(kernel, kind, double=True)
    np.testing.assert_array_equal(double.codes, got.codes)
    assert double.scales.dtype == jnp.uint8
    ranges = np.asarray(double.step)[:, :1] / 2 + 1e-6
    decoded = np.asarray(double.low) + np.asarray(double.step) * np.asarray(double.scales)
    assert np.all(np.abs(decoded - scales) <= ranges)
    bits = 4 if kind == "nf4" else 8
    for of, overhead in ((got, 32 / 64), (double, 8 / 64 + 64 / (64 * 256))):
        assert (
            sum(leaf.nbytes for leaf in jax.tree.leaves(of)) == kernel.size * (bits + overhead) / 8
        )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_through_the_dense_kernel_to_inputs_and_adapters(kind):
    rng = np.random.default_rng(0)
    x, w, a, b, g = (rng.normal(size=s) for s in ((9, 64), (64, 8), (64, 3), (3, 8), (9, 8)))
    kernel = quantized(jnp.asarray(w, jnp.float32), kind, double=True)
    w = np.asarray(kernel.dense(), np.float64)
    x, a, b, g = (jnp.asarray(part, jnp.float32) for part in (x, a, b, g))

    def alone(x):
        return jnp.sum(matmul(x, kernel) * g)

    def adapted(x, a, b):
        return jnp.sum(matmul(x, AdaptedKernel(kernel=kernel, a=a, b=b, scale=0.7)) * g)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(jax.jit(jax.grad(alone))(x), g @ w.T)
    of_x, of_a, of_b = jax.jit(jax.grad(adapted, argnums=(0, 1, 2)))(x, a, b)
    close(of_x, g @ (w + 0.7 * a @ b).T)
    close(of_a, 0.7 * x.T @ g @ b.T)
    close(of_b, 0.7 * a.T @ x.T @ g)


@pytest.mark.parametrize(
    ("kind", "dora", "dtype"), [("nf4", False, jnp.float32), ("int8", True, jnp.bfloat16)]
)
def test_merged_parameters_are_the_adapted_quantised_model(kind, dora, dtype):
    adapter = AdapterConfig(
        rank=4,
        alpha=6.0,
        targets="layers/(attn/[qv]|mlp/.*)",  # not all kernels: the others are in few bits too
        dora=dora,
        quantize=kind,
        double_quant=True,
    )
    params = jax.tree.map(np.asarray, init_params(MODEL, jax.random.key(0)))
    assert adapter.quantization is not None
    base = quantize_base(params, adapter.quantization, None)
    new = init_adapters(adapter, base, jax.random.key(1))
    start, of_base = (hidden_of(MODEL, p, dtype) for p in (with_adapters(base, new, adapter), base))
    if dora:
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (start, of_base)), atol=0.2)
    else:
        np.testing.assert_array_equal(start, of_base)
    adapters = random_adapters(adapter, MODEL)
    merged = merge_adapters(base, adapters, adapter)
    assert tree_paths(merged).keys() == tree_paths(params).keys()
    adapted, of_merged = (
        np.asarray(hidden_of(MODEL, p, dtype), np.float32)
        for p in (with_adapters(base, adapters, adapter), merged)
    )
    if dora:  # norms of columns may be added up in another order
        np.testing.assert_allclose(adapted, of_merged, atol=0.1)
        assert np.mean(np.abs(adapted - of_merged)) < 1e-3
    else:
        np.testing.assert_array_equal(adapted, of_merged)
    assert not np.array_equal(adapted, hidden_of(MODEL, params, dtype))


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_what_is_read_in_slices_is_the_same_on_every_mesh(kind, tmp_path):
    how = Quantization(kind=kind, double=True)
    params = jax.tree.map(np.asarray, init_params(MODEL, jax.random.key(0)))
    save_weights(tmp_path / "model", MODEL, params)
    weights = open_weights(tmp_path / "model")
    on_host = quantize_base(params, how, None)
    shapes = abstract_base(MODEL, how)
    for sizes in (None, (2, 2, 2), (1, 8, 1)):
        mesh = sizes and make_mesh(*sizes)
        read = read_params(weights, mesh=mesh, quantization=how)
        jax.tree.map(np.testing.assert_array_equal, read, on_host)
        jax.tree.map(
            lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)),
            read,
            shapes,
        )
        assert checksum(read) == checksum(on_host)
        if mesh is None:
            continue
        again = read
        if kind == "int8":  # from what is there already, in one program
            again = quantize_base(read_params(weights, mesh=mesh), how, mesh)
            jax.tree.map(np.testing.assert_array_equal, again, on_host)
        jax.tree.map(
            lambda x, y, wanted: np.testing.assert_equal(
                (x.sharding, y.sharding), (wanted, wanted)
            ),
            read,
            again,
            base_shardings(MODEL, mesh, how),
        )
        for name in ("attn/q", "attn/o", "mlp/down"):
            kernel = tree_paths(read, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
            codes = kernel[f"layers/{name}"].codes
            part = codes.addressable_shards[0].data.size * mesh.shape["fsdp"] * mesh.shape["tensor"]
            assert part == codes.size


def test_blocks_that_do_not_divide_and_settings_without_meaning_are_refused_with_the_numbers(
    tmp_path,
):
    with pytest.raises(
        ValueError, match=r"attn/o: its 32 inputs are 1 blocks of 32.*by 2,.*tensor"
    ):
        base_shardings(
            model_of(), make_mesh(1, 1, 2, devices=jax.devices()[:2]), Quantization(kind="nf4")
        )
    with pytest.raises(ValueError, match="24 inputs has blocks of 8; expected a multiple of 16"):
        abstract_base(model_of(embed_dim=24), Quantization(kind="nf4"))
    settings = dict(alpha=1.0, targets=".*")
    with pytest.raises(ValueError, match=r"quantize is 'int4'; expected none, nf4 or int8"):
        AdapterConfig(rank=2, quantize="int4", **settings)
    with pytest.raises(ValueError, match="double_quant is on"):
        AdapterConfig(rank=2, double_quant=True, **settings)
    with pytest.raises(ValueError, match=r"'nf4' and adapter\.rank 0"):
        adapter_config(rank=0, quantize="nf4", **settings)
    adapter = AdapterConfig(rank=4, alpha=6.0, targets="layers/attn/q", quantize="nf4")
    adapters = random_adapters(adapter, MODEL)
    peft.save_adapters(tmp_path, adapter, MODEL, adapters, base="a/base")
    assert peft.base_of(tmp_path) == ("a/base", Quantization(kind="nf4"))
    (tmp_path / peft.QUANTIZATION_FILE).write_text(json.dumps({"kind": "fp4"}))
    with pytest.raises(WeightsError, match="expected kind nf4 or int8"):
        peft.base_of(tmp_path)
    peft.save_adapters(
        tmp_path, dataclasses.replace(adapter, quantize="none"), MODEL, adapters, base="a/base"
    )
    assert peft.base_of(tmp_path) == ("a/base", None)
