"""Whole-number arithmetic, from one digit up: the answer is the last number of the response.

A small chat model knows many of the easy answers, and loses them in words or runs out of tokens before it gives one; so
the first thing reinforcement teaches is to come to the point, and the next the sums themselves.
"""

from __future__ import annotations

import numpy as np

from rlvr_jax.tasks.registry import Draft, VerifierUse, ask, domain

NUMBER_ONLY = "Answer with the number only."
LAST_NUMBER = (VerifierUse(name="numeric", params={"mode": "last"}),)


def question(text: str, answer: int) -> Draft:
    return Draft(prompt=ask(text, system=NUMBER_ONLY), answer=str(answer))


def between(rng: np.random.Generator, low: int, high: int) -> int:
    """An integer from low to high, both included."""
    return int(rng.integers(low, high, endpoint=True))


def pair(rng: np.random.Generator, first: int, second: int) -> tuple[int, int]:
    """Two numbers of up to ``first`` and ``second``, in either order."""
    numbers = [between(rng, 0, first), between(rng, 0, second)]
    rng.shuffle(numbers)
    return numbers[0], numbers[1]


@domain(
    "arithmetic/add",
    description="sum of two numbers, from one digit to four",
    num_levels=6,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def add(level: int, rng: np.random.Generator) -> Draft:
    a, b = pair(rng, *((9, 9), (20, 9), (99, 9), (99, 99), (999, 99), (9999, 9999))[level])
    return question(f"What is {a} + {b}?", a + b)


@domain(
    "arithmetic/sub",
    description="difference of two numbers, never below zero, from one digit to four",
    num_levels=6,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def sub(level: int, rng: np.random.Generator) -> Draft:
    difference, b = pair(rng, *((9, 9), (20, 9), (99, 9), (99, 99), (999, 99), (9999, 9999))[level])
    return question(f"What is {difference + b} - {b}?", difference)


@domain(
    "arithmetic/mul",
    description="product of two numbers, from one digit to three by two",
    num_levels=5,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def mul(level: int, rng: np.random.Generator) -> Draft:
    a, b = pair(rng, *((12, 5), (12, 12), (99, 9), (99, 99), (999, 99))[level])
    return question(f"What is {a} * {b}?", a * b)


@domain(
    "arithmetic/div",
    description="exact quotient, from the tables up to three digits by two",
    num_levels=4,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def div(level: int, rng: np.random.Generator) -> Draft:
    quotient_limit, divisor_limit = ((12, 9), (20, 12), (99, 12), (99, 99))[level]
    quotient, divisor = between(rng, 1, quotient_limit), between(rng, 1, divisor_limit)
    return question(f"What is {quotient * divisor} / {divisor}?", quotient)


@domain(
    "arithmetic/compare",
    description="the largest or the smallest of two to five numbers",
    num_levels=5,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def compare(level: int, rng: np.random.Generator) -> Draft:
    count, limit = ((2, 20), (2, 99), (3, 99), (4, 999), (5, 9999))[level]
    numbers = [int(n) for n in rng.choice(limit + 1, size=count, replace=False)]
    word, answer = (("largest", max(numbers)), ("smallest", min(numbers)))[between(rng, 0, 1)]
    return question(f"Which is the {word}: {', '.join(map(str, numbers))}?", answer)


@domain(
    "arithmetic/sequence",
    description="the next number of an arithmetic sequence, rising or falling",
    num_levels=5,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def sequence(level: int, rng: np.random.Generator) -> Draft:
    start_limit, step_limit = ((30, 3), (50, 5), (99, 10), (199, 25), (999, 99))[level]
    step = between(rng, 1, step_limit)
    start = between(rng, 1, start_limit)
    numbers = [start + step * i for i in range(5)]
    # Falling sequences start with the second level.
    if level > 0 and between(rng, 0, 1):
        numbers.reverse()
    return question(f"What comes next: {', '.join(map(str, numbers[:4]))}?", numbers[4])


@domain(
    "arithmetic/mixed",
    description="an expression of two to four terms, with precedence and parentheses at the higher levels",
    num_levels=5,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def mixed(level: int, rng: np.random.Generator) -> Draft:
    a, b, c, d = (between(rng, 1, 9) for _ in range(4))
    sign, other = (("+", "-")[between(rng, 0, 1)] for _ in range(2))
    plus = {"+": 1, "-": -1}
    if level == 0:
        text, answer = f"{a} {sign} {b}", a + plus[sign] * b
    elif level == 1:
        text, answer = f"{a} {sign} {b} {other} {c}", a + plus[sign] * b + plus[other] * c
    elif level == 2:
        text, answer = f"{a} * {b} {sign} {c}", a * b + plus[sign] * c
    elif level == 3:
        text, answer = f"{a} * ({b} {sign} {c})", a * (b + plus[sign] * c)
    else:
        a, d = a + 10, d + 10
        text, answer = f"{a} * {b} {sign} {c} * {d}", a * b + plus[sign] * c * d
    return question(f"What is {text}?", answer)
