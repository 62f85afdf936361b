"""The main invariant: the log-probabilities recorded while sampling are those the trainer computes, to the last bit.

The sampler prefills prompts, decodes with a cache, unrolled, and samples. The trainer scores packed token trees, layers
scanned and rematerialised, inside the program of the gradient. ``models.attention.key_bucket`` lists the conditions
under which XLA:CPU makes them equal; the last tests here hold that list itself, so that a change of XLA is noticed.
Measured with jax 0.10.2 on a Xeon with AVX512: 0.0, in float32 and bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.algorithms.objective import ObjectiveConfig
from rlvr_jax.data.packing import pack_groups
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.envs.single_turn import make_trajectory
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.attention import KeyValues, grouped_query_attention, key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import STRICT, init_params
from rlvr_jax.models.linear import matmul
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rollout.engine import MIN_ROWS_OF_A_CPU, Engine
from rlvr_jax.training.policy import load_pretrained
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import StepConfig, make_learner
from rlvr_jax.types import Group, Reward, SamplingParams, Task

# The widths of SmolLM2, where the dots are the real ones; two layers and a small vocabulary.
WIDE = ModelConfig(
    vocab_size=1000,
    num_layers=2,
    embed_dim=576,
    mlp_dim=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
)
SAMPLING = SamplingParams(temperature=0.7, max_tokens=16, seed=3)


@pytest.fixture(scope="module")
def wide_params():
    params = init_params(WIDE, jax.random.key(0))
    params["embed"]["embedding"] *= 5  # entropy of about 1.4 nats
    return params


@pytest.fixture(scope="module")
def wide_prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 1000, n).tolist() for n in (30, 33, 36, 39, 41, 43, 46, 48)]


def one_update(
    config,
    params,
    prompts,
    sampling,
    *,
    dtype,
    sizes=(1, 1, 1),
    param_dtype="float32",
    **step_options,
):
    """Samples 8 times 8 responses, trains on them once, and returns the metrics; the reference is the policy."""
    mesh = make_mesh(*sizes, devices=jax.devices()[: int(np.prod(sizes))])
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=0.0, num_steps=1, param_dtype=param_dtype)
    )
    state = init_state(config, params, optimizer, mesh, seed=0)
    engine = Engine(config, state.params, mesh=mesh, dtype=dtype)
    samples = engine.sample(
        prompts, params=sampling, num_samples=8, request_ids=range(len(prompts))
    )
    groups = [
        Group(
            task=Task(id=str(index), domain="test", prompt=(), answer=""),
            trajectories=tuple(
                make_trajectory(
                    prompt,
                    completion,
                    rewards=(Reward(name="none", value=0.0),),
                    index=g,
                    text="",
                )
                for g, completion in enumerate(completions)
            ),
            step=0,
        )
        for index, (prompt, completions) in enumerate(zip(prompts, samples, strict=True))
    ]
    largest = max(
        len(p) + sum(len(one.tokens) for one in group)
        for p, group in zip(prompts, samples, strict=True)
    )
    batch = pack_groups(groups, [np.linspace(-1, 1, 8)] * len(groups), length=key_bucket(largest))
    assert batch.tokens.shape[0] >= 2 * np.prod(sizes[:2])
    learner = make_learner(
        config,
        optimizer,
        mesh,
        state_shardings(config, optimizer, mesh),
        StepConfig(
            objective=ObjectiveConfig(),
            transform=LogitTransform.of(sampling),
            dtype=dtype,
            **step_options,
        ),
    )
    minibatch = learner.prepare(batch, state.params, scores=np.zeros((8, 8)), kl_coef=0.0)
    _, metrics = learner.train_step(state, minibatch)
    return jax.device_get(metrics)


def assert_equal_logprobs(metrics):
    assert metrics["logprob_delta_max"] <= 1e-4
    assert metrics["logprob_delta_mean"] <= 1e-6
    assert metrics["mismatch_kl"] <= 1e-9
    assert metrics["kl"] <= 1e-9  # the reference's program, forward only, is a third one
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["entropy"] > 0.3  # there was something to disagree about


@pytest.mark.slow
def test_sampler_and_trainer_agree_in_float32_on_two_devices(wide_params, wide_prompts):
    metrics = one_update(
        WIDE, wide_params, wide_prompts, SAMPLING, dtype="float32", sizes=(2, 1, 1)
    )
    assert_equal_logprobs(metrics)


def test_sampler_and_trainer_agree_in_bfloat16(wide_params, wide_prompts):
    metrics = one_update(WIDE, wide_params, wide_prompts, SAMPLING, dtype="bfloat16")
    assert_equal_logprobs(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1, 1), {"remat": "none"}),
        ((1, 2, 1), {}),
        ((4, 1, 1), {}),
        ((2, 1, 1), {"micro_rows": 4}),
        ((1, 1, 1), {"param_dtype": "bfloat16"}),
        ((1, 2, 1), {"param_dtype": "bfloat16", "remat": "offload"}),
    ],
    ids=str,
)
def test_they_agree_whatever_the_trainer_recomputes_or_cuts(
    wide_params, wide_prompts, dtype, sizes, options
):
    metrics = one_update(
        WIDE, wide_params, wide_prompts, SAMPLING, dtype=dtype, sizes=sizes, **options
    )
    assert_equal_logprobs(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_across_a_tensor_axis_they_agree_but_for_the_order_of_sums(
    wide_params, wide_prompts, dtype
):
    """Three devices add up their parts of a product in an order of their own: small, not zero."""
    config = dataclasses.replace(WIDE, vocab_size=999)
    params = wide_params | {"embed": {"embedding": wide_params["embed"]["embedding"][:999]}}
    prompts = [[min(token, 998) for token in prompt] for prompt in wide_prompts]
    metrics = one_update(config, params, prompts, SAMPLING, dtype=dtype, sizes=(1, 1, 3))
    assert metrics["logprob_delta_max"] <= (1e-4 if dtype == "float32" else 0.2)
    assert metrics["logprob_delta_mean"] <= (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.slow
def test_a_truncated_distribution_is_scored_as_it_was_sampled(tiny_config):
    """Top-k, top-p and min-p renormalise on both sides: forgetting it on one is a whole nat."""
    params = init_params(tiny_config, jax.random.key(0))
    params["embed"]["embedding"] *= 10
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny_config.vocab_size, 5 + n).tolist() for n in range(8)]
    sampling = SamplingParams(
        temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, max_tokens=8, seed=1
    )
    assert_equal_logprobs(one_update(tiny_config, params, prompts, sampling, dtype="float32"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampler_and_trainer_agree_on_smollm2(dtype):
    try:
        pretrained = load_pretrained("smollm2-135m-instruct")
    except WeightsError as error:
        pytest.skip(f"SmolLM2 is not installed: {error}")
    questions = [f"What is {3 * n + 5} times {7 * n + 2}? Explain your steps." for n in range(8)]
    prompts = [
        pretrained.chat.render_ids([{"role": "user", "content": question}])
        for question in questions
    ]
    sampling = SamplingParams(
        temperature=1.0,
        max_tokens=24,
        seed=3,
        stop_token_ids=tuple(pretrained.tokenizer.stop_token_ids),
    )
    metrics = one_update(pretrained.config, pretrained.params, prompts, sampling, dtype=dtype)
    assert_equal_logprobs(metrics)


# What XLA:CPU has to do for all this. Not documented, true today.
ROWS = [MIN_ROWS_OF_A_CPU, 64, 200]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are(dtype):
    rng = np.random.default_rng(0)
    product = jax.jit(matmul, compiler_options=STRICT)
    for fan_in, fan_out in ((576, 192), (576, 1536), (1536, 576)):
        x = jnp.asarray(rng.normal(size=(300, fan_in)), dtype)
        kernel = jnp.asarray(rng.normal(size=(fan_in, fan_out)), jnp.float32)
        whole = np.asarray(product(x, kernel))
        for rows in ROWS:
            part = np.asarray(product(x[:rows], kernel))
            np.testing.assert_array_equal(part, whole[:rows], err_msg=f"{rows} rows, {fan_out}")


def test_a_row_of_logits_does_not_depend_on_how_many_there_are():
    rng = np.random.default_rng(0)
    embedding = jnp.asarray(rng.normal(size=(1000, 576)), jnp.float32)
    head = jax.jit(
        lambda x, e: jax.lax.dot_general(x, e, (((1,), (1,)), ((), ()))), compiler_options=STRICT
    )
    x = jnp.asarray(rng.normal(size=(300, 576)), jnp.float32)
    whole = np.asarray(head(x, embedding))
    for rows in ROWS:
        part = np.asarray(head(x[:rows], embedding))
        np.testing.assert_array_equal(part, whole[:rows], err_msg=f"{rows} rows")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_attention_does_not_depend_on_padding_place_or_the_number_of_rows(dtype):
    """The same 40 keys and one query: as a decode step, in a group, and in a packed row far from its start."""
    K, R, H, length = 3, 3, 64, 40
    rng = np.random.default_rng(0)
    attend = jax.jit(
        functools.partial(_attend, num_heads=K * R, head_dim=H), compiler_options=STRICT
    )

    def random(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    query, keys, values = random(K * R, H), random(K, length, H), random(K, length, H)

    def place(rows, queries, size, offset):
        """The query in every place; the keys at ``offset`` among ``size``, noise elsewhere, masked."""
        k = random(rows, K, size, H).at[:, :, offset : offset + length].set(keys)
        v = random(rows, K, size, H).at[:, :, offset : offset + length].set(values)
        columns = jnp.arange(size)
        mask = (columns >= offset) & (columns < offset + length)
        out = attend(query, k, v, jnp.broadcast_to(mask, (rows, queries, size)))
        return np.asarray(out).reshape(rows * queries, -1)

    expected = place(2, 8, 48, 0)[0]
    for rows, queries, size, offset in (
        (40, 1, 48, 0),  # decode
        (8, 8, 48, 0),  # eight samples of a prompt
        (5, 8, 48, 8),
        (8, 8, 112, 0),
        (3, 48, 112, 37),
        (4, 240, 240, 121),  # training
    ):
        found = place(rows, queries, size, offset)
        np.testing.assert_array_equal(
            found,
            np.broadcast_to(expected, found.shape),
            err_msg=f"{(rows, queries, size, offset)}",
        )


def _attend(query, k, v, mask, *, num_heads, head_dim):
    rows, queries, _ = mask.shape
    q = jnp.broadcast_to(query, (rows * queries, num_heads, head_dim))
    return grouped_query_attention(q, [KeyValues(k, v, mask)])
