"""The curriculum: repeatable draws, what it learns from, resuming, and a simulated learner it must keep busy."""

import itertools
import json

import numpy as np
import pytest

from rlvr_jax.tasks.curriculum import REPEAT_WINDOW, Curriculum, task_sampler
from rlvr_jax.tasks.registry import DOMAINS, Draft, VerifierUse, ask, domain
from rlvr_jax.tasks.splits import draw, split_of
from rlvr_jax.types import Group, Reward, Task, Trajectory


@pytest.fixture
def make_domain(monkeypatch):
    """Returns a function that registers a domain with so many levels and problems a level."""
    monkeypatch.setattr(DOMAINS, "_entries", dict(DOMAINS._entries))

    def register(name: str, num_levels: int, size: int = 10**6) -> str:
        @domain(
            name,
            description="numbers",
            num_levels=num_levels,
            verifiers=(VerifierUse(name="exact"),),
            max_response_tokens=4,
        )
        def make(level, rng):
            number = int(rng.integers(size))
            return Draft(prompt=ask(f"level {level}: {number}", system=""), answer=str(number))

        return name

    return register


def make_group(task: Task, scores: list[float | None], step: int = 0) -> Group:
    """A group with the scores; None is a verifier that failed."""
    trajectories = tuple(
        Trajectory(
            tokens=np.zeros(1, np.int32),
            response_mask=np.ones(1, bool),
            logprobs=np.zeros(1, np.float32),
            turn_starts=(0,),
            rewards=(
                Reward(
                    name="exact", value=score or 0.0, status="failed" if score is None else "ok"
                ),
            ),
            stop_reason="stop",
            policy_version=(0, 0),
            sample_index=index,
        )
        for index, score in enumerate(scores)
    )
    return Group(task=task, trajectories=trajectories, step=step)


def simulate(
    name: str, difficulty, *, seed: int, skill: float, learning_rate: float, num_steps: int = 120
):
    """A learner whose success falls with the level, 0.5 at its skill, and whose skill rises by what groups teach.

    Returns the share of tasks with true success in 20..80 % after 20 steps, and the skill at the end.
    """
    curriculum = Curriculum(name, difficulty=difficulty, seed=seed)
    rng = np.random.default_rng(seed)
    in_zone = []
    for step in range(num_steps):
        tasks = curriculum.sample(step, 8)
        success = np.array([1 / (1 + np.exp(1.4 * (task.level - skill))) for task in tasks])
        if step >= 20:
            in_zone.extend((success >= 0.2) & (success <= 0.8))
        scores = rng.random((8, 8)) < success[:, None]
        groups = zip(tasks, scores.astype(float).tolist(), strict=True)
        curriculum.update([make_group(task, row, step) for task, row in groups])
        mean = scores.mean(1)
        skill += learning_rate * np.mean(4 * mean * (1 - mean))
    return np.mean(in_zone), skill


@pytest.mark.parametrize(("skill", "learning_rate"), [(0.0, 0.06), (3.0, 0.03), (5.4, 0.0)])
def test_adaptive_tasks_are_where_success_is_20_to_80_percent(make_domain, skill, learning_rate):
    name = make_domain("sim/skill", 10)
    settings = {"skill": skill, "learning_rate": learning_rate}
    adaptive = np.mean([simulate(name, "adaptive", seed=s, **settings) for s in range(2)], axis=0)
    uniform = np.mean([simulate(name, "uniform", seed=s, **settings) for s in range(2)], axis=0)
    assert adaptive[0] >= 0.8
    assert adaptive[0] >= 2 * uniform[0]
    assert adaptive[1] >= uniform[1] + (0.5 if learning_rate else 0)


@pytest.mark.parametrize(
    ("success", "expected"),
    [((1.0, 0.98, 0.95, 0.85), 3), ((0.1, 0.0, 0.0, 0.0), 0), ((0.0,) * 4, 0)],
)
def test_when_no_level_is_in_range_the_nearest_one_is_drawn(make_domain, success, expected):
    curriculum = Curriculum(make_domain("sim/flat", 4))
    for step in range(60):
        tasks = curriculum.sample(step, 4)
        curriculum.record(tasks, [[success[task.level]] * 8 for task in tasks])
    levels = [task.level for step in range(60, 80) for task in curriculum.sample(step, 4)]
    assert np.mean(np.array(levels) == expected) > 0.6


def test_a_level_whose_success_falls_is_left_for_an_easier_one(make_domain):
    curriculum = Curriculum(make_domain("sim/forget", 5))
    for good, low, high in ((3, 2, 4), (1, 0, 2)):
        for step in range(60):
            tasks = curriculum.sample(step, 4)
            rows = [[1.0 if t.level < good else 0.5 if t.level == good else 0.0] * 2 for t in tasks]
            curriculum.record(tasks, rows)
        drawn = [t.level for t in curriculum.sample(100, 60)]
        assert np.mean([low <= level <= high for level in drawn]) > 0.8


def test_the_same_seed_step_and_attempt_give_the_same_tasks():
    def tasks(seed=0, step=3, attempt=0):
        return Curriculum(["arithmetic", "text"], seed=seed).sample(step, 6, attempt)

    assert tasks() == tasks()
    assert tasks() != tasks(seed=1)
    assert tasks() != tasks(step=4)
    assert tasks() != tasks(attempt=1)
    curriculum = Curriculum(["arithmetic", "text"])
    first = curriculum.sample(3, 6)
    curriculum.sample(4, 6)
    assert curriculum.sample(3, 6) == first == tasks()


def test_tasks_are_training_tasks_and_domains_get_equal_shares():
    curriculum = Curriculum("arithmetic", difficulty="uniform")
    tasks = [
        task for step in range(10) for task in curriculum.sample(step, 2 * len(curriculum.domains))
    ]
    assert {split_of(task) for task in tasks} == {"train"}
    counts = [sum(task.domain == name for task in tasks) for name in curriculum.domains]
    assert counts == [20] * len(curriculum.domains)


def test_fewer_tasks_than_domains_still_reach_every_domain():
    curriculum = Curriculum("text", difficulty="uniform")
    seen = {task.domain for step in range(60) for task in curriculum.sample(step, 2)}
    assert seen == set(curriculum.domains)


def test_no_task_comes_twice_in_a_step_or_soon_again(make_domain):
    curriculum = Curriculum(make_domain("sim/small", 1, size=100))
    steps = []
    for step in range(30):
        keys = [task.key for attempt in range(2) for task in curriculum.sample(step, 4, attempt)]
        assert len(set(keys)) == 8
        for before in steps[-REPEAT_WINDOW:]:
            # Forty of some eighty problems are recent: now and then only a recent one is found.
            assert len(set(keys) & set(before)) <= 1
        steps.append(keys)


def test_recent_tasks_return_when_there_is_nothing_else_and_too_many_a_step_is_an_error(
    make_domain,
):
    curriculum = Curriculum(make_domain("sim/few", 1, size=12))
    num_train = len({draw("sim/few", 0, "train", 0, index).id for index in range(500)})
    first, second = (curriculum.sample(step, num_train) for step in range(2))
    assert {task.key for task in first} == {task.key for task in second}
    with pytest.raises(
        ValueError,
        match=r"'sim/few' has too few distinct tasks for one step: .* draw fewer tasks a step",
    ):
        curriculum.sample(2, num_train + 1)


def test_unscored_trajectories_teach_nothing_and_scores_are_clipped():
    curriculum = Curriculum("arithmetic/add", difficulty=1)
    (task,) = curriculum.sample(0, 1)
    curriculum.update([make_group(task, [None, 1.0, 0.0, None])])
    assert curriculum.metrics()["curriculum/success/arithmetic/add/1"] == 0.5
    curriculum = Curriculum("arithmetic/add", difficulty=1)
    curriculum.update([make_group(task, [3.0, -2.0, 0.5])])
    assert curriculum.metrics()["curriculum/success/arithmetic/add/1"] == 0.5
    curriculum = Curriculum("arithmetic/add", difficulty=1)
    curriculum.update([make_group(task, [None, None])])
    assert curriculum.metrics() == {
        "curriculum/level/arithmetic/add": 1.0,
        "curriculum/share/arithmetic/add/1": 1.0,
    }


def test_counts_halve_after_half_life_groups_of_the_domain():
    curriculum = Curriculum(["arithmetic/add", "arithmetic/mul"], half_life=4)
    add = draw("arithmetic/add", 0, "train", 0, 0)
    curriculum.update([make_group(add, [1.0] * 8)])
    trials = curriculum.state_dict()["trials"]["arithmetic/add"][0]
    curriculum.update(
        [make_group(draw("arithmetic/mul", 0, "train", 0, i), [0.0]) for i in range(4)]
    )
    assert curriculum.state_dict()["trials"]["arithmetic/add"][0] == trials == 8
    curriculum.update(
        [make_group(draw("arithmetic/add", 1, "train", 0, i), [0.0]) for i in range(4)]
    )
    assert curriculum.state_dict()["trials"]["arithmetic/add"][0] == pytest.approx(4)


def test_metrics_say_success_and_share_by_level():
    curriculum = Curriculum("arithmetic/add", half_life=1e9)
    for level, scores in ((0, [1.0, 1.0]), (0, [1.0, 0.0]), (2, [0.0, 0.0])):
        curriculum.update([make_group(draw("arithmetic/add", level, "train", 0, 0), scores)])
    metrics = curriculum.metrics()
    assert metrics["curriculum/success/arithmetic/add/0"] == pytest.approx(0.75)
    assert metrics["curriculum/success/arithmetic/add/2"] == 0.0
    assert metrics["curriculum/share/arithmetic/add/0"] == pytest.approx(2 / 3)
    assert metrics["curriculum/level/arithmetic/add"] == pytest.approx(2 / 3)
    assert "curriculum/success/arithmetic/add/1" not in metrics
    assert Curriculum("arithmetic/add").metrics() == {}


def test_a_restored_curriculum_goes_on_as_if_it_had_never_stopped():
    def advance(curriculum, steps):
        drawn = []
        for step in steps:
            for attempt in range(2):
                tasks = curriculum.sample(step, 6, attempt)
                rng = np.random.default_rng(step)
                curriculum.update(
                    [make_group(t, (rng.random(4) < 0.5).tolist(), step) for t in tasks]
                )
                drawn.append(tasks)
        return drawn

    unbroken = Curriculum(["arithmetic", "text/copy"], seed=3)
    expected = advance(unbroken, range(12))
    first = Curriculum(["arithmetic", "text/copy"], seed=3)
    advance(first, range(5))
    saved = json.loads(json.dumps(first.state_dict()))
    second = Curriculum(["arithmetic", "text/copy"], seed=3)
    second.load_state_dict(saved)
    assert advance(second, range(5, 12)) == expected[10:]
    assert second.state_dict() == unbroken.state_dict()
    advance(second, [12])
    assert saved == first.state_dict()  # the restored one works on its own arrays


def test_the_state_stays_small():
    curriculum = Curriculum("arithmetic/add")
    for step in range(100):
        curriculum.sample(step, 4)
    assert len(curriculum.state_dict()["drawn"]) <= 2 * REPEAT_WINDOW + 1


def test_state_of_other_domains_is_refused():
    state = Curriculum("arithmetic/add").state_dict()
    with pytest.raises(
        ValueError, match=r"of domains \(levels\) {'arithmetic/add': 6}; expected {'text/copy': 4}"
    ):
        Curriculum("text/copy").load_state_dict(state)


def test_a_group_of_a_strange_domain_is_refused():
    task = draw("text/copy", 0, "train", 0, 0)
    with pytest.raises(
        ValueError, match="is of domain 'text/copy', which this curriculum does not draw"
    ):
        Curriculum("arithmetic/add").update([make_group(task, [1.0])])


def test_a_fixed_difficulty_is_that_level_everywhere():
    curriculum = Curriculum("arithmetic", difficulty=2)
    assert {task.level for task in curriculum.sample(0, 14)} == {2}
    with pytest.raises(ValueError, match="has no level 5"):
        Curriculum("arithmetic", difficulty=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"difficulty": "hard"}, "difficulty is 'hard'; expected 'adaptive', 'uniform' or a level"),
        ({"target": (0.8, 0.2)}, "target is .*; expected two success rates"),
        ({"half_life": 0}, "half_life is 0; expected a positive number"),
        ({"domains": []}, "the set of domains is empty"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Curriculum(**{"domains": "arithmetic", **changes})


def test_asking_for_no_tasks_is_refused():
    with pytest.raises(ValueError, match="num_tasks is 0; expected at least 1"):
        Curriculum("arithmetic").sample(0, 0)


def test_task_sampler_yields_batches_that_take_scores():
    batches = task_sampler(["math"], batch_size=5, seed=1)
    first, second = itertools.islice(batches, 2)
    assert (first.step, second.step) == (0, 1)
    assert first.prompts == tuple(task.prompt for task in first.tasks)
    assert len({task.key for task in first.tasks + second.tasks}) == 10
    first.report([[1.0, float("nan")]] * 5)
    assert any(key.startswith("curriculum/success/") for key in first.curriculum.metrics())
    with pytest.raises(ValueError, match="zip"):
        first.report([[1.0]])


def test_task_sampler_refuses_at_once():
    with pytest.raises(ValueError, match="unknown domain 'maths'"):
        task_sampler(["maths"])
    with pytest.raises(ValueError, match="the set of domains is empty"):
        task_sampler([])
    with pytest.raises(ValueError, match="batch_size is 0; expected at least 1"):
        task_sampler("math", batch_size=0)


def test_a_level_may_be_given_as_a_config_has_it():
    tasks = Curriculum("text/copy", difficulty="2").sample(0, 4)  # pyright: ignore[reportArgumentType]
    assert {task.level for task in tasks} == {2}
