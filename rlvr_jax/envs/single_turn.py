"""One question, one answer: from tasks to scored groups.

``run_groups`` renders prompts, samples, decodes and has the verifiers judge; while a part of the tasks is being judged
the next part is sampled. What goes wrong outside (a verifier that raises or hangs) is a status on the trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from rlvr_jax.rewards.pool import Job, VerifierPool
from rlvr_jax.rewards.registry import VerifierSpec
from rlvr_jax.tasks.registry import DOMAINS
from rlvr_jax.tasks.splits import content_hash
from rlvr_jax.text.chat import ChatTemplate
from rlvr_jax.text.tokenizer import Tokenizer
from rlvr_jax.types import Completion, Group, Reward, Sampler, SamplingParams, Task, Trajectory


class Judge(Protocol):
    """Scores (task, response) pairs: one tuple of rewards each, in order."""

    def __call__(self, pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]: ...


def verifier_specs(domain: str) -> tuple[VerifierSpec, ...]:
    """The verifiers of a domain."""
    return tuple(
        VerifierSpec(use.name, use.weight, use.params) for use in DOMAINS.get(domain).verifiers
    )


def check_verifiers(domains: Iterable[str]) -> None:
    """Raises ValueError, TypeError or MissingExtraError if a domain's verifiers cannot run."""
    for domain in domains:
        for spec in verifier_specs(domain):
            spec.serialised()


class DomainJudge:
    """Has each response judged by the verifiers of its task's domain, in the pool's worker processes."""

    def __init__(self, pool: VerifierPool) -> None:
        self._pool = pool
        self._specs: dict[str, tuple[VerifierSpec, ...]] = {}

    def specs(self, domain: str) -> tuple[VerifierSpec, ...]:
        """``verifier_specs``, made once: the pool knows a verifier by its spec."""
        if domain not in self._specs:
            self._specs[domain] = verifier_specs(domain)
        return self._specs[domain]

    def __call__(self, pairs: Sequence[tuple[Task, str]]) -> list[tuple[Reward, ...]]:
        jobs: list[Job] = []
        counts = []
        for task, response in pairs:
            specs = self.specs(task.domain)
            jobs.extend((task, response, spec) for spec in specs)
            counts.append(len(specs))
        rewards = iter(self._pool.score(jobs))
        return [tuple(next(rewards) for _ in range(count)) for count in counts]


def request_id(step: int, task: Task) -> int:
    """32 bits that name the request in every sampling key: the same whatever it is batched with."""
    return content_hash("request", step, task.domain, task.id) % 2**32


def response_text(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> str:
    """The response as text, without the stop token it ended on; ``tokens`` are int[T]."""
    ids = [int(token) for token in tokens]
    if ids and ids[-1] in tokenizer.stop_token_ids:
        ids.pop()
    return tokenizer.decode(ids)


def run_groups(
    tasks: Sequence[Task],
    *,
    sampler: Sampler,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    judge: Judge,
    params: SamplingParams,
    group_size: int,
    step: int,
    tasks_per_call: int | None = None,
) -> list[Group]:
    """Samples ``group_size`` answers to each task and has them judged.

    Args:
      tasks: P of them.
      params: ``stop_token_ids`` of the tokenizer are added.
      step: of training; part of the sampling keys.
      tasks_per_call: tasks sampled together; all by default.

    Returns:
      P groups, in the order of the tasks.
    """
    stops = tuple(sorted({*params.stop_token_ids, *tokenizer.stop_token_ids}))
    params = SamplingParams(**{**vars(params), "stop_token_ids": stops})
    size = tasks_per_call or len(tasks)
    parts = [tasks[start : start + size] for start in range(0, len(tasks), size)]
    with ThreadPoolExecutor(1, thread_name_prefix="judge") as background:
        judged = []
        for part in parts:
            prompts = [chat.render_ids(task.prompt) for task in part]
            completions = sampler.sample(
                prompts,
                params=params,
                num_samples=group_size,
                request_ids=[request_id(step, task) for task in part],
            )
            judged.append(
                background.submit(_groups, part, prompts, completions, tokenizer, judge, step)
            )
        return [group for future in judged for group in future.result()]


def _groups(
    tasks: Sequence[Task],
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Completion]],
    tokenizer: Tokenizer,
    judge: Judge,
    step: int,
) -> list[Group]:
    texts = [[response_text(c.tokens, tokenizer) for c in samples] for samples in completions]
    pairs = [(task, text) for task, group in zip(tasks, texts, strict=True) for text in group]
    verdicts = iter(judge(pairs))
    groups = []
    for task, prompt, samples, group_texts in zip(tasks, prompts, completions, texts, strict=True):
        trajectories = tuple(
            make_trajectory(prompt, sample, rewards=next(verdicts), index=index, text=text)
            for index, (sample, text) in enumerate(zip(samples, group_texts, strict=True))
        )
        groups.append(Group(task=task, trajectories=trajectories, step=step))
    return groups


def make_trajectory(
    prompt: Sequence[int],
    completion: Completion,
    *,
    rewards: tuple[Reward, ...],
    index: int,
    text: str,
) -> Trajectory:
    """A prompt and its completion as one episode."""
    start, length = len(prompt), len(completion.tokens)
    return Trajectory(
        tokens=np.concatenate([np.asarray(prompt, np.int32), completion.tokens]).astype(np.int32),
        response_mask=np.arange(start + length) >= start,
        logprobs=np.concatenate([np.zeros(start, np.float32), completion.logprobs]),
        turn_starts=(start,),
        rewards=rewards,
        stop_reason=completion.stop_reason,
        policy_version=(completion.policy_version, completion.policy_version),
        sample_index=index,
        text=text,
        experts=completion.experts,
    )
