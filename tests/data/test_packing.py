import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.data.packing import bucket, pack_groups, packing_stats, row_length
from rlvr_jax.types import Group, Reward, Task, TrainBatch, Trajectory

LENGTH = 40


def trajectory(prompt, response, mask=None, *, scored=True, stop_reason="stop", logprobs=None):
    mask = [True] * len(response) if mask is None else mask
    response_mask = np.array([False] * len(prompt) + list(mask), bool)
    if logprobs is None:
        logprobs = -0.01 * (1 + np.arange(len(response)))
    return Trajectory(
        tokens=np.array([*prompt, *response], np.int32),
        response_mask=response_mask,
        logprobs=np.where(response_mask, [0.0] * len(prompt) + list(logprobs), 0).astype(
            np.float32
        ),
        turn_starts=(len(prompt),),
        rewards=(Reward(name="exact", value=1.0, status="ok" if scored else "timeout"),),
        stop_reason=stop_reason,
        policy_version=(0, 0),
    )


def group(*trajectories, task_id="0", domain="sums"):
    task = Task(id=task_id, domain=domain, prompt=(), answer="")
    return Group(task=task, trajectories=trajectories, step=0)


def advantages_of(groups):
    rng = np.random.default_rng(0)
    return [rng.normal(size=len(g.trajectories)).astype(np.float32) for g in groups]


def sequences(batch: TrainBatch) -> dict[int, list[tuple[int, int]]]:
    """sample id -> its cells (row, column) from the first prompt token on, found by following ``parents`` only."""
    found = {}
    for row, columns in enumerate(batch.sample_ids):
        for sample in np.unique(columns[columns >= 0]):
            assert sample not in found, "a trajectory appears in two rows"
            column, path = int(np.flatnonzero(columns == sample)[-1]), []
            while column >= 0:
                path.append((row, column))
                column = int(batch.parents[row, column])
            found[int(sample)] = path[::-1]
    return found


def check_consistency(batch: TrainBatch, groups, advantages, *, share_prompt=True, left_out=()):
    """Everything the batch promises, against the trajectories it was made from."""
    found = sequences(batch)
    flat = [t for g in groups for t in g.trajectories]
    values = np.concatenate([np.asarray(a) for a in advantages]) if groups else []
    expected = {
        i for i, t in enumerate(flat) if t.scored and t.response_mask.any() and i not in left_out
    }
    assert found.keys() == expected
    for sample, path in found.items():
        rows, columns = np.array(path).T
        t, at = flat[sample], (rows, columns)
        end = len(path)
        assert end == np.flatnonzero(t.response_mask)[-1] + 1
        mask = t.response_mask[:end]
        np.testing.assert_array_equal(batch.tokens[at], t.tokens[:end])
        np.testing.assert_array_equal(batch.positions[at], np.arange(end))
        np.testing.assert_array_equal(batch.loss_mask[at], mask)
        np.testing.assert_array_equal(
            batch.behavior_logprobs[at], np.where(mask, t.logprobs[:end], 0)
        )
        np.testing.assert_array_equal(batch.advantages[at], np.where(mask, values[sample], 0))
        prompt = int(np.argmax(t.response_mask))
        assert set(batch.sample_ids[at][:prompt]) == {-1}
        assert set(batch.sample_ids[at][prompt:]) == {sample}
        segments, prefixes = batch.segment_ids[at], batch.prefix_ids[at]
        assert set(prefixes[:prompt]) == {0} and len(set(segments[:prompt])) == 1
        if share_prompt:
            assert set(prefixes[prompt:]) == {segments[0]} and segments[prompt] != segments[0]
        assert len(set(segments[prompt:])) == 1
        # A segment holds one sample only, and its cells are next to one another.
        same = np.flatnonzero(batch.segment_ids[rows[0]] == segments[-1])
        assert np.all(np.diff(same) == 1) and set(batch.sample_ids[rows[0], same]) <= {-1, sample}
    trained = sum(int(flat[i].response_mask.sum()) for i in expected)
    assert batch.loss_mask.sum() == trained  # each trained token exactly once
    covered = {cell for path in found.values() for cell in path}
    assert covered == set(zip(*np.nonzero(batch.segment_ids), strict=True))
    assert batch.experts is None  # nothing was recorded
    for field in dataclasses.fields(batch):
        if field.name == "experts":
            continue
        array = getattr(batch, field.name)
        assert array.dtype == (np.int32 if field.name in INT_FIELDS else np.float32)
        padding = {"parents": -1, "sample_ids": -1}.get(field.name, 0)
        assert np.all(array[batch.segment_ids == 0] == padding), field.name


INT_FIELDS = {"tokens", "positions", "segment_ids", "prefix_ids", "parents", "sample_ids"}


@st.composite
def random_groups(draw):
    """Up to 4 groups of 3 trajectories: several turns, some unscored, some without a sampled token."""
    groups, token = [], st.integers(1, 99)
    for p in range(draw(st.integers(0, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=8))
        members = []
        for _ in range(3):
            response = draw(st.lists(token, max_size=20))
            mask = draw(st.lists(st.booleans(), min_size=len(response), max_size=len(response)))
            if mask and draw(st.booleans()):
                mask[0] = True
            members.append(trajectory(prompt, response, mask, scored=draw(st.integers(0, 4)) > 0))
        groups.append(group(*members, task_id=str(p)))
    return groups


@settings(max_examples=150, deadline=None)
@given(random_groups(), st.booleans())
def test_every_trained_token_appears_once_with_its_context_advantage_and_logprob(groups, share):
    advantages = advantages_of(groups)
    batch = pack_groups(groups, advantages, length=LENGTH, share_prompt=share)
    check_consistency(batch, groups, advantages, share_prompt=share)


@settings(max_examples=50, deadline=None)
@given(random_groups())
def test_packing_is_deterministic_and_sharing_never_needs_more_tokens(groups):
    advantages = advantages_of(groups)
    first = pack_groups(groups, advantages, length=LENGTH)
    second = pack_groups(groups, advantages, length=LENGTH)
    for field in dataclasses.fields(first):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name))
    plain = packing_stats(pack_groups(groups, advantages, length=LENGTH, share_prompt=False))
    shared = packing_stats(first)
    assert shared["trained_tokens"] == plain["trained_tokens"]
    assert shared["real_tokens"] <= plain["real_tokens"]


def test_a_tree_has_its_literal_layout():
    groups = [
        group(
            trajectory([5, 6], [7, 8, 9]),
            trajectory([5, 6], [10, 11], scored=False),
            trajectory([5, 6], [12]),
        )
    ]
    batch = pack_groups(groups, [np.array([0.5, np.nan, -0.5])], length=8, pad_id=3)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 12, 3, 3]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 2, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 2, 2, 2, 3, 0, 0]]
    assert batch.prefix_ids.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.parents.tolist() == [[-1, 0, 1, 2, 3, 1, -1, -1]]
    assert batch.sample_ids.tolist() == [[-1, -1, 0, 0, 0, 2, -1, -1]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 1, 1, 1, 0, 0]]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0.5, 0.5, -0.5, 0, 0]]


def test_observations_are_context_and_not_trained_on():
    t = trajectory([1], [2, 3, 4, 5, 6, 7], [True, True, False, False, True, False])
    batch = pack_groups([group(t)], [np.array([2.0])], length=8)
    assert batch.tokens.tolist() == [
        [1, 2, 3, 4, 5, 6, 0, 0]
    ]  # what follows the last sampled token goes
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0, 1, 0, 0]]
    assert batch.advantages.tolist() == [[0, 2, 2, 0, 0, 2, 0, 0]]
    assert batch.sample_ids.tolist() == [[-1, 0, 0, 0, 0, 0, -1, -1]]


def test_response_columns_are_offset_by_whole_sequences():
    # Responses at 1-4 of a sequence of 5 and at 2-3 of a sequence of 4: in the row, at 1-4 and 5 + (2-3) = 7-8.
    first, second = trajectory([1, 2], [3, 4]), trajectory([5], [6, 7, 8, 9])
    groups = [group(first), group(second, task_id="1")]
    batch = pack_groups(groups, [np.ones(1), np.ones(1)], length=16, share_prompt=False)
    assert batch.tokens[0, :9].tolist() == [5, 6, 7, 8, 9, 1, 2, 3, 4]
    assert np.flatnonzero(batch.loss_mask[0]).tolist() == [1, 2, 3, 4, 7, 8]
    assert batch.parents[0, :9].tolist() == [-1, 0, 1, 2, 3, -1, 5, 6, 7]


def test_a_group_that_does_not_fit_a_row_repeats_its_prompt():
    members = [trajectory([1, 2, 3], [10 * g + i for i in range(4)]) for g in range(5)]
    groups = [group(*members)]
    advantages = advantages_of(groups)
    batch = pack_groups(groups, advantages, length=12)
    assert batch.tokens.shape == (3, 12)
    assert [np.unique(row[row >= 0]).tolist() for row in batch.sample_ids] == [[0, 1], [2, 3], [4]]
    check_consistency(batch, groups, advantages)


def test_members_with_other_prompts_do_not_share_one():
    groups = [group(trajectory([1, 2], [3]), trajectory([1, 9], [3]), trajectory([1, 2], [4]))]
    advantages = advantages_of(groups)
    batch = pack_groups(groups, advantages, length=16)
    check_consistency(batch, groups, advantages)
    assert packing_stats(batch)["real_tokens"] == 7


def test_groups_with_the_same_id_in_two_domains_stay_two():
    groups = [group(trajectory([1], [2]), domain="a"), group(trajectory([1], [2]), domain="b")]
    assert groups[0].key != groups[1].key
    batch = pack_groups(groups, [np.array([1.0]), np.array([0.0])], length=8)
    assert batch.tokens[0, :4].tolist() == [1, 1, 2, 2]
    assert batch.sample_ids[0, :4].tolist() == [-1, -1, 0, 1]
    assert batch.advantages[0, :4].tolist() == [0, 0, 1, 0]


def test_rows_are_filled_first_fit_by_decreasing_size():
    groups = [group(trajectory([9], [1] * (size - 1))) for size in (8, 4, 8, 2)]
    batch = pack_groups(groups, advantages_of(groups), length=8)
    assert [np.unique(row[row >= 0]).tolist() for row in batch.sample_ids] == [[0], [2], [1, 3]]


def test_a_trajectory_that_does_not_fit_raises_and_is_never_cut():
    groups = [group(trajectory([1], [2, 3, 4, 5]), task_id="long", domain="sums")]
    with pytest.raises(
        ValueError, match=r"trajectory 0 .*'long'.* has 5 tokens; expected at most length=4; raise"
    ):
        pack_groups(groups, [np.ones(1)], length=4)


def test_eos_is_trained_on_where_pad_and_eos_are_the_same_id():
    batch = pack_groups([group(trajectory([5], [7, 2]))], [np.ones(1)], length=5, pad_id=2)
    assert batch.tokens.tolist() == [[5, 7, 2, 2, 2]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0]]


def test_truncation_is_read_from_the_stop_reason_not_from_the_last_token():
    eos = 2
    groups = [
        group(
            trajectory([5], [7, 9], stop_reason="stop"),
            trajectory([5], [7, eos], stop_reason="length"),
        )
    ]
    advantages = [np.array([1.0, -1.0])]
    kept = pack_groups(groups, advantages, length=8, mask_truncated=True)
    check_consistency(kept, groups, advantages, left_out={1})
    check_consistency(pack_groups(groups, advantages, length=8), groups, advantages)


@pytest.mark.parametrize(
    "groups", [[], [group(trajectory([1], [2], scored=False))], [group(trajectory([1], []))]]
)
def test_nothing_to_train_on_gives_padding_and_no_crash(groups):
    batch = pack_groups(groups, [np.full(1, np.nan)] * len(groups), length=6, row_multiple=4)
    check_consistency(batch, groups, [np.zeros(1)] * len(groups))
    assert packing_stats(batch) == {"rows": 4, "real_tokens": 0, "trained_tokens": 0, "fill": 0.0}


def test_rows_are_rounded_up_to_a_bucket_or_are_what_is_asked():
    groups = [group(trajectory([1], [2, 3, 4]), task_id=str(i)) for i in range(5)]
    advantages = advantages_of(groups)
    pack = lambda **kwargs: pack_groups(groups, advantages, length=4, **kwargs).tokens.shape  # noqa: E731
    assert pack() == (6, 4)
    assert pack(row_multiple=4) == (8, 4)
    assert pack(row_multiple=2, min_rows=7) == (8, 4)
    assert pack(rows=7) == (7, 4)
    with pytest.raises(
        ValueError, match=r"5 trees need 5 rows of 4 tokens, got rows=4; raise rows to 5"
    ):
        pack(rows=4)


def test_buckets_are_few_and_waste_at_most_a_third():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 13)] == [1, 1, 2, 3, 4, 6, 6, 8, 12, 16]
    assert [bucket(n, 8) for n in (0, 1, 8, 9, 17, 25, 33)] == [8, 8, 8, 16, 24, 32, 48]
    sizes = {bucket(n) for n in range(1, 1025)}
    assert len(sizes) == 20
    assert all(n >= bucket(n) * 2 / 3 - 1e-9 for n in range(2, 1025))
    with pytest.raises(ValueError, match="row_multiple is 0; expected an integer >= 1"):
        bucket(3, 0)


def test_stats_count_what_is_computed_on():
    batch = pack_groups(
        [group(trajectory([1, 2], [3]), trajectory([1, 2], [4, 5]))], [np.ones(2)], length=10
    )
    assert packing_stats(batch) == {"rows": 1, "real_tokens": 5, "trained_tokens": 3, "fill": 0.5}


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([], r"got advantages for 0 groups; expected 1"),
        ([np.ones(3)], r"have shape \(3,\); expected \(1,\)"),
        ([np.array([np.nan])], r"has advantage nan .* expected finite numbers"),
    ],
)
def test_advantages_that_do_not_match_raise(advantages, message):
    with pytest.raises(ValueError, match=message):
        pack_groups([group(trajectory([1], [2]))], advantages, length=4)


def test_a_logprob_that_is_not_finite_raises():
    bad = trajectory([1], [2, 3], logprobs=[-0.5, np.nan])
    with pytest.raises(ValueError, match=r"log-probabilities .* expected finite numbers"):
        pack_groups([group(bad)], [np.ones(1)], length=4)


def test_a_sampled_token_without_a_prompt_raises():
    with pytest.raises(ValueError, match=r"starts with a sampled token; expected a prompt"):
        pack_groups([group(trajectory([], [2]))], [np.ones(1)], length=4)


def test_a_row_has_room_for_the_largest_group_and_never_less_than_the_longest_trajectory():
    short, long = [0] * 30, [0] * 100
    groups = [
        group(trajectory(short, [1] * 5), trajectory(short, [1] * 9)),
        group(trajectory(long, [1] * 40), trajectory(long, [1] * 60)),
    ]
    assert row_length(groups) == 256  # 100 + 40 + 60, rounded up to a multiple of 128
    assert row_length(groups, least=170) == 170
    assert row_length(groups, least=80) == 160
