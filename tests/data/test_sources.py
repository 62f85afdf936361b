"""Sources: what a record is, where it is, and what happens when it is bad."""

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlvr_jax.data.loader import load_tasks
from rlvr_jax.data.sources import ParquetSource, open_source, split_source
from rlvr_jax.data.transforms import last_box, to_messages, to_task
from rlvr_jax.errors import ConfigError
from rlvr_jax.types import Message


def write_jsonl(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
    return str(path)


def numbered(path: Path, count: int) -> str:
    return write_jsonl(path, [{"i": i} for i in range(count)])


def everything(source) -> list:
    return [source[i] for i in range(len(source))]


def test_only_a_newline_ends_a_jsonl_record(tmp_path):
    record = {"out": "a\u2028b\u0085c\x0bd\x0ce\u2029f"}
    source = open_source(write_jsonl(tmp_path / "a.jsonl", [record, {"out": "second"}]))
    assert everything(source) == [record, {"out": "second"}]


def test_jsonl_accepts_crlf_blank_lines_a_byte_order_mark_and_a_missing_last_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"i": 0}\r\n\r\n  \n{"i": 1}\n\n{"i": "\xc3\xa9"}')
    source = open_source(str(path))
    assert everything(source) == [{"i": 0}, {"i": 1}, {"i": "é"}]
    assert source.where(1) == f"{path}:4"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"i": 1', "not valid JSON"),
        (b'{"i": 1} {"i": 2}', "not valid JSON"),
        (b'{"i": "\xff"}', "not valid JSON"),
        (b"[1, 2]", "expected an object"),
        (b"3", "expected an object"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line_when_the_file_is_opened(tmp_path, line, reason):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"i": 0}\n\n' + line + b"\n")
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:3: .*{reason}"):
        open_source(str(path))


def test_a_slice_with_negative_bounds_takes_the_last_records(tmp_path):
    path = numbered(tmp_path / "data.jsonl", 250)
    source = open_source(f"{path}@[-100:]")
    assert len(source) == 100
    assert source[0] == {"i": 150}
    assert source[99] == {"i": 249}
    assert source.where(0) == f"{path}:151"


@pytest.mark.parametrize("text", ["[:10]", "[10:20]", "[-5:-2]", "[:]", "[240:999]", "[-999:3]"])
def test_slices_mean_what_they_mean_for_a_python_list(tmp_path, text):
    path = numbered(tmp_path / "data.jsonl", 250)
    start, stop = (int(bound) if bound else None for bound in text[1:-1].split(":"))
    expected = list(range(250))[start:stop]
    assert [record["i"] for record in everything(open_source(f"{path}@{text}"))] == expected


@pytest.mark.parametrize("text", ["[5]", "[::2]", "[a:b]", "[]", "[1.5:]"])
def test_a_malformed_slice_is_refused(tmp_path, text):
    path = numbered(tmp_path / "data.jsonl", 3)
    with pytest.raises(ConfigError, match="malformed"):
        open_source(f"{path}@{text}")


def test_a_slice_that_selects_nothing_says_how_many_there_are(tmp_path):
    path = numbered(tmp_path / "data.jsonl", 3)
    with pytest.raises(ConfigError, match=r"selects no records.*holds 3"):
        open_source(f"{path}@[5:]")


def test_missing_empty_unknown_and_directory_specs_are_clear_errors(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "data.csv").write_text("a,b\n")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    (tmp_path / "bad.parquet").write_text("not parquet at all")
    for spec, message in {
        "missing.jsonl": "no file matches",
        "none-*.jsonl": "no file matches",
        "empty.jsonl": "no records",
        "empty.parquet": "no records",
        "bad.parquet": "not a readable Parquet",
        "data.csv": "unknown format '.csv'; expected one of .jsonl",
        "": "is a directory",
    }.items():
        with pytest.raises(ConfigError, match=message):
            open_source(f"{tmp_path}/{spec}")


def test_a_glob_is_read_in_numeric_order_and_mixes_formats(tmp_path):
    for i in (10, 9, 1):
        write_jsonl(tmp_path / f"shard-{i}.jsonl", [{"i": i}, {"i": i + 0.5}])
    pq.write_table(pa.table({"i": [2.0]}), tmp_path / "shard-2.parquet")
    source = open_source(f"{tmp_path}/shard-*")
    assert [record["i"] for record in everything(source)] == [1, 1.5, 2, 9, 9.5, 10, 10.5]
    assert source.where(4).endswith("shard-9.jsonl:2")
    assert [r["i"] for r in everything(open_source(f"{tmp_path}/shard-*@[-2:]"))] == [10, 10.5]


def test_parquet_rows_come_back_across_row_groups_and_only_needed_groups_are_read(tmp_path):
    rows = [{"i": i, "messages": [{"role": "user", "content": f"é{i}"}]} for i in range(25)]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    source = ParquetSource(str(path))
    assert source[13] == rows[13]
    assert list(source._groups) == [3]
    assert everything(source) == rows
    assert source.where(7) == f"{path} row 7"


def test_the_row_group_cache_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("rlvr_jax.data.sources._ROW_GROUP_CACHE_BYTES", 1000)
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"i": list(range(400))}), path, row_group_size=50)  # 400 bytes each
    source = ParquetSource(str(path))
    assert [record["i"] for record in everything(source)] == list(range(400))
    assert list(source._groups) == [6, 7]


def test_sources_may_be_read_from_many_threads(tmp_path):
    pq.write_table(pa.table({"i": list(range(200))}), tmp_path / "b.parquet", row_group_size=7)
    numbered(tmp_path / "a.jsonl", 200)
    source = open_source(f"{tmp_path}/*")
    wrong = []

    def read(step: int) -> None:
        for k in range(400):
            index = (k * step) % 400
            if source[index] != {"i": index % 200}:
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(step,)) for step in (1, 3, 7, 399)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fingerprint_follows_the_content_and_not_the_path(tmp_path):
    a = open_source(numbered(tmp_path / "a.jsonl", 5))
    copy = open_source(numbered(tmp_path / "copy.jsonl", 5))
    write_jsonl(tmp_path / "other.jsonl", [{"i": i} for i in (0, 1, 2, 3, 5)])
    other = open_source(str(tmp_path / "other.jsonl"))
    assert a.fingerprint == copy.fingerprint
    sliced = open_source(f"{tmp_path}/a.jsonl@[1:]")
    joined = open_source(f"{tmp_path}/*.jsonl")
    assert len({s.fingerprint for s in (a, other, sliced, joined)}) == 4
    for values, name in (([1, 2], "p"), ([1, 2], "q"), ([1, 3], "r")):
        pq.write_table(pa.table({"i": values}), tmp_path / f"{name}.parquet")
    p, q, r = (open_source(f"{tmp_path}/{name}.parquet").fingerprint for name in "pqr")
    assert p == q != r


def test_held_out_records_are_disjoint_complete_and_the_same_every_time(tmp_path):
    source = open_source(numbered(tmp_path / "a.jsonl", 20))
    train, held_out = split_source(source, 0.2, seed=3)
    assert len(held_out) == 4
    assert sorted(r["i"] for r in everything(train) + everything(held_out)) == list(range(20))
    again = split_source(source, 0.2, seed=3)
    assert everything(again[1]) == everything(held_out)
    assert everything(split_source(source, 0.2, seed=4)[1]) != everything(held_out)
    assert [len(s) for s in split_source(source, 0.001, seed=0)] == [19, 1]
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(ConfigError, match="share in"):
            split_source(source, share, seed=0)


TFDS_BUILDER = """
import sys, numpy as np, tensorflow_datasets as tfds
class TinyChat(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")
    def _info(self):
        message = {"role": tfds.features.Text(), "content": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
            "n": tfds.features.Scalar(np.int64), "messages": tfds.features.Sequence(message)}))
    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}
    def _generate_examples(self):
        for i in range(6):
            yield i, {"n": i, "messages": [{"role": "user", "content": "é\\u2028"},
                                           {"role": "assistant", "content": f"yes {i}"}]}
TinyChat(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""


@pytest.fixture(scope="module")
def tfds_dir(tmp_path_factory) -> str:
    # In a process of its own: there the class is registered, here TFDS must find the files by themselves.
    path = str(tmp_path_factory.mktemp("tfds"))
    subprocess.run(
        [sys.executable, "-c", TFDS_BUILDER, path], check=True, timeout=120, capture_output=True
    )
    return path


def test_tfds_array_record_is_read_as_text_without_tensorflow(tfds_dir):
    source = open_source(f"tfds:tiny_chat?split=train&data_dir={tfds_dir}")
    records = sorted(everything(source), key=lambda record: record["n"])
    assert [record["n"] for record in records] == list(range(6))
    assert to_messages(records[2]) == (
        Message(role="user", content="é\u2028"),
        Message(role="assistant", content="yes 2"),
    )
    json.dumps(records)
    assert "tensorflow" not in sys.modules
    assert len(open_source(f"tfds:tiny_chat?split=train&data_dir={tfds_dir}@[-2:]")) == 2
    half = open_source(f"tfds:tiny_chat?split=train[:50%]&data_dir={tfds_dir}")
    assert len(half) == 3
    assert half.fingerprint != source.fingerprint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tfds:tiny_chat?split=test&data_dir={}", "could not be opened.*split"),
        ("tfds:tiny_chatter?split=train&data_dir={}", "could not be opened.*not found"),
        ("tfds:tiny_chat", r"malformed.*split=SPLIT"),
        ("tfds:tiny_chat?split=train&dir={}", r"malformed.*\['dir'\]"),
        ("tfds:?split=train", "malformed"),
    ],
)
def test_tfds_specs_that_cannot_be_opened_say_why(tfds_dir, spec, message):
    with pytest.raises(ConfigError, match=message):
        open_source(spec.format(tfds_dir))


USER, ASSISTANT = Message(role="user", content="Q"), Message(role="assistant", content="A")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
        {"messages": {"role": ["user", "assistant"], "content": ["Q", "A"]}},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}], "response": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"prompt": "Q", "completion": "A"},
        {"prompt": [{"role": "user", "content": "Q"}], "response": "A"},
        {"instruction": "Q", "input": "", "output": "A"},
    ],
)  # fmt: skip
def test_every_published_form_gives_the_same_conversation(record):
    assert to_messages(record) == (USER, ASSISTANT)


def test_tool_calls_reach_the_chat_template_and_null_content_is_empty():
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "weight": None}
    assert to_messages({"messages": [call]}) == (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
    )
    with pytest.raises(ValueError, match="text only"):
        to_task({"prompt": [call], "answer": "1"}, domain="d", source="s")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "Q"}, r"keys \['text'\]; expected messages"),
        ({"messages": []}, "not empty"),
        ({"messages": "Q"}, "expected a list of messages"),
        ({"messages": [{"role": "robot", "content": "Q"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "expected text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "expected text",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "expected text"),
    ],
)
def test_a_record_that_is_no_conversation_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        to_messages(record)


@pytest.mark.parametrize(
    ("record", "question", "answer"),
    [
        ({"question": "How many?", "answer": "1 + 1 = <<1+1=2>>2\n#### 1,234"}, "How many?", "1234"),
        ({"question": "Cost?", "answer": "so\n#### $-5.50\n"}, "Cost?", "-5.50"),
        ({"problem": "P", "solution": r"no \boxed{1}, so $\boxed{\frac{1}{2}}$."}, "P", r"\frac{1}{2}"),
        ({"problem": "P", "solution": "long", "answer": "3"}, "P", "3"),
        ({"prompt": "P", "answer": "yes"}, "P", "yes"),
        ({"prompt": [{"role": "user", "content": "P"}], "answer": 0}, "P", 0),
        ({"question": "Q", "choices": ["x", "y"], "answer": 1}, "Q\nA. x\nB. y", "B"),
        ({"question": "Q", "choices": ["x", "y"], "answer": "y"}, "Q\nA. x\nB. y", "B"),
        ({"question": "Q", "choices": ["x", "y"], "answer": "A"}, "Q\nA. x\nB. y", "A"),
    ],
)  # fmt: skip
def test_published_task_formats_give_an_answer_a_verifier_can_take(record, question, answer):
    task = to_task(record, domain="math", source="s")
    assert task.prompt == (Message(role="user", content=question),)
    assert task.answer == answer
    assert type(task.answer) is type(answer)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "Q", "choices": ["blue", "red", "green", "pink"], "answer": "teal"}, "matches no choice"),
        ({"question": "Q", "choices": ["x", "y"], "answer": 2}, "matches no choice"),
        ({"question": "Q", "choices": ["x", "y"], "answer": -1}, "matches no choice"),
        ({"question": "Q", "choices": ["x", "x"], "answer": "x"}, "matches no choice"),
        ({"question": "Q", "choices": ["x", "y"]}, "matches no choice"),
        ({"question": "Q", "answer": "a long text without the mark"}, "no final line"),
        ({"question": "Q", "answer": "#### about ten"}, "expected a number"),
        ({"problem": "P", "solution": r"\boxed{1"}, "no complete"),
        ({"problem": "P", "solution": r"\boxed{}"}, "no complete"),
        ({"prompt": "P", "answer": "  "}, "empty"),
        ({"prompt": "P", "answer": None}, "empty"),
        ({"prompt": [{"role": "assistant", "content": "A"}], "answer": "1"}, "must end with a turn of the user"),
        ({"text": "Q"}, "expected question"),
    ],
)  # fmt: skip
def test_a_gold_answer_that_nothing_can_match_is_refused(record, message):
    with pytest.raises(ValueError, match=message):
        to_task(record, domain="d", source="s")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{1} wait, \boxed{2}", "2"),
        (r"answer: \boxed{\frac{1}{2}} and \boxed{never closes", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \right.}", r"\left\{x \right."),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box_is_found_whatever_the_braces(text, box):
    assert last_box(text) == box


def test_load_tasks_counts_what_it_skips_and_keeps_ids_when_the_file_is_cut(tmp_path):
    records = [
        {"question": f"{i} + {i}?", "answer": f"#### {2 * i}", "level": "Level 3"} for i in range(4)
    ]
    path = write_jsonl(
        tmp_path / "gsm.jsonl", [*records, {"question": "?", "answer": "?"}, records[0]]
    )
    with pytest.warns(
        UserWarning, match=r"skipped 2 of 6 records.*gsm\.jsonl:5: the answer has no"
    ):
        tasks = load_tasks(path, domain="math", instruction="Answer with a number.")
    assert [task.answer for task in tasks] == ["0", "2", "4", "6"]
    assert tasks[1].prompt[0].content == "1 + 1?\n\nAnswer with a number."
    assert tasks[1].metadata == {"source": path, "level": 3}
    assert {task.domain for task in tasks} == {"math"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tail = load_tasks(f"{path}@[2:4]", domain="math", instruction="Answer with a number.")
    assert [task.id for task in tail] == [task.id for task in tasks[2:]]


def test_load_tasks_with_nothing_usable_is_an_error(tmp_path):
    path = write_jsonl(
        tmp_path / "a.jsonl", [{"question": "Q", "choices": ["a", "b"], "answer": "c"}]
    )
    with pytest.raises(ConfigError, match=r"none of the 1 records.*matches no choice"):
        load_tasks(path, domain="d")
