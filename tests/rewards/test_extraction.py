import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_jax.rewards.extraction import extract, fenced_blocks, last_boxed, tagged


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{41} wait, \boxed{42}", "42"),
        (r"answer: \fbox{7}", "7"),
        (r"\fbox{6} then \boxed{7}", "7"),
        (r"\boxed{6} then \fbox{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\frac{1}{\sqrt{2}}} and so on", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed {42}", "42"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed{x = \fbox{7}}", r"x = \fbox{7}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"text with } a stray brace \boxed{5}", "5"),
        (r"text with { a stray brace \boxed{5}", "5"),
        (r"\boxed{5} }", "5"),
        (r"\boxed{ I mean \boxed{5}", "5"),
        ("```python\nprint('\\boxed{3}')\n```\nSo \\boxed{4}", "4"),
        (r"\boxed{5} as you asked, in \boxed format", "5"),
        (r"\boxed{}", ""),
        (r"\boxed{5}{6}", "5"),
        ("no box", None),
        ("", None),
        (r"\boxed", None),
        (r"\boxed{", None),
        (r"\boxed{never closes", None),
        (r"\boxed{5\}", None),
        (r"answer: \boxed{\frac{1}{2}} and \boxed{never closes", None),
        (r"first \boxed{42} then \boxed{", None),
        (r"first \boxed{42} then \fbox{4", None),
        (r"\boxed{42}, \boxed{\frac{1}{2}", None),
        ("boxed{42}", None),
        (r"\unboxed{42}", None),
        (r"\boxedx{42}", None),
    ],
)
def test_the_last_complete_box_wins_and_an_open_last_box_is_no_answer(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("<answer>41</answer> no: <answer>42</answer>", "42"),
        ("<think>Answer: 41</think><answer> 42 </answer>", " 42 "),
        ("Answer: 42", "42"),
        ("answer: 42\nDone.", "42"),
        ("**Answer:** 42", "42"),
        ("**Answer**: 42", "42"),
        ("**Answer: 42**", "42"),
        ("Final answer: 42", "42"),
        ("Answer:\n\n  42\n", "42"),
        ("Answer: 41\nAnswer: 42", "42"),
        ("Answer：42", "42"),
        ("<answer>42", None),
        ("<answer>41</answer> <answer>42", None),
        ("</answer>42<answer>", None),
        ("Answer:", None),
        ("The answer is 42", None),
        ("Cancer: 42", None),
        ("", None),
    ],
)
def test_tagged_answers(text, answer):
    assert tagged(text) == answer


def test_extract_gives_none_for_blank_answers():
    assert extract("  ", "whole") is None
    assert extract(r"\boxed{ }", "boxed") is None
    assert extract("<answer>\n</answer>", "tagged") is None
    assert extract(" 42\n", "whole") == "42"


def test_fenced_blocks_are_complete_ones_in_order():
    text = 'a\n```json\n{"a": 1}\n```\nb\n```\nx\ny\n```\n```json\nopen'
    assert fenced_blocks(text) == ['{"a": 1}', "x\ny"]


@given(
    st.text(alphabet="\\boxedf{}< >/answer:A\n`", max_size=80),
    st.sampled_from(["whole", "tagged", "boxed"]),
)
def test_extraction_never_raises_and_returns_a_part_of_the_text(text, mode):
    answer = extract(text, mode)
    assert answer is None or (answer in text and answer == answer.strip())


@given(st.text(alphabet="abc12 +-", min_size=1), st.text(alphabet="abc {}12"))
def test_a_box_at_the_end_is_found_after_any_text(answer, before):
    assert last_boxed(f"{before}\\boxed{{{answer}}}") == answer


@pytest.mark.parametrize(
    "text",
    ["\\boxed{" * 50_000, "{" * 400_000, "}" * 400_000, "\\boxed{1}" * 40_000, "\\boxed" + " " * 400_000,
     "<answer>" * 50_000, "Answer:" * 50_000, "Answer:\n" * 50_000, "```json\n" * 50_000, "\\" * 400_000],
)  # fmt: skip
def test_extraction_is_linear_on_adversarial_text(text):
    start = time.process_time()
    last_boxed(text), tagged(text), fenced_blocks(text)
    assert time.process_time() - start < 3
