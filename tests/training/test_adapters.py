"""Training adapters: the base stays, the KL to it is right, sampler and trainer agree, and a run goes on as it was."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.cli.flags import load_config
from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import tree_paths
from rlvr_jax.envs.single_turn import make_trajectory
from rlvr_jax.errors import ConfigError, WeightsError
from rlvr_jax.metrics import read_metrics
from rlvr_jax.models.adapters import AdapterConfig, adapter_config, merge_adapters, with_adapters
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.frozen import quantize_base
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.rollout.naive import NaiveSampler
from rlvr_jax.training import policy as policy_module
from rlvr_jax.training import rl, sft
from rlvr_jax.training.policy import load_pretrained
from rlvr_jax.training.state import (
    OptimizerConfig,
    abstract_trained,
    init_state,
    make_optimizer,
    state_shardings,
)
from rlvr_jax.training.step import StepConfig, make_learner
from rlvr_jax.types import Group, Reward, SamplingParams, Task
from tests.training.toys import REPOSITORY, get_config, override

ADAPTER = AdapterConfig(rank=4, alpha=8.0, targets="layers/(attn|mlp)/.*")
DORA = dataclasses.replace(ADAPTER, dora=True)
NF4 = dataclasses.replace(ADAPTER, quantize="nf4", double_quant=True)
INT8 = dataclasses.replace(ADAPTER, quantize="int8", targets="layers/attn/[qv]")
MODEL = ModelConfig(
    vocab_size=512,
    num_layers=4,
    embed_dim=128,
    mlp_dim=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=12, seed=3)


class Trained:
    """A learner of adapters whose B is not zero, its engine, and a batch that the engine sampled."""

    def __init__(self, sizes=(1, 1, 1), dtype="float32", adapter: AdapterConfig | None = ADAPTER):
        mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
        self.params = init_params(MODEL, jax.random.key(0))
        self.params["embed"]["embedding"] *= 5
        if adapter is not None and adapter.quantization is not None:
            self.params = quantize_base(self.params, adapter.quantization, None)
        self.adapter = adapter
        optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3, num_steps=9))
        self.state = init_state(MODEL, self.params, optimizer, mesh, seed=0, adapter=adapter)
        config = StepConfig(
            objective=ObjectiveConfig(max_response_length=12, kl_loss_coef=0.1),
            transform=LogitTransform.of(SAMPLING),
            dtype=dtype,
            adapter=adapter,
        )
        shardings = state_shardings(MODEL, optimizer, mesh, adapter)
        self.learner = make_learner(MODEL, optimizer, mesh, shardings, config)
        self.base = self.learner.place(self.params)

    def move(self):
        """As after some steps."""

        def noisy(path, leaf):
            noise = np.random.default_rng(len(path)).normal(0, 0.05, leaf.shape)
            return jax.device_put(leaf + jnp.asarray(noise, jnp.float32), leaf.sharding)

        params = self.state.params
        moved = [noisy(path, leaf) for path, leaf in tree_paths(params).items()]
        params = jax.tree.unflatten(jax.tree.structure(params), moved)
        self.state = dataclasses.replace(self.state, params=params)
        return self

    @property
    def policy(self):
        assert self.adapter is not None
        return with_adapters(self.base, self.state.params, self.adapter)

    def sample(self):
        engine = Engine(MODEL, self.policy, mesh=self.learner.mesh, dtype=self.learner.config.dtype)
        rng = np.random.default_rng(0)
        self.prompts = [rng.integers(0, 512, n).tolist() for n in range(9, 17)]
        return engine.sample(self.prompts, params=SAMPLING, num_samples=8, request_ids=range(8))

    def minibatch(self, samples, reference=None):
        none = (Reward(name="none", value=0.0),)
        groups = [
            Group(
                task=Task(id=str(index), domain="test", prompt=(), answer=""),
                trajectories=tuple(
                    make_trajectory(prompt, completion, rewards=none, index=g, text="")
                    for g, completion in enumerate(completions)
                ),
                step=0,
            )
            for index, (prompt, completions) in enumerate(zip(self.prompts, samples, strict=True))
        ]
        advantages = [np.linspace(-1, 1, 8, dtype=np.float32) for _ in groups]
        batch = pack_groups(groups, advantages, length=key_bucket(128), row_multiple=8)
        scores = np.zeros((8, 8), np.float32)
        reference = self.base if reference is None else reference
        return self.learner.prepare(batch, reference, scores=scores, kl_coef=0.0)


@pytest.mark.parametrize(
    ("adapter", "dtype"),
    [
        (DORA, "bfloat16"),
        pytest.param(ADAPTER, "float32", marks=pytest.mark.slow),
        (NF4, "float32"),
        pytest.param(INT8, "bfloat16", marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(NF4, dora=True), "bfloat16", marks=pytest.mark.slow),
        pytest.param(ADAPTER, "bfloat16", marks=pytest.mark.slow),
        pytest.param(DORA, "float32", marks=pytest.mark.slow),
    ],
)
def test_sampler_and_trainer_agree_and_the_kl_is_that_of_the_merged_model_to_the_base(
    adapter, dtype
):
    trained = Trained(dtype=dtype, adapter=adapter).move()
    samples = trained.sample()
    minibatch = trained.minibatch(samples)
    merged = merge_adapters(trained.base, trained.state.params, adapter)
    of_merged, of_base = (
        np.asarray(batch.ref_logprobs, np.float64)[np.asarray(batch.loss_mask) > 0]
        for batch in (trained.minibatch(samples, merged).batch, minibatch.batch)
    )
    kl = np.mean(np.expm1(of_base - of_merged) - (of_base - of_merged))
    _, metrics = trained.learner.train_step(trained.state, minibatch, trained.base)
    assert float(metrics["logprob_delta_max"]) <= 1e-4
    assert float(metrics["logprob_delta_mean"]) <= 1e-6
    assert float(metrics["kl"]) == pytest.approx(kl, rel=1e-4 if dtype == "float32" else 1e-3)
    assert kl > 1e-3  # the base is not the policy any more


@pytest.mark.parametrize("adapter", [ADAPTER, NF4], ids=["lora", "nf4"])
def test_the_engine_samples_what_the_naive_sampler_does(adapter):
    trained = Trained(adapter=adapter).move()
    samples = trained.sample()
    merged = merge_adapters(trained.base, trained.state.params, adapter)
    for params in (trained.policy, merged):
        naive = NaiveSampler(MODEL, params).sample(
            trained.prompts[:2], params=SAMPLING, num_samples=2, request_ids=range(2)
        )
        for row, completions in enumerate(naive):
            for mine, theirs in zip(samples[row], completions, strict=False):
                np.testing.assert_array_equal(mine.tokens, theirs.tokens)
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "adapter",
    [ADAPTER, NF4, *(pytest.param(other, marks=pytest.mark.slow) for other in (DORA, INT8))],
    ids=["lora", "nf4", "dora", "int8"],
)
def test_an_update_moves_the_adapters_alone_and_eight_devices_do_as_one(adapter):
    ends = []
    for sizes in ((1, 1, 1), (2, 2, 2)):
        trained = Trained(sizes=sizes, adapter=adapter)
        before = jax.tree.map(np.array, trained.base)
        minibatch = trained.minibatch(trained.sample())
        state, metrics = trained.learner.train_step(trained.state, minibatch, trained.base)
        assert float(metrics["kl"]) <= (1e-9 if sizes == (1, 1, 1) else 1e-6)
        jax.tree.map(np.testing.assert_array_equal, trained.base, before)  # and it is still alive
        for path, leaf in tree_paths(state.params).items():
            assert np.any(leaf), path
        ends.append((jax.tree.map(np.asarray, state.params), float(metrics["grad_norm"])))
    (one, norm), (eight, norm_of_eight) = ends
    assert norm_of_eight == pytest.approx(norm, rel=1e-4)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), one, eight)


def test_an_update_holds_no_second_copy_of_the_base_and_no_moments_of_it():
    def memory(trained, base):
        minibatch = trained.minibatch(samples)
        with jax.set_mesh(trained.learner.mesh):
            lowered = trained.learner._update.lower(
                trained.state,
                minibatch.batch,
                base,
                bounds=minibatch.bounds,
                num_samples=minibatch.num_samples,
            )
        return lowered.compile().memory_analysis()

    trained = Trained()
    samples = trained.sample()
    whole = Trained(adapter=None)
    whole.prompts = trained.prompts
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.base))
    of_adapters, of_all = memory(trained, trained.base), memory(whole, None)
    small = sum(leaf.nbytes for leaf in jax.tree.leaves(trained.state.params))
    assert of_adapters.argument_size_in_bytes < size + 4 * small + 1e5
    assert of_adapters.output_size_in_bytes < 4 * small
    assert of_all.argument_size_in_bytes > 3 * size
    kernels = size - trained.base["embed"]["embedding"].nbytes
    assert of_adapters.temp_size_in_bytes < of_all.temp_size_in_bytes - 0.7 * kernels


def test_a_base_in_few_bits_is_never_dense_all_at_once():
    def memory(adapter):
        trained = Trained(adapter=adapter)
        minibatch = trained.minibatch(samples)
        shape = jax.ShapeDtypeStruct
        engine = Engine(MODEL, trained.policy, mesh=trained.learner.mesh)
        with jax.set_mesh(trained.learner.mesh):
            update = trained.learner._update.lower(
                trained.state,
                minibatch.batch,
                trained.base,
                bounds=minibatch.bounds,
                num_samples=minibatch.num_samples,
            )
            sampling = engine._generate.lower(  # pyright: ignore[reportFunctionMemberAccess]
                trained.policy,
                shape((8, 16), jnp.int32),
                shape((8,), jnp.int32),
                shape((8,), jnp.uint32),
                shape((), jnp.uint32),
                num_samples=8,
                max_tokens=12,
                transform=LogitTransform.of(SAMPLING),
                stop_token_ids=(),
            )
        return [lowered.compile().memory_analysis() for lowered in (update, sampling)]

    lora = Trained()
    samples = lora.sample()
    Trained.prompts = lora.prompts
    base = tree_paths(lora.base)
    kernels = sum(leaf.nbytes for path, leaf in base.items() if leaf.ndim == 3)
    for dense, few_bits, held in zip(memory(ADAPTER), memory(NF4), (0, 1), strict=True):
        saved = dense.argument_size_in_bytes - few_bits.argument_size_in_bytes
        assert saved > (1 - 0.53 / 4) * kernels
        # One layer and its adapter's product; the sampler of a dense base holds a merged copy of all four.
        assert few_bits.temp_size_in_bytes < dense.temp_size_in_bytes + (0.5 - held) * kernels


def adapted(**values):
    return override(get_config(), adapter__rank=4, algorithm__kl_loss_coef=0.05, **values)


def adapters_of(workdir):
    adapter = AdapterConfig(rank=4, alpha=16.0, targets="layers/(attn|mlp)/.*")
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        found = checkpointer.restore_params(
            abstract_trained(load_pretrained("tiny-random").config, adapter)
        )
    assert found is not None
    return jax.tree.map(np.asarray, found[1])


@pytest.mark.slow
def test_a_run_starts_at_the_base_resumes_bitwise_and_refuses_another_base(tmp_path, monkeypatch):
    config = adapted(num_steps=3)
    rl.train(config, tmp_path / "whole")
    rl.train(override(config, num_steps=2), tmp_path / "cut")
    rl.train(config, tmp_path / "cut")
    whole = adapters_of(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, whole, adapters_of(tmp_path / "cut"))
    records = [record for record in read_metrics(tmp_path / "whole") if "kl" in record]
    assert records[0]["kl"] <= 1e-9 < 1e-7 < records[-1]["kl"]
    assert all(record["logprob_delta_mean"] <= 1e-6 for record in records)

    merged = load_pretrained(tmp_path / "whole")
    start = load_pretrained("tiny-random")
    kernel = start.params["layers"]["attn"]["q"]
    part = whole["layers"]["attn"]["q"]
    np.testing.assert_allclose(
        merged.params["layers"]["attn"]["q"], kernel + 4.0 * part["a"] @ part["b"], atol=1e-6
    )
    np.testing.assert_array_equal(
        merged.params["embed"]["embedding"], start.params["embed"]["embedding"]
    )
    assert merged.step == 3
    settings = json.loads((tmp_path / "whole" / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 16.0)
    alone = load_pretrained(tmp_path / "whole" / "adapter")  # and the base that it names
    jax.tree.map(np.testing.assert_array_equal, alone.params, merged.params)

    scale = start.params["final_norm"]["scale"]
    other = dataclasses.replace(start, params=start.params | {"final_norm": {"scale": scale + 1}})
    monkeypatch.setattr(policy_module, "_tiny_random", lambda mesh: other)
    with pytest.raises(WeightsError, match="trained beside a base with checksum"):
        load_pretrained(tmp_path / "whole")
    with pytest.raises(WeightsError, match="'tiny-random' are not what they were"):
        rl.train(override(config, num_steps=4), tmp_path / "whole")


@pytest.mark.slow
def test_the_fused_schedule_trains_the_adapters_that_the_staged_one_does(tmp_path):
    for schedule in ("staged", "fused"):
        rl.train(adapted(num_steps=2, schedule=schedule), tmp_path / schedule)
    staged, fused = (adapters_of(tmp_path / name) for name in ("staged", "fused"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), staged, fused)


@pytest.mark.slow
def test_a_run_beside_four_bits_resumes_bitwise_and_is_merged_into_them(tmp_path):
    config = adapted(num_steps=3, adapter__quantize="nf4", adapter__double_quant=True)
    rl.train(config, tmp_path / "whole")
    rl.train(override(config, num_steps=2), tmp_path / "cut")
    rl.train(config, tmp_path / "cut")
    whole = adapters_of(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, whole, adapters_of(tmp_path / "cut"))
    records = [record for record in read_metrics(tmp_path / "whole") if "kl" in record]
    assert records[0]["kl"] <= 1e-9 < 1e-7 < records[-1]["kl"]
    assert all(record["logprob_delta_mean"] <= 1e-6 for record in records)
    adapter = adapter_config(**config.adapter)
    assert adapter is not None
    base = load_pretrained("tiny-random", quantization=adapter.quantization).params
    want = merge_adapters(base, whole, adapter)
    for name in (tmp_path / "whole", tmp_path / "whole" / "adapter"):
        jax.tree.map(np.testing.assert_array_equal, load_pretrained(name).params, want)
    rl.train(
        override(config, num_steps=3, schedule="fused"),
        tmp_path / "fused",
    )
    fused = adapters_of(tmp_path / "fused")
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), fused, whole)
    with pytest.raises(ConfigError, match="quantize"):
        rl.train(override(config, adapter__quantize="int8"), tmp_path / "whole")


@pytest.mark.slow
def test_fine_tuning_with_magnitudes_resumes_bitwise_and_leaves_a_merged_model(tmp_path):
    config = load_config(f"{REPOSITORY / 'configs' / 'sft_chat.py'}:tiny")
    config = override(
        config, adapter__rank=2, adapter__dora=True, optimizer__schedule="constant", num_steps=4
    )
    summary = sft.train(config, tmp_path / "whole")
    assert summary["eval_loss_after"] < summary["eval_loss_before"]
    sft.train(override(config, num_steps=2), tmp_path / "cut")
    sft.train(config, tmp_path / "cut")
    for name in ("adapter/adapter_model.safetensors", "model/model.safetensors"):
        files = [(tmp_path / run / name).read_bytes() for run in ("whole", "cut")]
        assert files[0] == files[1]
    start, model, alone, run = (
        load_pretrained(name).params
        for name in (
            "tiny-random",
            *(tmp_path / "whole" / name for name in ("model", "adapter", ".")),
        )
    )
    for other in (alone, run):
        jax.tree.map(np.testing.assert_array_equal, other, model)
    changed = tree_paths(jax.tree.map(lambda a, b: bool(np.any(a != b)), model, start))
    assert {path for path, differs in changed.items() if differs} == {
        path for path in changed if path.startswith(("layers/attn/", "layers/mlp/"))
    }
