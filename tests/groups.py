"""Groups of made-up trajectories, for tests that need a batch and no sampler."""

from collections.abc import Sequence

import numpy as np

from rlvr_jax.types import Group, Reward, Task, Trajectory

SHAPES = (
    (5, (4, 7, 1)),
    (9, (3, 3)),
    (2, (6,)),
)  # two groups that fill a row of 32, and one that does not


def random_groups(
    vocab_size: int, shapes: Sequence[tuple[int, Sequence[int]]] = SHAPES, *, seed: int = 0
) -> list[Group]:
    """One group for each (prompt length, response lengths); log-probabilities of samples from the uniform policy."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, (prompt_length, lengths) in enumerate(shapes):
        prompt = rng.integers(0, vocab_size, prompt_length)
        trajectories = []
        for sample, length in enumerate(lengths):
            tokens = np.concatenate([prompt, rng.integers(0, vocab_size, length)])
            mask = np.arange(len(tokens)) >= prompt_length
            trajectories.append(
                Trajectory(
                    tokens=tokens.astype(np.int32),
                    response_mask=mask,
                    logprobs=np.where(mask, -np.log(vocab_size), 0).astype(np.float32),
                    turn_starts=(prompt_length,),
                    rewards=(Reward(name="made up", value=float(rng.integers(0, 2))),),
                    stop_reason="stop",
                    policy_version=(0, 0),
                    sample_index=sample,
                )
            )
        task = Task(id=str(index), domain="test", prompt=(), answer="")
        groups.append(Group(task=task, trajectories=tuple(trajectories), step=0))
    return groups
