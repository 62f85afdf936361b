"""Identity and splits: a task's id and its side, train or held out, follow from its content alone.

Nothing is recorded to keep the two apart: whoever draws a problem, from whatever seed, in whatever process, computes
the same side, one problem in ``HELD_OUT_ONE_IN`` being held out. The side depends on what the policy sees and on the
answer, not on the domain: a sum held out of one domain is held out of every domain that asks it in the same words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rlvr_jax.tasks.registry import DOMAINS, Domain
from rlvr_jax.types import JSON, Message, Task

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
HELD_OUT_ONE_IN = 5
# A level with problems on both sides misses the held-out one this often with probability 0.8**200 = 4e-20.
MAX_REDRAWS = 200


def content_hash(*parts: JSON) -> int:
    """A 64-bit hash of JSON values, the same in every process and on every machine (unlike ``hash``).

    Raises:
      TypeError: a part is not JSON.
    """
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _words(prompt: Sequence[Message]) -> list[JSON]:
    return [[message.role, message.content] for message in prompt]


def split_of(task: Task) -> Split:
    """The side the task is on."""
    held_out = content_hash("split", _words(task.prompt), task.answer) % HELD_OUT_ONE_IN == 0
    return "held_out" if held_out else "train"


def task_id(domain: str, prompt: Sequence[Message], answer: JSON) -> str:
    """The id that goes with a task's content: 16 hexadecimal digits."""
    return f"{content_hash('id', domain, _words(prompt), answer):016x}"


def make_task(domain: Domain, level: int, rng: np.random.Generator) -> Task:
    """Draws one problem of the level, on either side.

    Raises:
      ValueError: the domain has no such level.
    """
    domain.check_level(level)
    draft = domain.make(level, rng)
    facts = {"level": level, "source": domain.source, "licence": domain.licence}
    return Task(
        id=task_id(domain.name, draft.prompt, draft.answer),
        domain=domain.name,
        prompt=draft.prompt,
        answer=draft.answer,
        metadata={**draft.metadata, **facts},
    )


def draw(domain: str, level: int, split: Split, seed: int, index: int) -> Task:
    """Draws problem ``index`` of an endless sequence; the same arguments give the same task in every process.

    Different indices may give the same task.

    Args:
      domain: name of a domain.
      level: of difficulty, from 0.
      split: the side to draw from; the generator is asked again until it gives one on it.
      seed: of the sequence.
      index: in the sequence.

    Raises:
      ValueError: no such domain, level or split, or the level's problems are all on the other side.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}")
    drawn_from = DOMAINS.get(domain)
    seen = set()
    for attempt in range(MAX_REDRAWS):
        rng = np.random.default_rng(content_hash("draw", domain, level, seed, index, attempt))
        task = make_task(drawn_from, level, rng)
        if split_of(task) == split:
            return task
        seen.add(task.id)
    raise ValueError(
        f"domain {domain!r}, level {level}: {MAX_REDRAWS} draws gave {len(seen)} distinct tasks and none of "
        f"them is on the {split} side; the level is too small to split, take another"
    )


def held_out_tasks(
    domain: str, num_tasks: int, seed: int, levels: Sequence[int] | None = None
) -> list[Task]:
    """Distinct held-out tasks, spread evenly over the levels (the first ones get one more when they do not divide).

    Args:
      domain: name of a domain.
      num_tasks: how many, at least 1.
      seed: another seed gives another choice.
      levels: all of the domain's when None.

    Raises:
      ValueError: no such domain or level, nothing asked for, or a level with too few distinct held-out tasks.
    """
    if num_tasks < 1:
        raise ValueError(
            f"num_tasks is {num_tasks}; expected at least 1 held-out task of {domain!r}"
        )
    levels = tuple(range(DOMAINS.get(domain).num_levels) if levels is None else levels)
    if not levels:
        raise ValueError(f"levels of {domain!r} is empty; expected at least one level")
    found: dict[str, Task] = {}
    next_index = dict.fromkeys(levels, 0)
    for number in range(num_tasks):
        level = levels[number % len(levels)]
        for index in range(next_index[level], next_index[level] + MAX_REDRAWS):
            task = draw(domain, level, split="held_out", seed=seed, index=index)
            next_index[level] = index + 1
            if task.id not in found:
                found[task.id] = task
                break
        else:
            have = sum(task.level == level for task in found.values())
            raise ValueError(
                f"domain {domain!r}, level {level} has too few distinct held-out tasks: {have} found, and "
                f"{MAX_REDRAWS} more draws brought no new one; ask for fewer than {num_tasks} or for more levels"
            )
    return list(found.values())
