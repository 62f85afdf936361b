import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_jax.rewards.numbers import last_number, whole_number
from rlvr_jax.rewards.numeric import Numeric
from rlvr_jax.types import Task


def task(answer):
    return Task(id="1", domain="test", prompt=(), answer=answer)


WHOLE = [
    ("42", 42), ("-3", -3), ("−5", -5), ("–5", -5), ("+7", 7), ("0", 0), ("-0", 0), ("007", 7), ("42.", 42),
    (" 42\n", 42),
    ("1,234", 1234), ("1,234,567.5", Fraction(2469135, 2)), ("1,00,000", 100000), ("1 000 000", 1000000),
    ("1\u202f000", 1000), ("1'000", 1000), ("1_000", 1000), ("1{,}000", 1000), ("1\\,000", 1000),
    ("3.14", Fraction(314, 100)), (".5", Fraction(1, 2)), ("-.5", Fraction(-1, 2)), ("3/4", Fraction(3, 4)),
    ("-3/4", Fraction(-3, 4)), ("1 1/2", Fraction(3, 2)), ("½", Fraction(1, 2)), ("-½", Fraction(-1, 2)),
    ("1½", Fraction(3, 2)),
    ("1e5", 100000), ("1.5E-3", Fraction(3, 2000)), ("3 \\times 10^{4}", 30000), ("3×10⁴", 30000), ("3 x 10^4", 30000),
    ("10^{6}", 1000000), ("\\frac{3}{4}", Fraction(3, 4)), ("-\\frac{3}{4}", Fraction(-3, 4)),
    ("\\dfrac12", Fraction(1, 2)),
    ("1\\frac{1}{2}", Fraction(3, 2)), ("$5", 5), ("$1,234.50", Fraction(2469, 2)), ("-$5", -5), ("$-5", -5),
    ("\\$5", 5), ("US$5", 5),
    ("5€", 5), ("USD 5", 5), ("$42$", 42), ("٤٢", 42), ("４２", 42), ("－４２", -42), ("90°", 90), ("90^\\circ", 90),
    ("\\boxed{42}", 42),
]  # fmt: skip
NOT_WHOLE = [
    "", "forty-two", "12,34", "1,234,56", "1.2.3", "12:00", "3/0", "1/2/3", "--5", "..5", "1e999999999", "9^{9^9}",
    "2^10",
    "x^2", "2\\pi", "\\sqrt{2}", "0x10", "5km", "10-5", "x = 3", "7 or 8", "7, 8", "the answer is 7", "7!?", "inf",
    "nan", "1" * 5000,
    "- 42", "__import__('os')", "42\n43", "1e5e5", "five", "½½",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), WHOLE)
def test_a_whole_response_that_is_a_number_is_read_exactly(text, value):
    number = whole_number(text)
    assert number is not None and number.value == value and not number.percent


@pytest.mark.parametrize("text", NOT_WHOLE)
def test_a_response_that_is_not_exactly_one_number_is_no_number(text):
    assert whole_number(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 apples and 7 pears", 7),
        ("The answer is 42.", 42),
        ("Therefore the answer is +7", 7),
        ("Therefore the answer is -3", -3),
        ("10 - 5", 5),
        ("10-5 is 5", 5),
        ("x = -3", -3),
        ("x=-3", -3),
        ("it is −3", -3),
        ("- 42", 42),
        ("- one\n- 42", 42),
        ("(-3)", -3),
        ("1, 2, 3", 3),
        ("1,2,3", 3),
        ("total: $1,234.50!", Fraction(2469, 2)),
        ("so 3/4 of it", Fraction(3, 4)),
        ("2 + 3 = 5", 5),
        (r"$2 + 3 = \boxed{5}$", 5),
        ("5 km", 5),
        ("5km", 5),
        ("2^3 = 8", 8),
        ("H2O weighs 18", 18),
        ("18 for H2O", 18),
        ("42 (see step_2)", 42),
        ("version 1.2.3", None),
        ("at 12:00", None),
        ("12, or 3/0", None),
        (r"4 times \sqrt{2}", None),
        (r"the area is 4\pi", None),
        ("it is x^2", None),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_last_number_in_a_response(text, value):
    number = last_number(text)
    assert (None if number is None else number.value) == value


@pytest.mark.parametrize(
    ("gold", "response", "params", "score"),
    [
        ("-3", "Therefore the answer is 3", {}, 0.0),
        ("+7", "Therefore the answer is +7", {}, 1.0),
        ("42", "42", {"mode": "whole"}, 1.0),
        ("42", "The answer is 42", {"mode": "whole"}, 0.0),
        ("42", "42 42", {"mode": "whole"}, 0.0),
        (42, "42", {"mode": "whole"}, 1.0),
        (0.1, "1/10", {"mode": "whole"}, 1.0),
        ("0.1", "0.1000", {"mode": "whole"}, 1.0),
        ("0.3", "0.30000000000000004", {"mode": "whole"}, 0.0),
        ("1/3", "0.3333333333333333", {"mode": "whole"}, 0.0),
        ("1/3", "0.3333", {"mode": "whole", "rel_tol": 1e-3}, 1.0),
        ("1/3", "0.34", {"mode": "whole", "rel_tol": 1e-3}, 0.0),
        ("0", "0.0001", {"mode": "whole", "abs_tol": 1e-3}, 1.0),
        ("0", "0.0001", {"mode": "whole", "rel_tol": 1e-3}, 0.0),
        ("1e-20", "1e-21", {"mode": "whole"}, 0.0),
        ("10000000000000000000001", "10000000000000000000000", {"mode": "whole"}, 0.0),
        ("50", "50%", {}, 1.0),
        ("0.5", r"50\%", {}, 1.0),
        ("50%", "50", {}, 1.0),
        ("50%", "0.5", {}, 1.0),
        ("50%", "50 percent", {}, 1.0),
        ("0.5", "50", {}, 0.0),
        ("50%", "0.5%", {}, 0.0),
        ("42", "Answer: 42 apples", {"mode": "tagged"}, 1.0),
        ("42", "<answer>42</answer>", {"mode": "tagged"}, 1.0),
        ("42", "<answer>40 + 2 = 42</answer>", {"mode": "tagged"}, 1.0),
        ("42", "Answer: 41 or 42", {"mode": "tagged"}, 0.0),
        ("42", "42", {"mode": "tagged"}, 0.0),
        ("42", "<answer>42", {"mode": "tagged"}, 0.0),
        ("42", r"\boxed{42}", {"mode": "boxed"}, 1.0),
        ("42", r"\boxed{41}, \boxed{42}", {"mode": "boxed"}, 1.0),
        ("42", "I mention 42 somewhere without a box", {"mode": "boxed"}, 0.0),
        ("42", r"\boxed{42} \boxed{", {"mode": "boxed"}, 0.0),
        ("1234567", "1.234.567", {"mode": "whole"}, 1.0),
        ("1234.56", "1.234,56", {"mode": "whole"}, 1.0),
        ("56", "1.234,56", {}, 0.0),
        ("-42", "minus 42", {}, 1.0),
        ("42", "minus 42", {}, 0.0),
        ("42", "negative 42", {}, 0.0),
        ("42", "50 minus 8 is 42", {}, 1.0),
        ("7", "\u200e7", {"mode": "whole"}, 1.0),
        ("0.25", "0.25%", {"mode": "whole"}, 0.0),
        ("5", "5 million", {}, 0.0),
        ("5", "5k", {}, 0.0),
        ("7", "7x", {}, 0.0),
        ("7", "It is not 7", {}, 0.0),
        ("2", "--2", {}, 0.0),
        ("7", "<answer>not 7</answer>", {"mode": "tagged"}, 0.0),
        ("7", "<answer>more than 7</answer>", {"mode": "tagged"}, 0.0),
        ("7", r"\boxed{x \ne 7}", {"mode": "boxed"}, 0.0),
        (["42", "43"], "43", {}, 1.0),
        (["42", "43"], "44", {}, 0.0),
    ],
)
def test_scores(gold, response, params, score):
    assert Numeric(**params)(task(gold), response) == score


@pytest.mark.parametrize("gold", ["forty", "", "1.2.3", None, True, [], {"a": 1}])
def test_a_gold_answer_that_is_no_number_cannot_be_judged(gold):
    with pytest.raises((ValueError, TypeError), match="expected"):
        Numeric()(task(gold), "42")


@pytest.mark.parametrize("params", [{"mode": "first"}, {"rel_tol": -1}, {"abs_tol": float("nan")}])
def test_wrong_parameters_are_refused(params):
    with pytest.raises(ValueError, match="expected"):
        Numeric(**params)


@given(st.integers(-(10**30), 10**30))
def test_an_integer_in_its_spellings_equals_itself(value):
    for spelling in (
        str(value),
        f"{value:,}",
        f"{value:+}",
        str(value).replace("-", "−"),
        f"{value}.0",
        f"${value}$",
    ):
        assert Numeric(mode="whole")(task(value), spelling) == 1.0
        assert Numeric()(task(value), f"it is {spelling}") == 1.0
        assert Numeric(mode="whole")(task(value + 1), spelling) == 0.0


@given(st.fractions(max_denominator=10**6))
def test_a_fraction_equals_itself_and_not_its_opposite(value):
    verifier = Numeric(mode="whole")
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    gold = task(f"{sign}{top}/{bottom}")
    assert verifier(gold, f"{sign}{top}/{bottom}") == 1.0
    assert verifier(gold, rf"{sign}\frac{{{top}}}{{{bottom}}}") == 1.0
    assert verifier(gold, f"{'' if sign else '-'}{top}/{bottom}") == float(value == 0)


@given(st.text(max_size=60), st.sampled_from(["whole", "last", "tagged", "boxed"]))
def test_any_text_gets_a_float(text, mode):
    score = Numeric(mode=mode)(task("42"), text)
    assert type(score) is float and score in (0.0, 1.0)


@pytest.mark.parametrize(
    "text",
    ["1" * 100_000, "1," * 50_000, "1." * 50_000, "1/" * 50_000, "1 " * 50_000, "-" * 100_000, "1e" * 50_000,
     "1e999999",
     "$" * 100_000, "10^" * 30_000, "\\frac{1}" * 10_000, "\\text{" * 10_000, " " * 100_000, "1" + " " * 100_000,
     "(" * 100_000,
     "½" * 50_000, "1:" * 50_000, "\\frac" * 20_000, "1x10" * 20_000],
)  # fmt: skip
def test_adversarial_text_is_read_in_bounded_time(text):
    start = time.process_time()
    for mode in ("whole", "last"):
        Numeric(mode=mode)(task("42"), text)
    assert time.process_time() - start < 3
