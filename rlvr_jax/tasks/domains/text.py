"""Words and letters: small skills with one right answer, from a word or two up to a short list.

The words are common English nouns and adjectives, so that what gets harder is the skill and not the vocabulary.
Responses are compared as a whole, ignoring punctuation, and case where it is not the skill. Each prompt shows one
answered question, in words that are not among the list's: without it a small model answers in sentences, and nothing it
says is right.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlvr_jax.tasks.domains.arithmetic import LAST_NUMBER, NUMBER_ONLY
from rlvr_jax.tasks.registry import Draft, VerifierUse, ask, domain

_WORDS = """
apple army aunt baby bag ball bank barn basket beach bean bear bed bell bench bird black blue boat body bone book
boot bottle bowl box boy bread brick bridge bright brother brown brush bus butter button cake camera camp candle
candy card carpet carrot castle cat chain chair chalk cheese cherry chicken child church circle city class clean
clock cloud coat coffee coin cold color cook copper corn cotton cow cream crown cup dance dark deep desk dinner
dirt doctor dog doll door dream dress drum dry duck dust eagle ear early earth egg empty engine evening eye face
family farm fast father feather fence field finger fire fish flag floor flower food foot forest fork fox friend
frog fruit game garden gate girl glass glove goat gold grape grass gray green hair hall hammer hand happy hat
heart heavy hill home honey horse hot hotel house ice ink iron island jacket jar jelly juice king kitchen kite
knife lake lamp large leaf leg lemon letter light lion lip long lunch magic map market meat metal milk mirror
money moon morning mother mountain mouse mouth music nail neck nest new night noise north nose nurse ocean office
old olive orange oven owl page paint paper park party peach pen pencil pepper piano picture pig pillow pilot pink
pipe pizza plane plant plate pocket pond potato prince purple queen quick quiet rabbit radio rain red rice river
road robot rock roof room rope rose salt sand school sea seed sheep shelf ship shirt shoe shop silver sister sky
small smile snake snow soap sock soft song soup south spider spoon spring square star station stone storm street
strong sugar summer sun sweet table tail tea teacher tent tiger toast tomato tooth tower town toy train tree truck
uncle valley village violin voice wagon wall warm watch water wave west wet wheel white wide wild wind window
winter wolf wood wool yard yellow young zebra
"""
WORDS = tuple(_WORDS.split())
ANSWER_ONLY = "Answer with one word only."
WORDS_ONLY = "Answer with the words only."
SAME_CASE = (VerifierUse(name="exact", params={"ignore_punctuation": True}),)
# Partial credit where an answer is long, and one that is nearly right is on the way.
NEARLY = (
    VerifierUse(name="exact", weight=0.8, params={"ignore_punctuation": True}),
    VerifierUse(name="similarity", weight=0.2, params={"ignore_punctuation": True}),
)
ANY_CASE = (VerifierUse(name="exact", params={"ignore_punctuation": True, "ignore_case": True}),)


def pick(rng: np.random.Generator, count: int) -> list[str]:
    """Different words, in random order."""
    return [WORDS[i] for i in rng.choice(len(WORDS), size=count, replace=False)]


def coin(rng: np.random.Generator) -> bool:
    return bool(rng.integers(2))


@domain(
    "text/first_word",
    description="the first word of a list of two to ten",
    num_levels=4,
    verifiers=ANY_CASE,
    max_response_tokens=12,
)
def first_word(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, (2, 3, 6, 10)[level])
    question = f"What is the first word of: {' '.join(words)}"
    example = ("What is the first word of: tall monkey", "tall")
    prompt = ask(question, system=ANSWER_ONLY, example=example)
    return Draft(prompt=prompt, answer=words[0])


@domain(
    "text/last_word",
    description="the last word of a list of two to ten",
    num_levels=4,
    verifiers=ANY_CASE,
    max_response_tokens=12,
)
def last_word(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, (2, 3, 6, 10)[level])
    question = f"What is the last word of: {' '.join(words)}"
    example = ("What is the last word of: tall monkey", "monkey")
    prompt = ask(question, system=ANSWER_ONLY, example=example)
    return Draft(prompt=prompt, answer=words[-1])


@domain(
    "text/first_letter",
    description="the first letter of a word, then of each of several words",
    num_levels=4,
    verifiers=ANY_CASE,
    max_response_tokens=16,
)
def first_letter(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, level + 1)
    if level == 0:
        prompt = ask(
            f"What is the first letter of: {words[0]}",
            system="Answer with one letter only.",
            example=("What is the first letter of: monkey", "m"),
        )
    else:
        question = f"What is the first letter of each word: {' '.join(words)}"
        prompt = ask(
            question,
            system="Answer with the letters only, spaces between.",
            example=("What is the first letter of each word: tall monkey", "t m"),
        )
    return Draft(prompt=prompt, answer=" ".join(word[0] for word in words))


@domain(
    "text/uppercase",
    description="one to five words in capital letters",
    num_levels=4,
    verifiers=SAME_CASE,
    max_response_tokens=32,
)
def uppercase(level: int, rng: np.random.Generator) -> Draft:
    words = " ".join(pick(rng, (1, 2, 3, 5)[level]))
    example = ("Write in capital letters: tall monkey", "TALL MONKEY")
    prompt = ask(f"Write in capital letters: {words}", system=WORDS_ONLY, example=example)
    return Draft(prompt=prompt, answer=words.upper())


@domain(
    "text/copy",
    description="one to eight words repeated as they are",
    num_levels=4,
    verifiers=NEARLY,
    max_response_tokens=32,
)
def copy(level: int, rng: np.random.Generator) -> Draft:
    words = " ".join(pick(rng, (1, 2, 4, 8)[level]))
    example = ("Repeat: tall monkey", "tall monkey")
    return Draft(prompt=ask(f"Repeat: {words}", system=WORDS_ONLY, example=example), answer=words)


@domain(
    "text/sort_words",
    description="two to six words in alphabetical order",
    num_levels=5,
    verifiers=ANY_CASE,
    max_response_tokens=32,
)
def sort_words(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, level + 2)
    question = f"Sort alphabetically: {' '.join(words)}"
    example = ("Sort alphabetically: tall monkey", "monkey tall")
    prompt = ask(question, system=WORDS_ONLY, example=example)
    return Draft(prompt=prompt, answer=" ".join(sorted(words)))


@domain(
    "text/reverse_words",
    description="two to six words in the opposite order",
    num_levels=5,
    verifiers=ANY_CASE,
    max_response_tokens=32,
)
def reverse_words(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, level + 2)
    question = f"Reverse the order of the words: {' '.join(words)}"
    example = ("Reverse the order of the words: tall monkey", "monkey tall")
    prompt = ask(question, system=WORDS_ONLY, example=example)
    return Draft(prompt=prompt, answer=" ".join(reversed(words)))


@domain(
    "text/odd_one",
    description="the word that differs from the others, in lists of three to nine",
    num_levels=4,
    verifiers=ANY_CASE,
    max_response_tokens=12,
)
def odd_one(level: int, rng: np.random.Generator) -> Draft:
    common, odd = pick(rng, 2)
    words = [common] * (3, 4, 6, 9)[level]
    words[int(rng.integers(len(words)))] = odd
    example = ("Which word differs: tall tall monkey", "monkey")
    question = f"Which word differs: {' '.join(words)}"
    return Draft(prompt=ask(question, system=ANSWER_ONLY, example=example), answer=odd)


@domain(
    "text/count_words",
    description="how many words a list of one to twelve has",
    num_levels=4,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def count_words(level: int, rng: np.random.Generator) -> Draft:
    low, high = ((1, 3), (2, 5), (4, 8), (6, 12))[level]
    words = pick(rng, int(rng.integers(low, high, endpoint=True)))
    question = f"How many words: {' '.join(words)}"
    return Draft(prompt=ask(question, system=NUMBER_ONLY), answer=str(len(words)))


@domain(
    "text/count_letters",
    description="how many letters a word has, then how often one letter occurs in several words",
    num_levels=4,
    verifiers=LAST_NUMBER,
    max_response_tokens=8,
)
def count_letters(level: int, rng: np.random.Generator) -> Draft:
    words = pick(rng, max(level, 1))
    if level == 0:
        question, count = f"How many letters are in: {words[0]}", len(words[0])
    else:
        counts = Counter("".join(words))
        letter = sorted(counts)[int(rng.integers(len(counts)))]
        question, count = (
            f"How many times is the letter {letter} in: {' '.join(words)}",
            counts[letter],
        )
    return Draft(prompt=ask(question, system=NUMBER_ONLY), answer=str(count))


@domain(
    "text/yes_no",
    description="whether a word is in a list, begins with a letter, or comes first in the alphabet",
    num_levels=4,
    verifiers=ANY_CASE,
    max_response_tokens=8,
)
def yes_no(level: int, rng: np.random.Generator) -> Draft:
    yes = coin(rng)
    if level <= 1:
        word, *words = pick(rng, (4, 9)[level])
        if yes:
            words[int(rng.integers(len(words)))] = word
        question = f"Is the word {word} in this list: {' '.join(words)}"
    elif level == 2:
        word = pick(rng, 1)[0]
        others = sorted({w[0] for w in WORDS} - {word[0]})
        letter = word[0] if yes else others[int(rng.integers(len(others)))]
        question = f"Does the word {word} begin with the letter {letter}?"
    else:
        first, second = sorted(pick(rng, 2), reverse=not yes)
        question = f"Does {first} come before {second} in the dictionary?"
    return Draft(
        prompt=ask(question, system="Answer yes or no only."), answer="yes" if yes else "no"
    )
