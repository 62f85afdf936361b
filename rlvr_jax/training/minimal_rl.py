"""The whole algorithm on one device, with nothing hidden. Read this before ``rl.py``, which is the same at scale.

    python -m rlvr_jax.training.minimal_rl                         # random weights on bytes: a minute on a CPU
    python -m rlvr_jax.training.minimal_rl --model smollm2-135m-instruct --learning_rate 1e-5 --steps 10

Every step draws sums, samples ``GROUP_SIZE`` answers to each, scores them, and makes the answers that beat their
siblings likelier: not too far from the policy that sampled them (the clip of PPO), nor from the one it all started with
(the KL to the frozen reference).

What it does without: a cache of keys and values, packing, shards, verifiers that may hang, a curriculum, checkpoints.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, attend_rows, bind
from rlvr_jax.training.policy import load_pretrained

NUM_TASKS, GROUP_SIZE, MAX_TOKENS = 8, 8, 8  # P, G and the longest answer
TEMPERATURE = 0.7
CLIP_RATIO, KL_LOSS_COEF = 0.2, 0.02
B1, B2, EPSILON, GRAD_CLIP = 0.9, 0.95, 1e-8, 1.0  # of Adam

# A batch holds B = P * G rows of T tokens: a prompt, its answer, padding. Entry t of every array [B, T] is about token
# t as the target: its log-probability is predicted from the tokens before it.


def score(answer: int, response: str) -> float:
    """The verifier: 1 for the right number alone; up to 0.2 for the share of digits, so that there is a way up."""
    if response.strip() == str(answer):
        return 1.0
    return 0.2 * sum(c in "0123456789" for c in response) / max(len(response), 1)


def hidden_states(
    model: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """float32[B, T, D]; each token sees those before it in its row, whose first ``lengths`` tokens are real."""
    B, T = tokens.shape
    positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), B)
    real = (positions.reshape(B, T) < lengths[:, None]).astype(jnp.int32)
    attend = attend_rows(real, jnp.zeros_like(real), prefix_width=0)
    hidden, _ = bind(model, params)(tokens.reshape(-1), positions, attend)
    return hidden.reshape(B, T, -1)


def log_softmax(model: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """float32[N, V] from float32[N, D], of the distribution that is sampled from. Sampler and trainer share it."""
    return jax.nn.log_softmax(bind(model, params).logits(hidden) / TEMPERATURE)


@functools.partial(jax.jit, static_argnames="model")
def next_token(
    model: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws the token that follows each row's first ``lengths`` tokens: (int32[B], its log-probability float32[B])."""
    rows = jnp.arange(tokens.shape[0])
    last = hidden_states(model, params, tokens, lengths)[rows, lengths - 1]
    logprobs = log_softmax(model, params, last)
    drawn = jax.random.categorical(key, logprobs)
    return drawn, logprobs[rows, drawn]


def sample(
    model: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    stop_ids: Sequence[int],
    key: jax.Array,
) -> dict[str, np.ndarray]:
    """Answers each prompt once.

    Returns:
      ``tokens`` int32[B, T], ``lengths`` int32[B], ``response_mask`` bool[B, T] (what was sampled, the stop id
      included), ``logprobs`` float32[B, T], of what was sampled.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    T = -(-(lengths.max() + MAX_TOKENS) // 32) * 32  # few lengths: each is compiled
    tokens = np.zeros((len(prompts), T), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    response_mask, logprobs = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
    live = np.arange(len(prompts))
    for index in range(MAX_TOKENS):
        drawn = next_token(model, params, tokens, lengths, jax.random.fold_in(key, index))
        drawn_tokens, drawn_logprobs = jax.device_get(drawn)
        at = live, lengths[live]
        tokens[at], logprobs[at], response_mask[at] = drawn_tokens[live], drawn_logprobs[live], True
        lengths[live] += 1
        live = live[~np.isin(drawn_tokens[live], stop_ids)]
    return {
        "tokens": tokens,
        "lengths": lengths,
        "response_mask": response_mask,
        "logprobs": logprobs,
    }


def group_advantages(scores: np.ndarray) -> np.ndarray:
    """float32[P, G] from float[P, G]: how much better than its siblings; 0 where all score the same (GRPO)."""
    centred = scores - scores.mean(1, keepdims=True)
    normalised = centred / (scores.std(1, ddof=1, keepdims=True) + 1e-6)
    return np.where(np.ptp(scores, axis=1, keepdims=True) > 1e-6, normalised, 0).astype(np.float32)


def token_logprobs(
    model: ModelConfig, params: Params, tokens: jax.Array, lengths: jax.Array
) -> jax.Array:
    """float32[B, T]; the first token of a row, which nothing predicts, has 0."""
    hidden = hidden_states(model, params, tokens, lengths)[:, :-1]
    B, T, D = hidden.shape
    logprobs = log_softmax(model, params, hidden.reshape(B * T, D)).reshape(B, T, -1)
    chosen = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(chosen, ((0, 0), (1, 0)))


def objective(
    params: Params, reference: Params, batch: dict[str, jax.Array], model: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """(loss, KL to the reference), both means over all trained tokens of the batch."""
    policy = token_logprobs(model, params, batch["tokens"], batch["lengths"])
    ref = token_logprobs(model, reference, batch["tokens"], batch["lengths"])
    ratio = jnp.exp(policy - batch["logprobs"])
    clipped = jnp.clip(ratio, 1 - CLIP_RATIO, 1 + CLIP_RATIO)
    surrogate = jnp.minimum(batch["advantages"] * ratio, batch["advantages"] * clipped)
    # Schulman's k3; times the ratio, its gradient is that of the KL, whatever policy sampled the tokens.
    kl = jnp.expm1(ref - policy) - (ref - policy)
    losses = -surrogate + KL_LOSS_COEF * ratio * kl

    def mean(x: jax.Array) -> jax.Array:
        trained = batch["loss_mask"]
        return jnp.sum(jnp.where(trained, x, 0.0)) / jnp.maximum(jnp.sum(trained), 1)

    return mean(losses), mean(kl)


gradient = jax.jit(jax.value_and_grad(objective, has_aux=True), static_argnames="model")


@jax.jit
def adam(
    params: Params, m: Params, v: Params, grads: Params, count: Any, rate: Any
) -> tuple[Params, Params, Params]:
    """One step with the gradient clipped to norm ``GRAD_CLIP``; ``count`` is 1 at the first."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, GRAD_CLIP / norm), grads)
    m = jax.tree.map(lambda m, g: B1 * m + (1 - B1) * g, m, grads)
    v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g * g, v, grads)

    def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - B1**count)) / (jnp.sqrt(v / (1 - B2**count)) + EPSILON)

    return jax.tree.map(move, params, m, v), m, v


def train(name_or_path: str, *, num_steps: int, learning_rate: float, seed: int) -> list[float]:
    """Trains, prints a line a step, and returns the mean score of each step."""
    pretrained = load_pretrained(name_or_path)
    model, tokenizer, chat = pretrained.config, pretrained.tokenizer, pretrained.chat
    params = reference = jax.tree.map(jnp.asarray, pretrained.params)
    m = v = jax.tree.map(jnp.zeros_like, params)
    rng, num_updates, means = np.random.default_rng(seed), 0, []
    for step in range(num_steps):
        # Tasks: each is asked in GROUP_SIZE rows.
        sums = rng.integers(0, 10, (NUM_TASKS, 2)).repeat(GROUP_SIZE, axis=0)
        questions = [f"What is {a} + {b}? Answer with the number only." for a, b in sums]
        prompts = [chat.render_ids([{"role": "user", "content": text}]) for text in questions]

        # Answers, scores, advantages.
        key = jax.random.fold_in(jax.random.key(seed), step)
        stop_ids = tokenizer.stop_token_ids
        batch = sample(model, params, prompts, stop_ids, key)
        rows = zip(batch["tokens"], batch["response_mask"], strict=True)
        sampled = [[int(token) for token in row[mask]] for row, mask in rows]
        responses = [tokenizer.decode([t for t in ids if t not in stop_ids]) for ids in sampled]
        scores = np.array([score(a + b, r) for (a, b), r in zip(sums, responses, strict=True)])
        advantages = group_advantages(scores.reshape(NUM_TASKS, GROUP_SIZE))
        means.append(float(scores.mean()))

        # The update, on the tokens sampled in groups that have something to tell.
        has_signal = np.any(advantages != 0, axis=1).repeat(GROUP_SIZE)[:, None]
        batch["loss_mask"] = batch["response_mask"] & has_signal
        batch["advantages"] = np.broadcast_to(advantages.reshape(-1, 1), batch["tokens"].shape)
        kl = np.nan
        if has_signal.any():
            (_, kl), grads = gradient(params, reference, batch, model)
            num_updates += 1
            params, m, v = adam(params, m, v, grads, np.float32(num_updates), learning_rate)
        print(
            f"step {step + 1}/{num_steps}  reward {means[-1]:.3f}  kl {kl:.3f}  "
            f"{sums[0, 0]} + {sums[0, 1]} = {responses[0]!r}"
        )
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Reinforcement learning on sums, in one file.")
    parser.add_argument("--model", default="tiny-random", help="name or folder (load_pretrained)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    train(flags.model, num_steps=flags.steps, learning_rate=flags.learning_rate, seed=flags.seed)
