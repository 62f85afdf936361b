"""exact, format, regex and json_schema."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_jax.rewards import VERIFIERS
from rlvr_jax.rewards.exact import Exact
from rlvr_jax.rewards.format import Format
from rlvr_jax.rewards.json_schema import JsonSchema
from rlvr_jax.rewards.regex import Regex
from rlvr_jax.rewards.similarity import Similarity, edit_distance
from rlvr_jax.types import Message, Task


def task(answer=None, **metadata):
    prompt = (Message(role="user", content=r"Use <think>x</think> and \boxed{}. Answer: "),)
    return Task(id="1", domain="test", prompt=prompt, answer=answer, metadata=metadata)


@pytest.mark.parametrize("name", list(VERIFIERS))
def test_every_verifier_is_a_frozen_picklable_dataclass_of_its_name(name):
    verifier = VERIFIERS.get(name)(**({"boxed": True} if name == "format" else {}))
    assert verifier.name == name
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    with pytest.raises(AttributeError):
        verifier.mode = "other"


@pytest.mark.parametrize(
    ("gold", "response", "params", "score"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("Paris", " Paris\n", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "PARIS", {"ignore_case": True}, 1.0),
        ("Straße", "STRASSE", {"ignore_case": True}, 1.0),
        ("Paris", "Paris.", {}, 0.0),
        ("Paris", "Paris.", {"ignore_punctuation": True}, 1.0),
        ("Paris", '"Paris"!', {"ignore_punctuation": True}, 1.0),
        ("-3", "3", {"ignore_punctuation": True}, 0.0),
        ("-3", "-3.", {"ignore_punctuation": True}, 1.0),
        ("1.5", "15", {"ignore_punctuation": True}, 0.0),
        ("its", "it's", {"ignore_punctuation": True}, 0.0),
        ("Paris", "**Paris**.", {"ignore_punctuation": True}, 1.0),
        ("?", ".", {"ignore_punctuation": True}, 0.0),
        ("?", "?", {"ignore_punctuation": True}, 1.0),
        ("a b", "a.\nb.", {"ignore_punctuation": True}, 1.0),
        ("a b", "a  b", {}, 1.0),
        ("a b", "a\n\tb", {}, 1.0),
        ("a b", "a  b", {"ignore_whitespace": False}, 0.0),
        ("ab", "a b", {}, 0.0),
        ("Paris", "The answer is Paris", {}, 0.0),
        ("A", "Apple", {}, 0.0),
        ("é", "e\u0301", {}, 1.0),
        (["Paris", "paris"], "paris", {}, 1.0),
        (["Paris", "London"], "Rome", {}, 0.0),
        (42, "42", {}, 1.0),
        ("B", "I think <answer>B</answer>", {"mode": "tagged"}, 1.0),
        ("B", "Answer: B", {"mode": "tagged"}, 1.0),
        ("B", r"\boxed{A}, no \boxed{B}", {"mode": "boxed"}, 1.0),
        ("B", "B", {"mode": "boxed"}, 0.0),
        ("", "", {}, 0.0),
    ],
)
def test_exact(gold, response, params, score):
    assert Exact(**params)(task(gold), response) == score


@given(st.text(), st.booleans(), st.booleans(), st.booleans())
def test_exact_accepts_the_gold_answer_however_it_normalises(text, case, whitespace, punctuation):
    verifier = Exact(ignore_case=case, ignore_whitespace=whitespace, ignore_punctuation=punctuation)
    assert verifier(task(text), text) == float(bool(text.strip()))


@pytest.mark.parametrize("answer", [None, True, [], {"a": 1}, [None]])
def test_a_task_without_an_answer_cannot_be_judged(answer):
    with pytest.raises(TypeError, match="expected a string, a number"):
        Exact()(task(answer), "x")


THINK = Format(tags=("think", "answer"))


@pytest.mark.parametrize(
    ("verifier", "response", "score"),
    [
        (THINK, "<think>a</think><answer>b</answer>", 1.0),
        (THINK, "well <think>a</think> so <answer>b</answer> done", 1.0),
        (THINK, "<answer>b</answer><think>a</think>", 0.0),
        (THINK, "<think>a</think>", 0.0),
        (THINK, "<think>a</think><answer>b", 0.0),
        (THINK, "<think>a<answer>b</answer></think>", 0.0),
        (THINK, "<think>a</think><answer></answer>", 0.0),
        (THINK, "<think> </think><answer>b</answer>", 0.0),
        (THINK, "<think>a</think><think>a</think><answer>b</answer>", 0.0),
        (THINK, "<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        (THINK, "<think>a</think></think><answer>b</answer>", 0.0),
        (THINK, "</think>a<think><answer>b</answer>", 0.0),
        (THINK, "<Think>a</Think><answer>b</answer>", 0.0),
        (THINK, "", 0.0),
        (Format(tags=("think", "answer"), only=True), " <think>a</think>\n<answer>b</answer>\n", 1.0),
        (Format(tags=("think", "answer"), only=True), "So <think>a</think><answer>b</answer>", 0.0),
        (Format(tags=("think", "answer"), only=True), "<think>a</think> or <answer>b</answer>", 0.0),
        (Format(tags=("think", "answer"), only=True), "<think>a</think><answer>b</answer>!", 0.0),
        (Format(boxed=True), "The answer is 7.", 0.0),
        (Format(boxed=True), r"The answer is \boxed{7}.", 1.0),
        (Format(boxed=True), r"\boxed{7} \boxed{", 0.0),
        (Format(boxed=True), r"\boxed{}", 0.0),
        (Format(boxed=True), r"\boxed{{}}", 0.0),
        (THINK, "<think>\u200b</think><answer>b</answer>", 0.0),
        (Format(sections=("## Plan", "Answer:")), "## Plan\nthink\nAnswer: 7", 1.0),
        (Format(sections=("## Plan", "Answer:")), "Answer: 7\n## Plan\nthink", 0.0),
        (Format(sections=("## Plan", "Answer:")), "## Plan\nAnswer: 7", 0.0),
        (Format(sections=("## Plan", "Answer:")), "## Plan\nx\nAnswer:\n", 0.0),
        (Format(sections=("## Plan", "Answer:")), "## Planning\nx\nAnswer: 7", 0.0),
        (Format(sections=("## Plan",)), "## Plan\nx\n## Plan\ny", 0.0),
        (Format(sections=("## Plan",)), "my ## Plan\nx", 0.0),
    ],
)  # fmt: skip
def test_format_looks_at_the_response_only(verifier, response, score):
    assert verifier(task("7"), response) == score


@pytest.mark.parametrize(
    "params", [{}, {"tags": ("<think>",)}, {"sections": (" ",)}, {"boxed": True, "only": True}]
)
def test_format_that_cannot_be_meant_is_refused(params):
    with pytest.raises(ValueError, match="format"):
        Format(**params)


def test_format_takes_lists_as_configs_give_them():
    assert Format(tags=["think"]) == Format(tags=("think",))


@pytest.mark.parametrize(
    ("params", "gold", "response", "score"),
    [
        ({"pattern": r"\d+"}, None, "42", 1.0),
        ({"pattern": r"\d+"}, None, " 42\n", 1.0),
        ({"pattern": r"\d+"}, None, "42 x", 0.0),
        ({"pattern": r"\d+", "mode": "search"}, None, "x 42 x", 1.0),
        ({"pattern": "yes"}, None, "YES", 0.0),
        ({"pattern": "yes", "ignore_case": True}, None, "YES", 1.0),
        ({"pattern": "a.b"}, None, "a\nb", 0.0),
        ({"pattern": "a.b", "dotall": True}, None, "a\nb", 1.0),
        ({"pattern": "^b$", "mode": "search"}, None, "a\nb\nc", 0.0),
        ({"pattern": "^b$", "mode": "search", "multiline": True}, None, "a\nb\nc", 1.0),
        ({}, r"[a-c]+", "abc", 1.0),
        ({}, r"[a-c]+", "abd", 0.0),
    ],
)
def test_regex(params, gold, response, score):
    assert Regex(**params)(task(gold), response) == score


def test_regex_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="no regular expression"):
        Regex(pattern="(")
    with pytest.raises(ValueError, match="fullmatch or search"):
        Regex(pattern="a", mode="match")
    with pytest.raises(TypeError, match="expected a regular expression"):
        Regex()(task(None), "x")


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('  {"name": "Ada"}\n', 1.0),
        ('Here it is:\n```json\n{"name": "Ada"}\n```\nBye.', 1.0),
        ('```\n{"name": "Ada"}\n```', 1.0),
        ('~~~json\n{"name": "Ada"}\n~~~', 1.0),
        ('````json\n{"name": "Ada"}\n````', 1.0),
        ('````json\n{"name": "Ada"}\n```', 0.0),
        ('```json\n{"name": 1}\n```\n```json\n{"name": "Ada"}\n```', 1.0),
        ('```json\n{"name": "Ada"}\n```\n```json\n{"name": 1}\n```', 0.0),
        ('{"age": 36}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": 1.5}', 0.0),
        ('{"name": "Ada", "extra": 1}', 0.0),
        ('{"name": "Ada", "name": "Bob"}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": Infinity}', 0.0),
        ('{"name": "Ada", "age": 1e999}', 0.0),
        ("{'name': 'Ada'}", 0.0),
        ('{"name": "Ada",}', 0.0),
        ('I say {"name": "Ada"}', 0.0),
        ('```json\n{"name": "Ada"}', 0.0),
        ('[{"name": "Ada"}]', 0.0),
        ("[" * 100_000, 0.0),
        ('{"a":' * 50_000, 0.0),
        ("9" * 10_000, 0.0),
        ("", 0.0),
        ("__import__('os').system('x')", 0.0),
    ],
)  # fmt: skip
def test_json_schema(response, score):
    assert JsonSchema(schema=SCHEMA)(task(), response) == score
    assert JsonSchema()(task(schema=SCHEMA), response) == score


def test_json_schema_without_a_usable_schema_cannot_be_judged():
    from jsonschema import SchemaError

    with pytest.raises(ValueError, match="no JSON schema"):
        JsonSchema()(task(), "{}")
    with pytest.raises(SchemaError):
        JsonSchema(schema={"type": "nonsense"})(task(), "{}")


def test_json_schema_fetches_no_references():
    from referencing.exceptions import Unresolvable

    with pytest.raises(Exception) as caught:
        JsonSchema(schema={"$ref": "http://localhost:1/schema.json"})(task(), "{}")
    assert isinstance(caught.value, Unresolvable)


def test_json_schema_checks_formats():
    verifier = JsonSchema(schema={"type": "string", "format": "date"})
    assert verifier(task(), '"2024-02-29"') == 1.0
    assert verifier(task(), '"2024-02-30"') == 0.0


def test_edit_distance_is_that_of_the_textbook():
    for a, b, distance in (
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("kitten", "sitting", 3),
        ("flaw", "lawn", 2),
        ("intention", "execution", 5),
    ):
        assert edit_distance(a, b) == edit_distance(b, a) == distance


@pytest.mark.parametrize(
    ("gold", "response", "params", "score"),
    [
        ("tall monkey", "tall monkey", {}, 1.0),
        ("tall monkey", " tall  monkey\n", {}, 1.0),
        ("tall", "ball", {}, 0.75),
        ("tall", "TALL", {}, 0.0),
        ("tall", "TALL", {"ignore_case": True}, 1.0),
        ("tall", "tall.", {}, 0.8),
        ("tall", "tall.", {"ignore_punctuation": True}, 1.0),
        ("tall", "", {}, 0.0),
        (["tall", "ball"], "call", {}, 0.75),
        ("tall", "tall", {"mode": "boxed"}, 0.0),
        ("tall", r"so \boxed{tell}", {"mode": "boxed"}, 0.75),
    ],
)
def test_similarity_is_the_share_that_need_not_be_edited(gold, response, params, score):
    assert Similarity(**params)(task(gold), response) == pytest.approx(score)


def test_similarity_to_a_very_long_answer_is_cheap():
    assert Similarity()(task("a" * 1000), "a" * 1_000_000) == 0.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_similarity_is_1_exactly_where_exact_is(gold, response):
    value = Similarity()(task(gold), response)
    assert 0 <= value <= 1
    assert (value == 1.0) == (Exact()(task(gold), response) == 1.0)
