"""Log-probabilities and entropies: against float64, for any chunking, at trained tokens and nowhere else."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import bind, init_params
from rlvr_jax.models.policy_head import (
    LogitTransform,
    block_sums,
    logprob_and_entropy,
    target_logprobs,
)
from rlvr_jax.types import SamplingParams, TrainBatch


def reference(logits, targets):
    """(log softmax at targets, entropy, probabilities), float64."""
    wide = np.asarray(logits, np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    p = np.exp(logp)
    entropy = -np.where(p > 0, p * logp, 0).sum(-1)
    return logp[np.arange(len(targets)), targets], entropy, p


def random_logits(masked, M=16, V=1000):
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(M, V)) * 3).astype(np.float32)
    logits[rng.uniform(size=(M, V)) < masked] = -1e30
    targets = rng.integers(0, V, M)
    logits[np.arange(M), targets] = rng.normal(size=M)
    return logits, targets


@pytest.mark.parametrize("masked", [0.0, 0.9, 1.0])
def test_logprob_and_entropy_equal_float64(masked):
    logits, targets = random_logits(masked)
    logprobs, entropy = jax.jit(logprob_and_entropy)(logits, targets)
    expected_logprobs, expected_entropy, _ = reference(logits, targets)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


@pytest.mark.parametrize("masked", [0.0, 0.9])
def test_gradients_of_logprob_and_entropy_equal_their_formulas(masked):
    """onehot - p, and -p (log p + entropy)."""
    logits, targets = random_logits(masked)

    def gradient(which):
        return jax.jit(jax.grad(lambda x: logprob_and_entropy(x, targets)[which].sum()))(logits)

    _, entropy, p = reference(logits, targets)
    onehot = np.eye(logits.shape[1])[targets]
    np.testing.assert_allclose(gradient(0), onehot - p, atol=1e-5)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.where(p > 0, -p * (np.log(p) + entropy[:, None]), 0)
    np.testing.assert_allclose(gradient(1), expected, atol=1e-5)


def test_sums_over_a_large_vocabulary_are_exact_to_1e_6():
    logits = np.random.default_rng(0).normal(size=(4, 49152)).astype(np.float32)
    targets = np.arange(4)
    logprobs, entropy = jax.jit(logprob_and_entropy)(logits, targets)
    expected_logprobs, expected_entropy, _ = reference(logits, targets)
    np.testing.assert_allclose(logprobs, expected_logprobs, atol=2e-6)
    np.testing.assert_allclose(entropy, expected_entropy, atol=4e-6)


def test_blocks_hold_every_weight_once():
    weights = jnp.arange(1.0, 601.0)[None]
    blocks, sums = block_sums(weights)
    assert blocks.shape == (1, 3, 256)
    np.testing.assert_array_equal(blocks.reshape(-1)[:600], weights[0])
    assert not np.any(blocks.reshape(-1)[600:])
    assert float(sums.sum()) == 600 * 601 / 2


@pytest.fixture(scope="module")
def scored():
    """A model, hidden states, and a batch whose trained tokens have parents anywhere in the row."""
    rng = np.random.default_rng(0)
    B, T = 3, 20
    config = ModelConfig(
        vocab_size=300,
        num_layers=1,
        embed_dim=16,
        mlp_dim=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    params = init_params(config, jax.random.key(0))
    params["embed"]["embedding"] *= 50
    hidden = jnp.asarray(rng.normal(size=(B * T, 16)), jnp.float32)
    mask = (rng.uniform(size=(B, T)) < 0.5).astype(np.float32)
    mask[2] = 0
    parents = np.stack([rng.permutation(T) for _ in range(B)])
    zero = np.zeros((B, T), np.float32)
    batch = TrainBatch(
        tokens=jnp.asarray(rng.integers(0, 300, (B, T))),
        positions=zero.astype(int),
        segment_ids=zero.astype(int) + 1,
        prefix_ids=zero.astype(int),
        parents=jnp.asarray(parents),
        sample_ids=zero.astype(int),
        loss_mask=jnp.asarray(mask),
        advantages=zero,
        behavior_logprobs=zero,
        ref_logprobs=zero,
    )
    return config, params, hidden, batch


def score(scored, *, transform=LogitTransform(), num_targets=20, chunk=256):  # noqa: B008
    config, params, hidden, batch = scored

    @jax.jit
    def run(params, hidden, batch):
        return target_logprobs(
            bind(config, params),
            hidden,
            batch,
            transform=transform,
            num_targets=num_targets,
            chunk=chunk,
        )

    return run(params, hidden, batch)


def test_a_trained_token_is_scored_under_its_parents_prediction_and_no_other_is(scored):
    _, params, hidden, batch = scored
    logprobs, entropy = score(scored, transform=LogitTransform(temperature=0.7))
    embedding = np.asarray(params["embed"]["embedding"], np.float64)
    logits = np.asarray(hidden, np.float64).reshape(3, 20, -1) @ embedding.T / 0.7
    for row, column in np.ndindex(3, 20):
        if not batch.loss_mask[row, column]:
            assert logprobs[row, column] == entropy[row, column] == 0
            continue
        at = logits[row, batch.parents[row, column]]
        [logprob], [expected_entropy], _ = reference(at[None], [batch.tokens[row, column]])
        assert logprobs[row, column] == pytest.approx(logprob, abs=1e-5)
        assert entropy[row, column] == pytest.approx(expected_entropy, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 9])
def test_chunks_change_neither_values_nor_gradients(scored, chunk):
    config, params, hidden, batch = scored

    def run(chunk):
        def loss(params, hidden):
            logprobs, entropy = target_logprobs(
                bind(config, params),
                hidden,
                batch,
                transform=LogitTransform(),
                num_targets=20,
                chunk=chunk,
            )
            return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(params, hidden)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), run(chunk), run(256))


def test_the_bound_of_trained_tokens_may_be_tight(scored):
    most = int(scored[3].loss_mask.sum(1).max())
    assert most < 20
    jax.tree.map(np.testing.assert_array_equal, score(scored, num_targets=most), score(scored))


def test_logits_are_held_for_a_chunk_only_forwards_and_backwards(scored):
    config, params, hidden, batch = scored

    def loss(params):
        logprobs, _ = target_logprobs(
            bind(config, params),
            hidden,
            batch,
            transform=LogitTransform(),
            num_targets=20,
            chunk=6,
        )
        return logprobs.sum()

    text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert "f32[6,300]" in text
    for more in ("f32[60,300]", "f32[10,6,300]", "f32[3,20,300]"):
        assert more not in text
    with jax.set_mesh(make_mesh(3, 1, 2, devices=jax.devices()[:6])):
        text = str(jax.make_jaxpr(jax.grad(loss))(params))
    assert "f32[6,300]" in text  # of each of the three shards of the rows
    assert "f32[18,300]" not in text


def test_shards_of_rows_exchange_the_gradient_of_the_kernel_once(scored):
    """Not in every chunk; and the values and gradients are those of one device."""
    config, params, hidden, batch = scored

    def loss(params, hidden):
        logprobs, entropy = target_logprobs(
            bind(config, params),
            hidden,
            batch,
            transform=LogitTransform(),
            num_targets=20,
            chunk=5,
        )
        return jnp.sum(logprobs + 0.1 * entropy), (logprobs, entropy)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    expected = gradient(params, hidden)
    with jax.set_mesh(make_mesh(3, 1, 2, devices=jax.devices()[:6])):
        compiled = gradient.lower(params, hidden).compile()
        found = gradient(params, hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    exchanges = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(r"= .*f32\[(300|150),16\].* all-(reduce|gather)\(", line)
    ]
    assert 1 <= len(exchanges) <= 2, exchanges  # of the sum, and of the halves over the tensor axis
    assert not any("while" in line for line in exchanges)


def test_a_token_outside_the_truncated_set_keeps_a_finite_logprob(scored):
    """With top_k=1 the most likely token has probability 1, and any other shares it with that one."""
    logprobs, _ = score(scored, transform=LogitTransform(top_k=1))
    _, params, hidden, batch = scored
    logits = np.asarray(hidden, np.float64) @ np.asarray(params["embed"]["embedding"]).T
    logits = logits.reshape(3, 20, -1)
    for row, column in np.argwhere(batch.loss_mask):
        at = logits[row, batch.parents[row, column]]
        target = batch.tokens[row, column]
        pair = {int(target), int(at.argmax())}
        expected = at[target] - np.logaddexp.reduce(at[list(pair)])
        assert logprobs[row, column] == pytest.approx(expected, abs=1e-4)
    assert np.any(logprobs < -0.7)


def test_the_transform_is_that_of_the_sampling_params():
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    transform = LogitTransform.of(params)
    assert dataclasses.asdict(transform) == {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
    }
    assert hash(transform) == hash(LogitTransform.of(params))
    assert LogitTransform.of(SamplingParams()) == LogitTransform()
