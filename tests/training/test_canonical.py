"""The loop of README as real code: it runs, it is the trainer's own update, and it refuses what would train wrongly."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import jax
import numpy as np
import pytest

import rlvr_jax as rl
from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.cli.flags import load_config
from rlvr_jax.errors import WeightsError
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.tasks.registry import DOMAINS
from rlvr_jax.training import rl as trainer
from rlvr_jax.training.policy import TINY
from rlvr_jax.training.state import OptimizerConfig, init_state, make_optimizer, state_shardings
from rlvr_jax.training.step import StepConfig, make_learner

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
G, MAX_TOKENS = 4, 8
PROMPTS = [f"word {number}" for number in range(4)]  # of one length: one shape to compile


@pytest.fixture(scope="module")
def mesh():
    return rl.make_mesh(devices=jax.devices()[:2])


@pytest.fixture
def policy(mesh):
    return rl.load_policy(TINY, mesh=mesh)


def generate(policy, **sampling):
    settings = {"temperature": 0.7, "max_tokens": MAX_TOKENS, **sampling}
    return policy.generate(PROMPTS, num_samples=G, **settings)


SCORES = np.tile(np.arange(G, dtype=np.float64) % 2, (len(PROMPTS), 1))  # differ within every group


OPTIMIZER = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
}  # one for all tests: one update is compiled


def optimizer_of(policy):
    return rl.Optimizer(policy, **OPTIMIZER)


def objective(policy, responses, reference, scores=SCORES):
    return rl.ppo_objective(policy, responses, scores, ref_model=reference, kl_coef=0.05)


def host(params):
    return jax.tree.map(np.array, params)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.fixture
def letters(monkeypatch):
    """A domain that random bytes get right about one time in four; all its prompts have one length."""
    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))

    @rl.domain(
        "canonical/letters",
        description="an answer with one of the letters a to m in it",
        num_levels=2,
        verifiers=(rl.VerifierUse(name="regex", params={"pattern": "[a-m]", "mode": "search"}),),
        max_response_tokens=MAX_TOKENS,
    )
    def make(level, rng):
        return rl.Draft(prompt=rl.ask(f"{level} {rng.integers(1000, 9999)}", system=""), answer="a")

    return make


def test_the_loop_of_the_readme_runs(letters, mesh, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    [code] = [block for block in blocks if "rl.ppo_objective(" in block]
    # A model that is always there, a domain it can sometimes do, and an end.
    code = code.replace("smollm2-135m-instruct", TINY)
    code = re.sub(r"domains=\[.*?\]", "domains=['canonical']", code)
    losses, batches = [], []
    objective, sampler = rl.ppo_objective, rl.task_sampler

    def three(**settings):
        for batch in itertools.islice(sampler(batch_size=4, **settings), 3):
            batches.append(batch)
            yield batch

    def recorded(*args, **settings):
        losses.append(objective(*args, **settings))
        return losses[-1]

    monkeypatch.setattr(rl, "task_sampler", three)
    monkeypatch.setattr(rl, "ppo_objective", recorded)
    monkeypatch.setattr(rl, "make_mesh", lambda: mesh)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)

    policy, reference = names["policy"], names["reference"]
    before = rl.load_policy(TINY, mesh=mesh).params
    assert len(losses) == 3
    assert policy.version == policy.engine.policy_version == 3
    assert losses[0].metrics["kl"] == pytest.approx(0, abs=1e-9)
    assert losses[2].metrics["kl"] > 0
    assert all(loss.metrics["mismatch_kl"] < 1e-9 for loss in losses)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), policy.params, before)
    assert all(jax.tree.leaves(moved))
    assert equal(reference.params, before)
    # What adaptive adapts to was told: the curriculum counts every judged response.
    assert sum(trials.sum() for trials in batches[0].curriculum._trials.values()) > 0


@pytest.mark.slow
def test_a_step_is_the_trainers_update_bit_for_bit(policy, mesh):
    """The same responses through ``training/rl.py``'s packing and ``training/step.py``'s update."""
    reference, optimizer = policy.freeze(), optimizer_of(policy)
    responses = generate(policy)
    loss = objective(policy, responses, reference)
    config = load_config(f"{REPOSITORY / 'configs' / 'rl_quickstart.py'}:tiny").unlock()
    config.rollout.max_tokens, config.rollout.temperature = MAX_TOKENS, 0.7
    config.algorithm.kl_loss_coef, config.train.row_length = 0.05, 0
    sampling = trainer.sampling_params(config, policy.tokenizer.stop_token_ids)
    assert dataclasses.replace(responses.params, seed=sampling.seed) == sampling
    step_config = StepConfig(
        objective=trainer.objective_config(config), transform=LogitTransform.of(sampling)
    )
    adamw = make_optimizer(OptimizerConfig(num_steps=1, **OPTIMIZER))
    shardings = state_shardings(policy.config, adamw, mesh)
    learner = make_learner(policy.config, adamw, mesh, shardings, step_config)
    state = init_state(policy.config, policy.params, adamw, mesh, seed=0)
    minibatch = learner.prepare(
        trainer.pack(
            loss.groups,
            trainer.step_advantages(loss.groups, config),
            config,
            num_shards=learner.num_shards,
            num_column_shards=learner.num_column_shards,
            min_rows=learner.min_rows,
        ),
        reference.params,
        scores=SCORES,
        kl_coef=0.0,
    )
    state, metrics = learner.train_step(state, minibatch)
    optimizer.step(loss)
    assert not equal(policy.params, reference.params)
    assert equal(policy.params, state.params)
    assert loss.metrics == {name: float(value) for name, value in metrics.items()}


def test_reading_a_loss_does_not_update_and_gives_what_the_update_reports(policy):
    reference, optimizer = policy.freeze(), optimizer_of(policy)
    loss = objective(policy, generate(policy), reference)
    value, metrics = loss.value, loss.metrics
    assert float(loss) == value and f"{loss:.3f}" == f"{value:.3f}"
    assert value == pytest.approx(metrics["policy_loss"] + 0.05 * metrics["kl_loss"], abs=1e-7)
    assert equal(policy.params, reference.params)
    assert "grad_norm" not in metrics
    optimizer.step(loss)
    assert loss.value == pytest.approx(value, abs=1e-7)
    assert loss.metrics["entropy"] == pytest.approx(metrics["entropy"], rel=1e-6)
    assert loss.metrics["grad_norm"] > 0
    assert not equal(policy.params, reference.params)


def test_a_loss_is_stepped_once_and_only_at_its_own_version(policy):
    reference, optimizer = policy.freeze(), optimizer_of(policy)
    responses = generate(policy)
    first, second = (objective(policy, responses, reference) for _ in range(2))
    optimizer.step(first)
    after = host(policy.params)
    for stale in (first, second):
        with pytest.raises(
            ValueError, match="made at version 0 of the policy, which is at version 1"
        ):
            optimizer.step(stale)
    with pytest.raises(ValueError, match="call ppo_objective again"):
        _ = second.value
    assert equal(policy.params, after) and policy.version == 1
    # A second epoch on the same responses: the ratio is to what they were sampled with.
    again = objective(policy, responses, reference)
    optimizer.step(again)
    assert again.metrics["mismatch_kl"] > 1e-7 and policy.version == 2


def test_what_could_not_be_judged_is_not_trained_on(policy):
    reference, optimizer = policy.freeze(), optimizer_of(policy)
    responses = generate(policy)
    scores = SCORES.copy()
    scores[1:, :] = scores[0, 3] = np.nan
    loss = objective(policy, responses, reference, scores)
    batch = loss.minibatch.batch
    trained = sum(len(sample.tokens) for sample in responses.completions[0][:3])
    assert int((batch.loss_mask > 0).sum()) == trained
    before = host(policy.params)
    loss = objective(policy, responses, reference, np.full_like(SCORES, np.nan))
    optimizer.step(loss)
    assert loss.metrics["update_skipped"] == 1.0
    assert equal(policy.params, before)


def test_samples_and_objective_share_the_transform(policy):
    """With top-k the recorded log-probabilities are of the truncated distribution; the trainer's are the same."""
    reference = policy.freeze()
    responses = generate(policy, temperature=1.3, top_k=5)
    assert rl.ppo_objective(policy, responses, SCORES).metrics["logprob_delta_max"] < 1e-4
    params = dataclasses.replace(responses.params, temperature=0.7, top_k=0)
    other = objective(policy, dataclasses.replace(responses, params=params), reference)
    assert other.metrics["logprob_delta_max"] > 0.1


def test_generate_draws_anew_each_call_and_the_same_with_a_seed(policy):
    def tokens(responses):
        return [[c.tokens.tolist() for c in samples] for samples in responses.completions]

    first, second = generate(policy), generate(policy)
    assert tokens(first) != tokens(second)
    assert tokens(generate(policy, seed=3)) == tokens(generate(policy, seed=3))
    fresh = rl.load_policy(TINY, mesh=policy.mesh)
    assert tokens(generate(fresh)) == tokens(first)
    assert len(first) == len(PROMPTS) and first.group_size == G
    samples = first.completions[0]
    assert all(np.all(sample.logprobs < 0) for sample in samples)
    conversation = (rl.Message(role="user", content=PROMPTS[0]),)
    assert first.prompts[0] == conversation
    asked = policy.generate([conversation], num_samples=G, max_tokens=MAX_TOKENS, seed=3)
    assert asked.prompt_ids[0] == first.prompt_ids[0]


def test_a_reference_outlives_updates_and_refuses_its_own(policy):
    reference, optimizer = policy.freeze(), optimizer_of(policy)
    before = generate(reference, seed=1).texts
    for _ in range(2):
        optimizer.step(objective(policy, generate(policy), reference))
    assert generate(reference, seed=1).texts == before
    with pytest.raises(ValueError, match="the policy is frozen"):
        optimizer_of(reference)
    with pytest.raises(ValueError, match="this policy is frozen"):
        reference.load_params(policy.params)


def test_two_optimizers_on_one_policy_follow_each_other(policy):
    """The parameters are the policy's own: neither optimizer goes back to what it saw last."""
    reference = policy.freeze()
    first, second = optimizer_of(policy), optimizer_of(policy)
    first.step(objective(policy, generate(policy), reference))
    moved = host(policy.params)
    second.step(objective(policy, generate(policy), reference, np.full_like(SCORES, np.nan)))
    assert equal(policy.params, moved) and policy.version == 2


def test_rewards_of_a_verifier_are_groups_with_verdicts(letters, policy):
    [batch] = itertools.islice(rl.task_sampler("canonical", batch_size=len(PROMPTS)), 1)
    with rl.DomainVerifier(num_workers=1) as verifier:
        responses = policy.generate(batch.prompts, num_samples=G, max_tokens=MAX_TOKENS)
        rewards = verifier.score(batch, responses)
        with pytest.raises(ValueError, match=r"expected policy.generate\(batch.prompts"):
            verifier.score(batch, generate(policy))
    expected = [
        [float(bool(re.search("[a-m]", t.strip()))) for t in row] for row in responses.texts
    ]
    assert rewards.scores.tolist() == expected
    assert rewards.mean == pytest.approx(np.mean(expected))
    assert [group.task for group in rewards.groups] == list(batch.tasks)
    trajectory = rewards.groups[1].trajectories[2]
    assert (trajectory.sample_index, trajectory.text) == (2, responses.texts[1][2])
    assert trajectory.rewards[0].name == "regex" and trajectory.rewards[0].status == "ok"


def test_misuse_is_refused_in_words(policy):
    reference = policy.freeze()
    responses = generate(policy)
    ppo = functools.partial(rl.ppo_objective, policy, responses)
    with pytest.raises(ValueError, match=r"rewards have shape \[4, 3\]; expected \[4, 4\]"):
        ppo(SCORES[:, :3])
    with pytest.raises(ValueError, match=r"kl_coef is 0\.05 but there is no reference"):
        ppo(SCORES, kl_coef=0.05)
    with pytest.raises(ValueError, match="a policy that can change"):
        ppo(SCORES, ref_model=policy, kl_coef=0.05)
    with pytest.raises(TypeError, match="no setting 'clip_ratio'; known"):
        ppo(SCORES, clip_ratio=0.2)
    with pytest.raises(ValueError, match="clip_ratio_low is 2"):
        ppo(SCORES, clip_ratio_low=2)
    greedy = dataclasses.replace(responses.params, temperature=0)
    with pytest.raises(ValueError, match="temperature is 0"):
        rl.ppo_objective(policy, dataclasses.replace(responses, params=greedy), SCORES)
    single = dataclasses.replace(
        responses,
        completions=tuple(samples[:1] for samples in responses.completions),
        texts=tuple(samples[:1] for samples in responses.texts),
    )
    with pytest.raises(ValueError, match="expected 2 or more samples a group"):
        rl.ppo_objective(policy, single, SCORES[:, :1])
    other = optimizer_of(rl.load_policy(TINY, mesh=policy.mesh))
    with pytest.raises(ValueError, match="of another policy"):
        other.step(objective(policy, responses, reference))
    with pytest.raises(ValueError, match="schedule 'cosine' ends at num_steps"):
        rl.Optimizer(policy, learning_rate=1e-3, schedule="cosine")
    with pytest.raises(ValueError, match="no prompts"):
        policy.generate([])
    with pytest.raises(ValueError, match="dtype is 'float16'"):
        rl.load_policy(TINY, mesh=policy.mesh, dtype="float16")


def test_a_saved_policy_loads_as_the_same_policy(policy, tmp_path):
    policy.save(tmp_path / "model")
    again = rl.load_policy(tmp_path / "model", mesh=policy.mesh)
    assert equal(again.params, policy.params)
    assert again.version == 0
    assert generate(again).texts == generate(policy).texts


def test_a_run_loads_at_its_newest_checkpoint(policy, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(WeightsError, match=r"no config\.json that names their model"):
        rl.load_policy(tmp_path, mesh=policy.mesh)
    (tmp_path / "config.json").write_text(json.dumps({"model": TINY}))
    with pytest.raises(WeightsError, match="no finished checkpoint yet"):
        rl.load_policy(tmp_path, mesh=policy.mesh)
    adamw = make_optimizer(OptimizerConfig(learning_rate=1e-3, num_steps=1))
    params = jax.tree.map(lambda x: x + 1, host(policy.params))
    state = init_state(policy.config, params, adamw, policy.mesh, seed=0)
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(5, state, {})
    restored = rl.load_policy(tmp_path, mesh=policy.mesh)
    assert restored.version == restored.engine.policy_version == 5
    assert equal(restored.params, params)
