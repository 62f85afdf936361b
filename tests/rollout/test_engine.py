"""The engine: a sample is a function of (weights, prompt, seed, request, sample index), and of nothing else."""

import jax
import numpy as np
import pytest

from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.sharding import param_shardings
from rlvr_jax.models.decoder import PARAM_AXES
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.rollout.generate import Rollout
from rlvr_jax.types import SamplingParams

from .conftest import letters

SAMPLING = SamplingParams(temperature=1.0, max_tokens=12, seed=3)
LENGTHS = [3, 14, 7, 1, 11, 16]


@pytest.fixture(scope="module")
def requests(config):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in LENGTHS]
    return {100 + 7 * index: prompt for index, prompt in enumerate(prompts)}


@pytest.fixture(scope="module")
def samples(engine, requests):
    """What every other way of running the same requests has to give."""
    return sample(engine, requests)


def sample(engine, requests, sampling=SAMPLING, num_samples=4):
    """{request id: list of completions}"""
    found = engine.sample(
        list(requests.values()),
        params=sampling,
        num_samples=num_samples,
        request_ids=list(requests),
    )
    return dict(zip(requests, found, strict=True))


def assert_same(ours, expected):
    for request_id, group in ours.items():
        for one, other in zip(group, expected[request_id], strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def flat(samples):
    return [completion for group in samples.values() for completion in group]


def test_samples_differ_between_requests_samples_and_seeds(engine, requests, samples):
    other_seed = sample(engine, requests, SamplingParams(temperature=1.0, max_tokens=12, seed=4))
    texts = {tuple(one.tokens) for one in flat(samples) + flat(other_seed)}
    assert len(texts) == 2 * 4 * len(requests)
    same_prompt = sample(engine, {1: [5, 6], 2: [5, 6]})
    assert len({tuple(one.tokens) for one in flat(same_prompt)}) == 8


def test_samples_do_not_depend_on_order_or_company(engine, requests, samples):
    assert_same(sample(engine, dict(reversed(requests.items()))), samples)
    for request_id, prompt in list(requests.items())[:2]:
        assert_same(sample(engine, {request_id: prompt}), samples)


def test_samples_do_not_depend_on_a_longer_prompt_and_it_may_fill_the_context(
    config, engine, requests, samples
):
    longest = [1] * (config.max_length - SAMPLING.max_tokens)
    ours = sample(engine, requests | {9: longest})
    for one in ours.pop(9):
        assert len(one.tokens) == SAMPLING.max_tokens
        assert one.stop_reason == "length"
    assert_same(ours, samples)


def test_samples_do_not_depend_on_max_rows_or_the_number_of_samples(
    config, params, engine, requests, samples
):
    small = Engine(config, params, mesh=engine.mesh, max_rows=8)
    for request_id, group in sample(small, requests, num_samples=2).items():
        assert_same({request_id: group}, {request_id: samples[request_id][:2]})


@pytest.mark.parametrize(
    "sizes",
    [(2, 2, 2), *(pytest.param(s, marks=pytest.mark.slow) for s in ((8, 1, 1), (1, 4, 2)))],
    ids=str,
)
def test_samples_do_not_depend_on_the_mesh(config, params, requests, samples, sizes):
    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, param_shardings(mesh, params, PARAM_AXES))
    assert_same(sample(Engine(config, placed, mesh=mesh), requests), samples)


def test_a_batch_has_at_most_max_rows_and_every_cpu_at_least_forty(config, params, monkeypatch):
    shapes = []

    def fake(params, tokens, *rest, num_samples, max_tokens, **static):
        shapes.append((tokens.shape[0], num_samples))
        samples = np.zeros((tokens.shape[0], num_samples, max_tokens), np.int32)
        return Rollout(samples, samples, samples[..., 0] + 1, samples[..., 0])

    def run(prompts, num_samples, **options):
        engine = Engine(config, params, **options)
        monkeypatch.setattr(engine, "_generate", fake)
        sampling = SamplingParams(max_tokens=1)
        found = engine.sample(
            prompts, params=sampling, num_samples=num_samples, request_ids=range(len(prompts))
        )
        assert len(found) == len(prompts)

    one = make_mesh(devices=jax.devices()[:1])
    run(
        [[1]] * 13, 4, mesh=one, max_rows=48
    )  # 12 prompts a call; 16, the power of two, is too many
    assert shapes == [(12, 4), (10, 4)]
    shapes.clear()
    run([[1]] * 3, 4, mesh=make_mesh(2, devices=jax.devices()[:2]))
    assert shapes == [(20, 4)]


def test_stop_ids_end_a_sample_and_are_kept(engine, requests, samples):
    stop = int(samples[100][0].tokens[4])
    at_the_end = int(samples[107][1].tokens[-1])
    sampling = SamplingParams(
        temperature=1.0, max_tokens=12, seed=3, stop_token_ids=(stop, at_the_end)
    )
    reasons = []
    cut_at_the_end = 0
    for one, free in zip(flat(sample(engine, requests, sampling)), flat(samples), strict=True):
        hits = np.flatnonzero(np.isin(free.tokens, [stop, at_the_end]))
        expected = free.tokens[: hits[0] + 1] if hits.size else free.tokens
        assert one.tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(one.logprobs, free.logprobs[: len(expected)], atol=1e-5)
        assert one.logprobs.dtype == np.float32
        assert one.stop_reason == ("stop" if hits.size else "length")
        reasons.append(one.stop_reason)
        cut_at_the_end += hits.size > 0 and hits[0] == 11
    assert set(reasons) == {"stop", "length"}
    assert cut_at_the_end  # with its very last token: it stopped, it was not cut


def test_a_stop_id_that_is_also_the_padding_id_is_kept_and_trained(config, params, requests):
    """Id 0 pads the arrays. Made as likely as a common token, it is sampled, kept, and has its log-probability."""
    head = params["head"]["kernel"]
    common = int(np.argmax(np.linalg.norm(head, axis=0)))
    params = params | {"head": {"kernel": head.at[:, 0].set(head[:, common])}}
    engine = Engine(config, params, mesh=make_mesh(devices=jax.devices()[:1]))
    free = sample(engine, requests, SamplingParams(max_tokens=12))
    assert any(0 in one.tokens for one in flat(free))
    # The reason is what happened, not what the ids look like: without stop ids nothing stops at a 0.
    assert {one.stop_reason for one in flat(free)} == {"length"}
    assert {len(one.tokens) for one in flat(free)} == {12}
    stopped = sample(engine, requests, SamplingParams(max_tokens=12, stop_token_ids=(0,)))
    for one, whole in zip(flat(stopped), flat(free), strict=True):
        ends = 0 in whole.tokens
        assert one.stop_reason == ("stop" if ends else "length")
        count = whole.tokens.tolist().index(0) + 1 if ends else 12
        assert one.tokens.tolist() == whole.tokens[:count].tolist()
        assert np.all(one.logprobs < 0)


def test_stop_strings_end_a_sample_even_across_tokens(engine, requests, samples):
    text = letters(samples[100][0].tokens)
    across = text[5:7]  # the second letter of one token and the first of the next
    sampling = SamplingParams(temperature=1.0, max_tokens=12, seed=3, stop=(across, "zzzz"))
    stopped = 0
    for one, free in zip(flat(sample(engine, requests, sampling)), flat(samples), strict=True):
        at = letters(free.tokens).find(across)
        count = len(free.tokens) if at < 0 else -(-(at + len(across)) // 2)
        assert one.tokens.tolist() == free.tokens[:count].tolist()
        assert len(one.logprobs) == count
        assert one.stop_reason == ("length" if at < 0 else "stop")
        stopped += at >= 0
    assert stopped >= 1


def test_no_prompts_give_no_samples(engine):
    assert engine.sample([], params=SAMPLING, num_samples=4, request_ids=[]) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1] * 117, [1]]}, r"prompt 0 has 117 tokens; with max_tokens=12 .* of 128"),
        ({"prompts": [[1], [320]]}, "prompt 1 has a token outside the vocabulary of 320"),
        ({"prompts": [[1], [-1]]}, "prompt 1 has a token outside the vocabulary"),
        ({"request_ids": [1]}, "2 prompts but 1 request_ids"),
        ({"request_ids": [1, 2**32]}, r"request id 4294967296 is outside \[0, 2\*\*32\)"),
        ({"request_ids": [-1, 2]}, "request id -1 is outside"),
        ({"num_samples": 0}, "num_samples is 0"),
    ],
)
def test_misuse_is_refused(engine, changes, message):
    arguments = {"prompts": [[1], [2]], "request_ids": [1, 2], "num_samples": 2} | changes
    with pytest.raises(ValueError, match=message):
        engine.sample(arguments.pop("prompts"), params=SAMPLING, **arguments)


def test_stop_strings_need_a_decoder_of_tokens(config, params, engine):
    without = Engine(config, params, mesh=engine.mesh)
    with pytest.raises(ValueError, match=r"Engine\(decode=\.\.\.\)"):
        without.sample([[1]], params=SamplingParams(stop=("x",)), num_samples=1, request_ids=[0])


def test_requests_of_the_same_bucket_compile_nothing(engine, requests, samples):
    before = engine.num_compiles
    assert before > 0
    ids = list(requests)
    for request_ids, lengths, seed in ((ids, LENGTHS, 9), ([1, 2], [16, 2], 0), ([4], [5], 1)):
        engine.sample(
            [[3] * length for length in lengths],
            params=SamplingParams(temperature=1.0, max_tokens=12, seed=seed),
            num_samples=4,
            request_ids=request_ids,
        )
    assert engine.num_compiles == before


def test_new_weights_are_used_at_once_and_are_not_copied(config, params, engine, requests, samples):
    mine = Engine(config, params, mesh=engine.mesh)
    assert sample(mine, requests)[100][0].policy_version == 0
    changed = jax.tree.map(lambda x: x * 1.01, params)
    mine.load_params(changed, policy_version=5)
    compiles = mine.num_compiles
    after = flat(sample(mine, requests))
    assert {one.policy_version for one in after} == {5}
    first = [one.logprobs[0] for one in after]
    assert not np.allclose(first, [one.logprobs[0] for one in flat(samples)], atol=1e-4)
    assert mine.num_compiles == compiles
    # The engine holds the trainer's buffers, and sampling leaves them where they are.
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(changed)]
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(mine._params)] == pointers
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(changed))
    mine.load_params(params, policy_version=6)
    assert_same(sample(mine, requests), samples)
