import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_jax.rewards.maths import Math, answers_equal
from rlvr_jax.types import Message, Task
from tests.rewards.math_pairs import DIFFERENT, EQUAL, listed
from tests.rewards.more_math_pairs import MORE_DIFFERENT, MORE_EQUAL


def score(gold, response, **params):
    prompt = (Message(role="user", content=r"Put the final answer within \boxed{42}."),)
    return Math(**params)(Task(id="1", domain="test", prompt=prompt, answer=gold), response)


@pytest.mark.parametrize(("gold", "answer"), [*listed(EQUAL), *MORE_EQUAL])
def test_equal_answers_score_one(gold, answer):
    assert score(gold, f"So it is $\\boxed{{{answer}}}$.") == 1.0


@pytest.mark.parametrize(("gold", "answer"), [*listed(EQUAL), *MORE_EQUAL])
def test_equality_is_symmetric(gold, answer):
    assert answers_equal(answer, gold)


@pytest.mark.parametrize(("gold", "answer"), [*listed(DIFFERENT), *MORE_DIFFERENT])
def test_different_answers_score_zero(gold, answer):
    assert not answers_equal(gold, answer)
    assert score(gold, answer, mode="whole") == 0.0


@pytest.mark.parametrize("answer", sorted({text for pair in listed(EQUAL) for text in pair}))
def test_an_answer_equals_itself_in_other_typography(answer):
    for spelling in (answer, f"${answer}$", f" {answer} ", f"{answer}.", f"\\boxed{{{answer}}}"):
        if "$" not in answer and not answer.endswith("."):
            assert answers_equal(answer, spelling), spelling
    if "\\frac" in answer and "dfrac" not in answer and "tfrac" not in answer:
        assert answers_equal(answer, answer.replace("\\frac", "\\dfrac"))


@pytest.mark.parametrize(
    ("gold", "response", "expected"),
    [
        ("42", r"\boxed{41} wait, \boxed{42}", 1.0),
        ("41", r"\boxed{41} wait, \boxed{42}", 0.0),
        ("6", r"\boxed{6} wait \boxed{7}", 0.0),
        ("7", r"answer: \fbox{7}", 1.0),
        ("42", "I mention 42 somewhere without a box", 0.0),
        ("42", r"first \boxed{42} then \boxed{", 0.0),
        (r"\frac{1}{2}", r"answer: \boxed{\frac{1}{2}} and \boxed{never closes", 0.0),
        ("42", "The answer is 42.", 0.0),
        ("42", "", 0.0),
        ("42", r"\boxed{}", 0.0),
        ("42", "\\boxed{43}\n```python\nprint('\\boxed{42}')\n```", 1.0),
        ("42", "```python\nprint('\\boxed{41}')\n```\n\\boxed{42}", 1.0),
        (["42", "43"], r"\boxed{43}", 1.0),
        (42, r"\boxed{42.0}", 1.0),
        (0.5, r"\boxed{1/2}", 1.0),
        (r"$\boxed{42}$", r"\boxed{42}", 1.0),
    ],
)
def test_the_box_decides(gold, response, expected):
    assert score(gold, response) == expected


def test_other_places_for_the_answer():
    assert score("1/2", "<answer>0.5</answer>", mode="tagged") == 1.0
    assert score("1/2", r"Answer: $\frac{1}{2}$", mode="tagged") == 1.0
    assert score("1/2", r"Answer: $\frac{1}{3}$", mode="tagged") == 0.0
    assert score("1/2", "0.5", mode="whole") == 1.0


@pytest.mark.parametrize("answer", [None, True, [], {}, [None]])
def test_a_task_without_an_answer_cannot_be_judged(answer):
    with pytest.raises(TypeError, match="expected a string, a number"):
        score(answer, r"\boxed{1}")


def test_text_of_a_model_or_of_data_is_never_executed(tmp_path):
    marker = tmp_path / "marker"
    attack = f"__import__('pathlib').Path('{marker}').touch()"
    for text in (
        attack,
        rf"\int {attack}",
        rf"\text{{{attack}}}",
        f"1 + {attack}",
        f"exec({attack})",
    ):
        for gold, response in (("1", text), (text, "1"), (text, text)):
            answers_equal(gold, response)
            score(gold, rf"\boxed{{{response}}}")
    assert not marker.exists()


NUMBERS = st.fractions(min_value=-1000, max_value=1000, max_denominator=50)


def spellings(value):
    top, bottom = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    yield f"{sign}{top}/{bottom}"
    yield rf"{sign}\frac{{{top}}}{{{bottom}}}"
    yield rf"\frac{{{sign}{top}}}{{{bottom}}}"
    yield rf"{sign}\dfrac{{{top * 3}}}{{{bottom * 3}}}".replace("-", "−")
    if bottom == 1:
        yield from (
            f"{sign}{top:,}",
            f"{sign}{top}.0",
            f"x = {sign}{top}",
            rf"{sign}{top}\text{{ cm}}",
        )
    elif top > bottom:
        yield rf"{sign}{top // bottom}\frac{{{top % bottom}}}{{{bottom}}}"


@given(NUMBERS)
@settings(deadline=None)
def test_a_rational_equals_itself_in_every_spelling_and_no_other_number(value):
    gold = f"{value.numerator}/{value.denominator}"
    other = value + 1 if value else value + 2
    for spelling in spellings(value):
        assert answers_equal(gold, spelling), spelling
        assert not answers_equal(f"{other.numerator}/{other.denominator}", spelling), spelling
        if value:
            assert not answers_equal(f"{-value.numerator}/{value.denominator}", spelling), spelling


@given(st.lists(NUMBERS, min_size=2, max_size=4, unique=True), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_sets_ignore_order_and_tuples_do_not(values, random):
    items = [f"{v.numerator}/{v.denominator}" for v in values]
    mixed = random.sample(items, len(items))
    assert answers_equal(", ".join(items), ", ".join(mixed))
    assert answers_equal(rf"\{{{', '.join(items)}\}}", ", ".join(mixed))
    assert answers_equal(f"({', '.join(items)})", f"({', '.join(mixed)})") == (items == mixed)


EXPRESSIONS = st.recursive(
    st.sampled_from(["x", "y", "n", "2", "3", "7", r"\pi", "0.5"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: rf"\frac{{{p[0]}}}{{{p[1]}}}"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]} + {p[1]})"),
        st.tuples(inner, inner).map(lambda p: rf"{p[0]} \cdot {p[1]}"),
        inner.map(lambda e: rf"\sqrt{{{e}}}"),
        inner.map(lambda e: rf"\left({e}\right)^{{2}}"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
@settings(deadline=None)
def test_an_expression_equals_itself_rearranged_and_not_itself_plus_one(expression):
    assert answers_equal(expression, f"0 + {expression}")
    assert answers_equal(expression, rf"1 \cdot ({expression})")
    assert not answers_equal(expression, f"{expression} + 1")
    assert not answers_equal(f"({expression}) + 1", expression)


PIECES = [
    r"\frac", r"\sqrt", "{", "}", "(", ")", "[", "]", "1", "2", "10", "x", "y", "n", "+", "-", "^", "_", r"\pi",
    r"\text{cm}", "cm", "and", ",", ":", "=", "<", r"\le", r"\pm", "%", "!", "|", r"\{", r"\}", r"\sin", r"\log", "&",
    r"\\", r"\cup",
    r"\in", r"\infty", ".", "...", "~", r"\,", "$", "∞", "√", "²", "½", "e", "i", r"\int", r"\sum", r"\lim", "word",
    r"\boxed{", "\\", "é", "٣", "’", r"\binom", r"\lfloor", r"\rfloor", r"\begin{pmatrix}", "million",
]  # fmt: skip
LATEX = st.lists(st.sampled_from(PIECES), max_size=12)


@pytest.mark.parametrize("formula", [r"\sqrt{1/n}", "n", "n^{x}", r"\log n", "n!", r"\{n\}"])
@pytest.mark.parametrize("constant", [r"1\%", r"50^\circ", "3", "[0, 1]", "(2, 3)", "5 cm"])
def test_a_formula_is_not_a_constant(formula, constant):
    assert not answers_equal(constant, formula)
    assert not answers_equal(formula, constant)


@given(LATEX, st.sampled_from(listed(EQUAL)))
@settings(deadline=None, max_examples=300)
def test_any_text_gets_a_float_and_equals_itself(pieces, pair):
    text = " ".join(pieces)
    assert score(pair[0], text, mode="whole") in (0.0, 1.0)
    assert type(score(pair[0], rf"\boxed{{{text}}}")) is float
    assert type(answers_equal(text, pair[1])) is bool
    assert answers_equal(text, text)


ADVERSARIAL = [
    "(" * 2000, "{" * 2000, "^" * 2000, r"\sqrt{" * 300, "1," * 999, "x " * 999, "1+" * 900 + "1", "x+" * 900 + "1",
    "-" * 1999, r"\frac{1}{" * 200 + "2" + "}" * 200, "|" * 1000, "9^" * 600 + "9", r"\sin " * 300 + "x", "!" * 500,
    "((((x+1)^9)^9)^9)^9", "x^{9999999}", "(1+x)^{100000}", r"\sqrt[1000000]{7}", "1000000!", "3000!",
    "99999^{99999}", r"\binom{5000}{2500}", "e^{e^{e^{e}}}", "9^{9^{9^{9}}}", "0." + "1" * 1500, "1" * 1999,
    r"\int" * 100, r"\int_0^1 x^{99999} dx", r"\sum_{k=1}^{99999} \frac{1}{k}", r"\pm" * 100, r"1\pm 2" * 50,
    "10^{10^{10}}", r"\{" * 200, r"\ " * 900, "." * 1999, "=" * 1999, "1e999999", "1e-999999", "\\" * 1999,
    "$" * 1999, r"\boxed{" * 250, "1" + " " * 1900, r"1\," * 400, "1{,}" * 400, "x^{" * 30 + "2" + "}" * 30,
    r"\sqrt{1+" * 38 + "1" + "}" * 38, "1/0", r"\ln 0", "0^{-1}", r"\log_1 5", r"\infty-\infty", r"\gcd()",
    "a" * 100_000, "1+" * 100_000, "\x00", "\ud800",
]  # fmt: skip


@pytest.mark.parametrize("text", ADVERSARIAL, ids=lambda text: ascii(text[:20]))
def test_adversarial_answers_are_judged_in_bounded_time(text):
    start = time.process_time()
    for gold in ("5", "x", r"\sqrt{2}", text):
        assert type(answers_equal(gold, text)) is bool
    assert time.process_time() - start < 5


def test_the_table_of_pairs_is_large_and_without_contradiction():
    assert len(listed(EQUAL)) >= 200 and len(listed(DIFFERENT)) >= 150
    assert not set(listed(EQUAL)) & set(listed(DIFFERENT))
