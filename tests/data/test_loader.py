"""The chat pipeline: what is trained on, what is dropped, and that a resumed run sees what it would have seen."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from rlvr_jax.data.loader import chat_dataset
from rlvr_jax.data.sources import Source, open_source
from rlvr_jax.errors import ConfigError
from rlvr_jax.types import Message, TrainBatch

START = {"user": 1, "assistant": 2}
END = 3


def render(messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """A template of one id a character; an assistant's text and end are trained on."""
    ids, mask = [], []
    for message in messages:
        body = [*(ord(c) for c in message.content), END]
        ids += [START[message.role], *body]
        mask += [False, *[message.role == "assistant"] * len(body)]
    return ids, mask


class Chats:
    """Conversations in memory; ``texts`` are pairs of a question and an answer."""

    def __init__(self, texts: Sequence[tuple[str, str]], name: str = "chats") -> None:
        self.name = name
        self.fingerprint = json.dumps(texts)
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict:
        question, answer = self._texts[index]
        return {"prompt": question, "completion": answer}

    def where(self, index: int) -> str:
        return f"{self.name}:{index + 1}"


def chats(count: int, name: str = "chats", longest: int = 9) -> Source:
    """Conversation i starts with the character 1000 + i, and has its own length."""
    return Chats([(chr(1000 + i), "a" * (1 + i * 7 % longest)) for i in range(count)], name)


def make(source: Source | list[Source], render_fn=render, **overrides):
    sources = source if isinstance(source, list) else [source]
    arguments = {"length": 24, "batch_size": 2, "seed": 5, "num_epochs": 1} | overrides
    return chat_dataset(sources, render_fn, **arguments)


def segments(batch: TrainBatch) -> list[np.ndarray]:
    """Ids of every conversation of a batch, in order."""
    return [
        row_tokens[row_ids == segment]
        for row_tokens, row_ids in zip(batch.tokens, batch.segment_ids, strict=True)
        for segment in range(1, int(row_ids.max()) + 1)
    ]


def seen(batches) -> list[int]:
    """Which of ``chats`` the batches hold, in order."""
    return [int(ids[1]) - 1000 for batch in batches for ids in segments(batch)]


def assert_same(left: TrainBatch, right: TrainBatch) -> None:
    for name, array in vars(left).items():
        np.testing.assert_array_equal(array, getattr(right, name), err_msg=name)


def test_batches_have_the_shapes_and_types_of_a_train_batch():
    for batch in make(chats(30)):
        assert batch.experts is None
        for name, array in vars(batch).items():
            if name == "experts":
                continue
            is_float = name in ("loss_mask", "advantages", "behavior_logprobs", "ref_logprobs")
            assert (array.shape, array.dtype) == ((2, 24), np.float32 if is_float else np.int32)


def test_every_conversation_is_whole_and_predicted_from_its_own_tokens():
    source = chats(30)
    found = {}
    for batch in make(source):
        for row in range(2):
            ids = np.asarray(batch.segment_ids)[row]
            for segment in range(1, ids.max() + 1):
                columns = np.flatnonzero(ids == segment)
                tokens = np.asarray(batch.tokens)[row, columns]
                expected, mask = render(
                    [
                        Message(role="user", content=chr(tokens[1])),
                        Message(role="assistant", content="a" * (len(tokens) - 5)),
                    ]
                )
                assert tokens.tolist() == expected
                assert batch.loss_mask[row, columns].tolist() == mask
                assert batch.positions[row, columns].tolist() == list(range(len(columns)))
                assert batch.parents[row, columns].tolist() == [-1, *columns[:-1]]
                found[int(tokens[1]) - 1000] = len(tokens) - 5
        np.testing.assert_array_equal(batch.advantages, batch.loss_mask)
        for zero in (batch.prefix_ids, batch.behavior_logprobs, batch.ref_logprobs):
            assert not np.any(zero)
        padding = np.asarray(batch.segment_ids) == 0
        assert np.all(np.asarray(batch.parents)[padding] == -1)
        assert not np.any(np.asarray(batch.loss_mask)[padding])
    assert found == {i: 1 + i * 7 % 9 for i in range(30)}


def test_sample_ids_number_the_conversations_of_a_batch():
    for batch in make(chats(30)):
        ids, segment_ids = np.asarray(batch.sample_ids), np.asarray(batch.segment_ids)
        assert np.all((ids == -1) == (segment_ids == 0))
        rows = np.broadcast_to(np.arange(2)[:, None], ids.shape)
        pairs = {
            (row, segment): i
            for row, segment, i in zip(rows.flat, segment_ids.flat, ids.flat, strict=True)
        }
        numbers = [i for (_, segment), i in pairs.items() if segment]
        assert sorted(numbers) == list(range(len(segments(batch))))


@pytest.mark.parametrize(("count", "batch_size"), [(10, 4), (1, 4), (37, 3), (64, 1)])
def test_an_epoch_trains_on_every_conversation_once_the_last_partial_batch_included(
    count, batch_size
):
    batches = list(make(chats(count), batch_size=batch_size))
    assert sorted(seen(batches)) == list(range(count))
    assert {batch.tokens.shape for batch in batches} == {(batch_size, 24)}


def test_epochs_have_different_orders_and_seeds_too():
    epochs = seen(make(chats(20), num_epochs=3, batch_size=1))
    assert sorted(epochs) == sorted([*range(20)] * 3)
    other = seen(make(chats(20), num_epochs=3, batch_size=1, seed=6))
    assert epochs != other
    assert seen(make(chats(20), num_epochs=3, batch_size=1)) == epochs
    endless = make(chats(3), num_epochs=None)
    assert len({i for _ in range(20) for i in seen([next(endless)])}) == 3


def test_packing_cuts_a_long_conversation_and_never_trains_on_the_cut_off_end():
    # Lengths 5, 2, 4 and 1 with rows of 4 (a template that renders digits as they are, all trained).
    def digits(messages):
        ids = [int(c) for c in messages[0].content.split(",")]
        return ids, [True] * len(ids)

    texts = ["1,2,3,4,5", "6,7", "8,9,10,11", "12,13"]
    source = Chats([(text, "") for text in texts])
    (batch,) = make(source, digits, length=4, batch_size=3)
    rows = {
        tuple(tokens[ids > 0])
        for tokens, ids in zip(batch.tokens, batch.segment_ids, strict=True)
        if ids.any()
    }
    assert {frozenset(row) for row in rows} == {
        frozenset({1, 2, 3, 4}),
        frozenset({8, 9, 10, 11}),
        frozenset({6, 7, 12, 13}),
    }
    assert 5 not in np.asarray(batch.tokens)
    # The first token of a conversation has nothing to be predicted from.
    assert not np.any(np.asarray(batch.loss_mask)[np.asarray(batch.positions) == 0])


def test_a_conversation_without_a_trained_token_after_the_cut_is_dropped_and_counted():
    source = Chats([("abc", "xy"), ("q", "yes"), ("q" * 30, "late"), ("r", "a" * 50)])
    dataset = make(source, length=6)
    kept = [ids.tolist() for batch in dataset for ids in segments(batch)]
    # [1, a, b, c, END, 2 | x, y, END] is cut where its answer starts; the third never gets there.
    a, q, r = ord("a"), ord("q"), ord("r")
    assert sorted(kept) == [[1, q, 3, 2, ord("y"), ord("e")], [1, r, 3, 2, a, a]]
    assert dataset.counts == {"read": 4, "truncated": 2, "dropped": 2}


def test_the_cut_keeps_no_assistant_token():
    def masked(messages):
        return [1, 2, 3, 4, 5], [0, 0, 0, 1, 1]

    with pytest.raises(ConfigError, match="no assistant token within the row length"):
        next(make(Chats([("q", "a")]), masked, length=3))
    batch = next(make(Chats([("q", "a")]), masked, length=4))
    assert batch.loss_mask[0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("num_epochs", [1, None])
def test_data_with_nothing_to_train_on_raises_rather_than_runs_for_ever(num_epochs):
    def unmarked(messages):
        ids, _ = render(messages)
        return ids, [False] * len(ids)

    with pytest.raises(ConfigError, match="no assistant token"):
        next(make(chats(7), unmarked, num_epochs=num_epochs))


def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "completion": "a"}\n\n{"prompt": "q", "reply": "a"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: got a record with the keys"):
        list(make(open_source(str(path))))

    def strict(messages):
        raise ValueError("the template refuses this")

    with pytest.raises(ConfigError, match="chats:1: the template refuses this"):
        next(make(chats(1), strict))


@pytest.mark.parametrize("stop_after", [0, 1, 4, 7, 20])
@pytest.mark.parametrize("mixed", [False, True])
def test_a_resumed_iterator_gives_exactly_the_batches_that_were_left(stop_after, mixed):
    def fresh():
        if mixed:
            return make([chats(40), chats(25, "b", 5)], weights=[3, 1], num_epochs=None)
        return make([chats(40), chats(25, "b", 5)], num_epochs=4)

    whole = fresh()
    batches = [next(whole) for _ in range(25)]
    killed = fresh()
    for _ in range(stop_after):
        next(killed)
    saved, counts = json.dumps(killed.get_state()), dict(killed.counts)
    for _ in range(3):  # what runs on after the checkpoint must not show in it
        next(killed)
    resumed = fresh()
    resumed.set_state(json.loads(saved))
    assert (resumed.num_batches, resumed.counts) == (stop_after, counts)
    for expected in batches[stop_after:]:
        assert_same(next(resumed), expected)
    assert resumed.counts == whole.counts
    assert json.dumps(resumed.get_state()) == json.dumps(whole.get_state())


def test_the_same_iterator_can_be_wound_back():
    dataset = make(chats(40), num_epochs=None)
    state = dataset.get_state()
    first = [next(dataset) for _ in range(5)]
    dataset.set_state(state)
    assert dataset.counts == {"read": 0, "truncated": 0, "dropped": 0}
    for expected in first:
        assert_same(next(dataset), expected)


def test_more_epochs_continue_a_finished_run_at_its_boundary():
    short = make(chats(12), num_epochs=1)
    assert sorted(seen(short)) == list(range(12))
    longer = make(chats(12), num_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        longer.set_state(short.get_state())
    assert longer.num_batches == short.num_batches
    assert sorted(seen(longer)) == list(range(12))


def test_changed_data_start_over_with_a_warning_that_names_them():
    saved = make(chats(500, "A"), num_epochs=None)
    for _ in range(100):
        next(saved)
    new = make(chats(300, "B"), num_epochs=None)
    with pytest.warns(UserWarning, match=r"A then, B now.*starting again from its first record"):
        new.set_state(saved.get_state())
    assert new.num_batches == 0
    assert_same(next(new), next(make(chats(300, "B"), num_epochs=None)))


@pytest.mark.parametrize(
    "change",
    [{"length": 32}, {"batch_size": 4}, {"seed": 6}, {"weights": [1.0], "num_epochs": None}],
)
def test_changed_settings_start_over_with_a_warning(change):
    saved = make(chats(50))
    next(saved)
    new = make(chats(50), **change)
    with pytest.warns(UserWarning, match="settings was"):
        new.set_state(saved.get_state())
    assert new.num_batches == 0


def test_moved_data_continue():
    saved = make(chats(50, "old/path"))
    next(saved)
    moved = make(chats(50, "new/path"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved.set_state(saved.get_state())
    assert_same(next(moved), next(saved))


def test_a_state_of_something_else_is_refused():
    with pytest.raises(ConfigError, match="expected one of version 1"):
        make(chats(3)).set_state({"next_index": 3})


@pytest.mark.parametrize("process_count", [2, 4])
def test_processes_hold_the_rows_of_the_same_global_batch(process_count):
    whole = list(make(chats(61), batch_size=4))
    parts = [
        list(make(chats(61), batch_size=4, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert {len(part) for part in parts} == {len(whole)}
    for step, expected in enumerate(whole):
        joined = jax.tree.map(lambda *rows: np.concatenate(rows), *[part[step] for part in parts])
        assert_same(joined, expected)


def test_a_mixture_draws_conversations_in_proportion_and_repeats_the_small_part():
    large, small = chats(1000), Chats([("s", "t")], "small")
    dataset = make([large, small], weights=[3, 1], num_epochs=None)
    drawn = [ids[1] == ord("s") for _ in range(60) for ids in segments(next(dataset))]
    assert abs(np.mean(drawn) - 0.25) < 0.03


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 1}, "length is 1"),
        ({"batch_size": 3, "process_count": 2}, r"batch_size \(3\) must be a positive multiple"),
        ({"batch_size": 0}, r"batch_size \(0\)"),
        ({"process_index": 1}, "process_index is 1; expected 0 to 0"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"weights": [1.0, 2.0], "num_epochs": None}, "for 1 sources"),
        ({"weights": [0.0], "num_epochs": None}, "number > 0"),
        ({"weights": [1.0]}, "set num_epochs=None"),
    ],
)
def test_arguments_that_cannot_work_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make(chats(5), **change)
    with pytest.raises(ConfigError, match="no data sources"):
        make([])
