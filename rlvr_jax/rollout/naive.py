"""The slow reference generator: no cache, no batch, the whole sequence through the whole model for every token.

It shares with the engine only what defines a sample (the decoder, ``transform_logits``, ``draw``, the keys), so
whatever the engine does to be fast has to give the same tokens. For tests and for debugging.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import STRICT, Params, attend_rows, bind
from rlvr_jax.models.policy_head import LogitTransform, transform_logits
from rlvr_jax.rollout.sampling import draw, sample_keys, uniforms
from rlvr_jax.types import Completion, SamplingParams


class NaiveSampler:
    """A ``Sampler`` to compare with; arguments as those of ``Engine``, minus what makes it fast."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        dtype: Any = jnp.float32,
        decode: Callable[[Sequence[int]], str] | None = None,
        policy_version: int = 0,
    ) -> None:
        self._params, self._decode, self._policy_version = params, decode, policy_version
        self._next_token = jax.jit(
            functools.partial(_next_token, config=config, dtype=jnp.dtype(dtype)),
            static_argnames="transform",
            compiler_options=STRICT,
        )

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``Sampler.sample``."""
        keys = sample_keys(params.seed, jnp.asarray(request_ids, jnp.uint32), num_samples)
        keys = keys.reshape(len(prompts), num_samples)
        return [
            [self._one(list(prompt), keys[row, sample], params) for sample in range(num_samples)]
            for row, prompt in enumerate(prompts)
        ]

    def _one(self, prompt: list[int], key: jax.Array, params: SamplingParams) -> Completion:
        tokens: list[int] = []
        logprobs: list[float] = []
        stopped = False
        while not stopped and len(tokens) < params.max_tokens:
            length = len(prompt) + len(tokens)
            padded = np.zeros(key_bucket(length), np.int32)
            padded[:length] = prompt + tokens
            token, logprob = self._next_token(
                self._params, padded, np.int32(length), key, transform=LogitTransform.of(params)
            )
            tokens.append(int(token))
            logprobs.append(float(logprob))
            text = self._decode(tokens) if params.stop and self._decode else ""
            stopped = tokens[-1] in params.stop_token_ids or any(s in text for s in params.stop)
        return Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(logprobs, np.float32),
            stop_reason="stop" if stopped else "length",
            policy_version=self._policy_version,
        )


def _next_token(
    params: Params,
    tokens: jax.Array,
    length: jax.Array,
    key: jax.Array,
    *,
    config: ModelConfig,
    transform: LogitTransform,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """(token int32[], logprob float32[] in nats) after the first ``length`` of tokens: int32[T]."""
    columns = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    segment_ids = (columns < length).astype(jnp.int32)[None]
    model = bind(config, params)
    attend = attend_rows(segment_ids, jnp.zeros_like(segment_ids), prefix_width=0)
    hidden, _ = model(tokens, columns, attend, dtype=dtype)
    logits = transform_logits(model.logits(hidden[length - 1][None]), transform)
    token, logprob = draw(
        logits, uniforms(key[None], length[None]), greedy=not transform.temperature
    )
    return token[0], logprob[0]
