"""Weights that go straight to their devices: the same numbers, each slice read once, wrong files named before."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file, save_file

from rlvr_jax import metrics
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import param_shardings, tree_paths
from rlvr_jax.errors import MissingExtraError, WeightsError
from rlvr_jax.models import checksums, loading
from rlvr_jax.models import weights as weights_module
from rlvr_jax.models.checksums import SUMS
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import PARAM_AXES, abstract_params
from rlvr_jax.models.families import FAMILIES
from rlvr_jax.models.loading import Weights
from rlvr_jax.models.tensor_file import TensorFile
from rlvr_jax.models.weights import (
    describe,
    load_weights,
    open_weights,
    resolve_model,
    save_weights,
)
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.text.tokenizer import load_tokenizer
from rlvr_jax.training.policy import load_policy
from tests.models.test_weights import UNTIED, write_gguf
from tests.process_group import process_group

MESHES = [(8, 1, 1), (1, 8, 1), (1, 2, 4), (2, 2, 2)]
# What differs from the tiny llama: norms, biases, fused tensors, experts, an own head.
FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False},
    "smollm3": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head", "tie_embeddings": False},
    "qwen3_moe": {"qk_norm": "head", "num_experts": 3, "experts_per_token": 2},
    "gemma2": {
        "norm_plus_one": True, "post_norm": True, "activation": "gelu_tanh", "attn_scale_dim": 8,
        "embed_scale": 32**0.5,
    },
    "gemma3_text": {
        "norm_plus_one": True, "post_norm": True, "activation": "gelu_tanh", "attn_scale_dim": 8, "qk_norm": "head",
        "local_rope_theta": 1e4, "embed_scale": 32**0.5,
    },
    "mistral": {"tie_embeddings": False},
    "mixtral": {"num_experts": 3, "experts_per_token": 2},
    "qwen2_moe": {
        "qkv_bias": True, "num_experts": 3, "experts_per_token": 2, "shared_mlp_dim": 16, "shared_gate": True,
    },
    "glm4_moe": {
        "num_experts": 3, "experts_per_token": 2, "router_scores": "sigmoid", "router_bias": True,
        "shared_mlp_dim": 64, "num_dense_layers": 1, "dense_mlp_dim": 32, "tie_embeddings": False,
    },
    "dots1": {
        "qk_norm": "head", "num_experts": 3, "experts_per_token": 2, "router_scores": "sigmoid", "router_bias": True,
        "shared_mlp_dim": 64, "num_dense_layers": 2, "dense_mlp_dim": 32,
    },
    "olmo3": {"pre_norm": False, "post_norm": True, "qk_norm": "all", "local_rope_theta": 1e4},
    "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": "all"},
    "phi3": {"tie_embeddings": False},
}  # fmt: skip


def family_config(tiny_config: ModelConfig, family: str) -> ModelConfig:
    """Sizes that every mesh above divides."""
    return dataclasses.replace(
        tiny_config,
        family=family,
        num_heads=8,
        num_kv_heads=4,
        num_layers=3,
        **FAMILY_FIELDS[family],
    )


def random_params(config: ModelConfig) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: rng.normal(0.3, 0.2, leaf.shape).astype(np.float32), abstract_params(config)
    )


def assert_same(got: Any, expected: Any) -> None:
    """Bitwise."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == b.tobytes()


@pytest.fixture
def directory(tiny_config: ModelConfig, tmp_path: pathlib.Path) -> pathlib.Path:
    """A llama in bfloat16, in several shards."""
    config = family_config(tiny_config, "llama")
    params = jax.tree.map(lambda array: array.astype(jnp.bfloat16), random_params(config))
    files = byte_level_tokenizer().files()
    config = dataclasses.replace(config, vocab_size=320)
    params["embed"]["embedding"] = np.resize(params["embed"]["embedding"], (320, 32))
    params["head"]["kernel"] = np.resize(params["head"]["kernel"], (32, 320))
    save_weights(tmp_path / "model", config, params, tokenizer_files=files, max_shard_bytes=40_000)
    return tmp_path / "model"


# On a mesh


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_onto_every_mesh_as_it_was_saved(
    tiny_config: ModelConfig, tmp_path: pathlib.Path, family: str
) -> None:
    config = family_config(tiny_config, family)
    params = random_params(config)
    save_weights(tmp_path / "model", config, params, max_shard_bytes=20_000)
    assert_same(load_weights(tmp_path / "model")[1], params)
    for sizes in MESHES:
        mesh = make_mesh(*sizes)
        got = load_weights(tmp_path / "model", mesh=mesh)[1]
        assert_same(got, params)
        wanted = param_shardings(mesh, abstract_params(config), PARAM_AXES)
        assert jax.tree.map(lambda array: array.sharding, got) == wanted


def test_numbers_are_converted_on_the_way_to_the_mesh(directory: pathlib.Path) -> None:
    mesh = make_mesh(1, 2, 4)
    whole = load_weights(directory, jnp.bfloat16)[1]
    assert_same(load_weights(directory, jnp.bfloat16, mesh=mesh)[1], whole)
    widened = jax.tree.map(lambda array: array.astype(np.float32), whole)
    assert_same(load_weights(directory, mesh=mesh)[1], widened)


@pytest.mark.parametrize("sizes", MESHES)
def test_each_slice_is_read_once_and_the_host_holds_one(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    mesh = make_mesh(*sizes)
    read: dict[str, list[int]] = {}
    read_slices = Weights._read

    def counted(self: Weights, path: str, *args: Any, **kwargs: Any) -> Any:
        pieces = read_slices(self, path, *args, **kwargs)
        read.setdefault(path, []).append(sum(piece.nbytes for piece in pieces))
        return pieces

    monkeypatch.setattr(Weights, "_read", counted)
    advanced: list[int] = []
    weights = open_weights(directory)
    params = weights.load(mesh=mesh, advance=advanced.append)
    for path, array in tree_paths(params).items():
        slices = {str(shard.index): shard.data.nbytes for shard in array.addressable_shards}
        assert sorted(read[path]) == sorted(slices.values())
        assert sum(read[path]) == array.nbytes
    assert sum(advanced) == weights.num_bytes(np.float32, mesh) == sum(map(sum, read.values()))


def test_of_columns_only_their_own_bytes_are_touched_in_a_local_file(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local file gives views: nothing is copied but what a device keeps."""
    rows = TensorFile.rows

    def checked(self: TensorFile, name: str, start: int, stop: int) -> np.ndarray:
        block = rows(self, name, start, stop)
        assert not block.flags.owndata and not block.flags.writeable
        return block

    monkeypatch.setattr(TensorFile, "rows", checked)
    load_weights(directory, mesh=make_mesh(1, 8, 1))


def test_blocks_of_rows_join_without_a_seam(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_weights(directory)[1]
    monkeypatch.setattr(loading, "_BLOCK_BYTES", 600)  # a few rows each
    assert_same(load_weights(directory)[1], whole)
    assert_same(load_weights(directory, mesh=make_mesh(2, 2, 2))[1], whole)


def test_a_model_that_does_not_divide_is_refused_before_it_is_read(
    tiny_config: ModelConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(tiny_config, embed_dim=36)
    save_weights(tmp_path / "model", config, random_params(config))
    monkeypatch.setattr(Weights, "_read", None)
    with pytest.raises(ValueError, match=r"size 36 must be divisible by mesh axis fsdp \(8\)"):
        load_weights(tmp_path / "model", mesh=make_mesh(1, 8, 1))


def test_a_load_that_takes_long_says_what_it_loaded_once(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load_weights(directory)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(metrics, "_QUIET_S", 0.0)
    load_weights(directory)
    out, line = capsys.readouterr()
    assert not out and line.count("\n") == 1
    assert f"M parameters of {directory}, tensors BF16 x 30; SHA-256 as in SHA256SUMS;" in line
    monkeypatch.setattr(weights_module, "is_first", lambda: False)
    load_weights(directory)
    assert capsys.readouterr() == ("", "")


def test_a_tensor_of_a_dtype_of_its_own_is_named(directory: pathlib.Path) -> None:
    """It is converted like the others; whoever wonders sees it."""
    (directory / SUMS).unlink()
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
            save_file(tensors, file)
    assert "BF16 x 29, F32 x 1 (model.norm.weight)" in describe(open_weights(directory))


def test_gguf_loads_onto_a_mesh_with_its_rows_in_order(tmp_path: pathlib.Path) -> None:
    """Slices cut through heads, whose rows the file has in another order."""
    write_gguf(tmp_path / "model.gguf", UNTIED, random_params(UNTIED))
    for sizes in [(1, 2, 4), (1, 1, 8)]:
        got = load_weights(tmp_path / "model.gguf", mesh=make_mesh(*sizes))[1]
        assert_same(got, load_weights(tmp_path / "model.gguf")[1])


TOGETHER = """
import sys
import jax
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.processes import joined
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.loading import Weights
from rlvr_jax.models.weights import load_weights

read_slices, read = Weights._read, []
def counted(*args, **kwargs):
    pieces = read_slices(*args, **kwargs)
    read.extend(piece.nbytes for piece in pieces)
    return pieces
Weights._read = counted
with joined():
    _, params = load_weights(sys.argv[1], mesh=make_mesh(1, 8, 1))
    here = jax.tree.map(lambda x: x.addressable_shards[0].data, params)
    print("READ", sum(read), float(jax.numpy.abs(here["layers"]["mlp"]["gate"]).sum()), flush=True)
    try:
        load_weights(sys.argv[2], mesh=make_mesh(1, 8, 1))
    except WeightsError as error:
        print("REFUSED", error, flush=True)
"""


def test_two_processes_each_read_their_half_and_both_hear_of_damage(
    directory: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    damaged = shutil.copytree(directory, tmp_path / "damaged")
    file = sorted(damaged.glob("*.safetensors"))[1]  # the second process looks at this one
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with process_group("-c", TOGETHER, directory, damaged, folder=tmp_path / "logs") as group:
        assert group.wait(240) == [0, 0], group.log(0) + group.log(1)
        logs = [group.log(index) for index in range(2)]
    config, params = load_weights(directory)
    gate = params["layers"]["mlp"]["gate"]
    whole = sum(
        leaf.nbytes
        for path, leaf in tree_paths(params).items()
        if "embed" not in PARAM_AXES[path]  # the others are halved
    )
    half = (4 * config.num_params - whole) // 2
    for index, log in enumerate(logs):
        [line] = [line for line in log.splitlines() if line.startswith("READ")]
        assert int(line.split()[1]) == half + whole
        first = gate[:, 16 * index : 16 * index + 4]  # of 32, 4 a device
        assert float(line.split()[2]) == pytest.approx(np.abs(first).sum(), rel=1e-5)
        assert f"REFUSED files in {damaged} are not what was published: {file.name} has" in log


# What is wrong is listed, before anything is read


def test_one_missing_one_transposed_and_one_of_another_dtype_are_named_in_one_error(
    directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "model.layers.1.mlp.up_proj.weight"
    transposed = "model.layers.0.mlp.gate_proj.weight"
    integers, eights = "model.layers.2.self_attn.q_proj.weight", "model.norm.weight"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        tensors.pop(missing, None)
        for name, array in tensors.items():
            if name == transposed:
                tensors[name] = np.ascontiguousarray(array.T)
            if name == integers:
                tensors[name] = array.astype(np.int32)
            if name == eights:
                tensors[name] = array.astype(jnp.float8_e4m3fn)
        if tensors:
            save_file(tensors, file)
    del index["weight_map"][missing]
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(TensorFile, "rows", None)
    monkeypatch.setattr(checksums, "sha256", None)
    with pytest.raises(WeightsError) as error:
        load_weights(directory, mesh=make_mesh())
    message = str(error.value)
    assert f"missing: {missing};" in message
    assert f"{transposed} (32, 64) (expected (64, 32), looks transposed);" in message
    assert "(expected BF16, F16, F32)" in message
    assert f"{integers} has dtype I32" in message and f"{eights} has dtype F8_E4M3" in message
    others = set(index["weight_map"]) - {transposed, integers, eights}
    assert not [name for name in others if name in message]


def test_a_header_that_contradicts_itself_is_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"x": np.zeros((4, 2), np.float32)}, file)
    content = file.read_bytes()
    for old, new in ((b"[4,2]", b"[4,3]"), (b"[0,32]", b"[8,40]"), (b'"F32"', b'"F16"')):
        assert old in content
        file.write_bytes(content.replace(old, new))
        with pytest.raises(WeightsError, match="cannot be read as safetensors"):
            TensorFile(loading.epath.Path(file))


# Checksums


def test_what_is_saved_carries_checksums_and_damage_names_the_file(directory: pathlib.Path) -> None:
    files = sorted(directory.glob("*.safetensors"))
    sums = (directory / SUMS).read_text().splitlines()
    assert [line.split()[1] for line in sums] == [file.name for file in files]
    content = bytearray(files[1].read_bytes())
    content[-3] ^= 1  # one bit of one number
    files[1].write_bytes(content)
    with pytest.raises(
        WeightsError, match=f"{files[1].name} has SHA-256 .* expected .*{SUMS}"
    ) as error:
        load_weights(directory, mesh=make_mesh())
    assert files[0].name not in str(error.value)
    (directory / SUMS).unlink()
    load_weights(directory)


def test_the_checksums_of_hugging_faces_client_are_held(directory: pathlib.Path) -> None:
    """In its cache a file is a link to a blob named after its SHA-256; in a local folder there are notes."""
    (directory / SUMS).unlink()
    file = sorted(directory.glob("*.safetensors"))[0]
    right = checksums.sha256(loading.epath.Path(file))
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    original = directory.parent / "original"
    file.rename(original)
    for name, works in ((right, True), (wrong, False)):
        blob = directory.parent / name
        shutil.copy(original, blob)
        file.symlink_to(blob)
        if works:
            load_weights(directory)
        else:
            with pytest.raises(WeightsError, match=f"{file.name} has SHA-256 {right}.*cache"):
                load_weights(directory)
        file.unlink()
    shutil.copy(original, file)
    notes = directory / ".cache/huggingface/download" / f"{file.name}.metadata"
    notes.parent.mkdir(parents=True)
    notes.write_text(f"{'a' * 40}\n{wrong}\n1700000000.0\n")
    with pytest.raises(WeightsError, match="download notes"):
        load_weights(directory)
    notes.write_text(f"{'a' * 40}\n{right}\n1700000000.0\n")
    load_weights(directory)


# In a bucket


class Bucket(MemoryFileSystem):
    """What gcsfs is to fsspec, over fsspec's own memory."""

    protocol = ("gs", "gcs")
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs: list[str] = []  # noqa: RUF012
    fetched: list[tuple[str, int, int]] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("gs://"))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        content = super().cat_file(path, start=start, end=end, **kwargs)
        self.fetched.append((os.path.basename(path), start, start + len(content)))
        return content


@pytest.fixture
def bucket(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    registry = importlib.import_module("fsspec.registry")._registry
    for name in ("gs", "gcs"):  # epath says the one, the URL the other
        monkeypatch.setitem(registry, name, Bucket)
    forget = backend.fsspec_backend._get_filesystem.cache_clear
    forget()
    for store in (Bucket.store, Bucket.fetched, Bucket.pseudo_dirs):
        store.clear()
    Bucket().put(str(directory), "gs://models/llama", recursive=True)
    yield "gs://models/llama"
    forget()


@pytest.mark.parametrize("sizes", MESHES)
def test_a_model_in_a_bucket_loads_by_ranges_each_byte_once(
    bucket: str, directory: pathlib.Path, sizes: tuple[int, int, int]
) -> None:
    weights = open_weights(bucket)
    assert sum(stop - start for _, start, stop in Bucket.fetched) < 20_000  # headers
    Bucket.fetched.clear()
    got = weights.load(mesh=make_mesh(*sizes))
    assert_same(got, load_weights(directory)[1])
    assert sum(stop - start for _, start, stop in Bucket.fetched) == 2 * weights.config.num_params
    by_file: dict[str, int] = {}
    for name, start, stop in sorted(Bucket.fetched):
        assert start >= by_file.get(name, 0)
        by_file[name] = stop


def test_a_policy_comes_out_of_a_bucket_with_its_tokenizer(
    bucket: str, directory: pathlib.Path
) -> None:
    policy = load_policy(bucket)
    assert_same(policy.params, load_weights(directory)[1])
    assert load_tokenizer(bucket).encode("é") == byte_level_tokenizer().encode("é")
    Bucket.store[
        next(name for name in Bucket.store if name.endswith("-00002-of-00004.safetensors"))
    ].write(b"x")
    with pytest.raises(WeightsError):
        load_policy(bucket)


def test_a_url_that_leads_nowhere_says_what_to_do(bucket: str) -> None:
    with pytest.raises(WeightsError, match=r"no model at gs://models/gemma; .*bucket"):
        resolve_model("gs://models/gemma")
    with pytest.raises(WeightsError, match="expected a gs:// URL"):
        resolve_model("ftp://models/llama")


def test_without_the_package_for_buckets_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'rlvr_jax\[gcs\]'"):
        resolve_model("gs://models/llama")
