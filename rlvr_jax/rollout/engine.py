"""The engine: a ``Sampler`` over the policy's own arrays, on the policy's own mesh.

Host side of ``generate``: pads prompts to length buckets, fills the batch to a bucket of rows, and turns arrays into
``Completion`` objects. It keeps no copy of the weights: ``load_params`` takes the trainer's arrays as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlvr_jax.distributed.mesh import num_token_shards
from rlvr_jax.distributed.placement import fetch, put
from rlvr_jax.distributed.sharding import replicated, sampler_sharding
from rlvr_jax.models.attention import key_bucket
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, compiler_options
from rlvr_jax.models.policy_head import LogitTransform
from rlvr_jax.rollout.generate import Rollout, generate
from rlvr_jax.types import Completion, SamplingParams

# Per device: XLA:CPU adds up a float32 dot of few rows in another order than one of more, and the trainer always has
# more (models.attention.key_bucket). Other backends have no such step, and need no padding.
MIN_ROWS_OF_A_CPU = 40


def min_rows(mesh: jax.sharding.Mesh) -> int:
    """Fewest samples a device should decode together, for log-probabilities that are the trainer's bit for bit."""
    return MIN_ROWS_OF_A_CPU if mesh.devices.flat[0].platform == "cpu" else 1


def prompts_per_call(num_samples: int, *, max_rows: int, num_shards: int) -> int:
    """How many prompts' samples are decoded together: at most ``max_rows``, at least one prompt a shard."""
    return max(1, max_rows // num_samples // num_shards) * num_shards


def prompt_bucket(
    num_prompts: int, num_samples: int, *, max_rows: int, num_shards: int, least_rows: int
) -> int:
    """Rows of prompts of a batch, so that few shapes are compiled: a power of two a shard, or a full call.

    Args:
      num_prompts: in the batch; no more than ``prompts_per_call``.
      least_rows: samples that a shard decodes at least (``min_rows``).
    """
    rows = num_shards
    while rows < num_prompts:
        rows *= 2
    rows = min(rows, prompts_per_call(num_samples, max_rows=max_rows, num_shards=num_shards))
    return max(rows, -(-least_rows // num_samples) * num_shards)


class Engine:
    """Samples from the policy.

    Args:
      config: of the decoder.
      params: its parameters, on ``mesh``.
      mesh: rows are spread over all of its axes but ``tensor``.
      dtype: of activations and cache; the trainer's, or log-probabilities differ.
      max_rows: samples decoded together; more prompts than fit are done one batch after another.
      decode: ids to text, needed for stop strings only.
      record_experts: of a mixture of experts, keep where its tokens went in ``Completion.experts``.

    Raises:
      ValueError: ``record_experts`` of a model without experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        mesh: jax.sharding.Mesh,
        dtype: Any = jnp.float32,
        max_rows: int = 256,
        decode: Callable[[Sequence[int]], str] | None = None,
        policy_version: int = 0,
        record_experts: bool = False,
    ) -> None:
        if record_experts and not config.num_experts:
            raise ValueError(
                "record_experts is on and the model has no experts; expected a mixture of experts"
            )
        self.config, self.mesh, self.max_rows = config, mesh, max_rows
        self._decode = decode
        rows: Any = sampler_sharding(mesh)
        self._generate = jax.jit(
            functools.partial(
                generate, config=config, dtype=jnp.dtype(dtype), record_experts=record_experts
            ),
            static_argnames=("num_samples", "max_tokens", "transform", "stop_token_ids"),
            out_shardings=rows,
            compiler_options=compiler_options(mesh),
        )
        self.load_params(params, policy_version=policy_version)

    def load_params(self, params: Params, *, policy_version: int) -> None:
        """Samples from ``params`` from now on. No copy: the arrays must stay alive until the next call."""
        self._params, self.policy_version = params, policy_version

    @property
    def num_compiles(self) -> int:
        """How many shapes were compiled so far."""
        return self._generate._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> list[list[Completion]]:
        """See ``Sampler.sample``.

        Raises:
          ValueError: an empty prompt, a prompt that leaves no room for ``max_tokens`` in the context, a token outside
            the vocabulary, stop strings without ``decode``, a request id of more than 32 bits.
        """
        self._check(prompts, params, num_samples, request_ids)
        per_call = self._prompts_per_call(num_samples)
        pending = [
            self._dispatch(
                prompts[start : start + per_call],
                request_ids[start : start + per_call],
                params,
                num_samples,
            )
            for start in range(0, len(prompts), per_call)
        ]
        found: list[list[Completion]] = []
        for rollout, count in pending:  # the device works on the next one meanwhile
            arrays = fetch(rollout)
            lengths = [len(prompt) for prompt in prompts[len(found) : len(found) + count]]
            found.extend(
                self._completions(arrays, row, length, params) for row, length in enumerate(lengths)
            )
        return found

    def trace(
        self, num_rows: int, width: int, *, params: SamplingParams, num_samples: int
    ) -> jax.stages.Traced:
        """The program that samples from int32[num_rows, width] of prompts; weights may be shapes with shardings."""
        rows = sampler_sharding(self.mesh)

        def of_prompts(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((num_rows, *shape), dtype, sharding=rows)

        seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            return self._generate.trace(
                self._params,
                of_prompts(jnp.int32, width),
                of_prompts(jnp.int32),
                of_prompts(jnp.uint32),
                seed,
                **_static(params, num_samples),
            )

    def _prompts_per_call(self, num_samples: int) -> int:
        return prompts_per_call(
            num_samples, max_rows=self.max_rows, num_shards=num_token_shards(self.mesh)
        )

    def _dispatch(
        self,
        prompts: Sequence[Sequence[int]],
        request_ids: Sequence[int],
        params: SamplingParams,
        num_samples: int,
    ) -> tuple[Rollout, int]:
        """Starts one batch; returns its arrays (still being computed) and how many of its rows are real."""
        rows = prompt_bucket(
            len(prompts),
            num_samples,
            max_rows=self.max_rows,
            num_shards=num_token_shards(self.mesh),
            least_rows=min_rows(self.mesh),
        )
        width = key_bucket(max(map(len, prompts)))
        tokens = np.zeros((rows, width), np.int32)
        lengths = np.zeros((rows,), np.int32)
        ids = np.zeros((rows,), np.uint32)
        for row, (prompt, request_id) in enumerate(zip(prompts, request_ids, strict=True)):
            tokens[row, : len(prompt)] = prompt
            lengths[row], ids[row] = len(prompt), request_id
        sharding = sampler_sharding(self.mesh)
        arguments = put((tokens, lengths, ids), (sharding,) * 3)
        seed = put(np.uint32(params.seed), replicated(self.mesh))
        with jax.set_mesh(self.mesh):
            rollout = self._generate(self._params, *arguments, seed, **_static(params, num_samples))
        return rollout, len(prompts)

    def _completions(
        self, rollout: Rollout, row: int, prompt_length: int, params: SamplingParams
    ) -> list[Completion]:
        completions = []
        for sample, (tokens, logprobs, length, stopped) in enumerate(
            zip(
                rollout.tokens[row],
                rollout.logprobs[row],
                rollout.lengths[row],
                rollout.stopped[row],
                strict=True,
            )
        ):
            end, stopped = int(length), bool(stopped)
            if params.stop:
                cut = self._end_of_stop_string(tokens[:end], params.stop)
                end, stopped = (cut, True) if cut is not None else (end, stopped)
            experts = None
            if rollout.experts is not None and rollout.prompt_experts is not None:
                of_prompt = np.asarray(rollout.prompt_experts[row, :prompt_length])
                experts = np.concatenate([of_prompt, rollout.experts[row, sample, :end]])
            completions.append(
                Completion(
                    tokens=tokens[:end].copy(),
                    logprobs=logprobs[:end].copy(),
                    stop_reason="stop" if stopped else "length",
                    policy_version=self.policy_version,
                    experts=experts,
                )
            )
        return completions

    def _end_of_stop_string(self, tokens: np.ndarray, stop: Sequence[str]) -> int | None:
        """How many tokens it takes until their text holds a stop string; None if it never does."""
        decode = self._decode
        assert decode is not None  # _check saw to it

        def holds(count: int) -> bool:
            text = decode(tokens[:count].tolist())
            return any(string in text for string in stop)

        if not holds(len(tokens)):
            return None
        return next(count for count in range(1, len(tokens) + 1) if holds(count))

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> None:
        if len(prompts) != len(request_ids):
            raise ValueError(
                f"{len(prompts)} prompts but {len(request_ids)} request_ids; give one each"
            )
        if num_samples < 1:
            raise ValueError(f"num_samples is {num_samples}; expected at least 1")
        for request_id in request_ids:
            if not 0 <= request_id < 2**32:
                raise ValueError(
                    f"request id {request_id} is outside [0, 2**32); take a 32-bit hash"
                )
        if params.stop and self._decode is None:
            raise ValueError("stop strings need Engine(decode=...); use stop_token_ids, or pass it")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise ValueError(f"prompt {index} is empty; expected at least one token")
            if len(prompt) + params.max_tokens > self.config.max_length:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens; with max_tokens={params.max_tokens} that is past the "
                    f"model's context of {self.config.max_length}: shorten the prompt or lower max_tokens"
                )
            if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
                raise ValueError(
                    f"prompt {index} has a token outside the vocabulary of {self.config.vocab_size}; "
                    "is the tokenizer that of this model?"
                )


def _static(params: SamplingParams, num_samples: int) -> dict[str, Any]:
    """What ``generate`` is compiled for, beside shapes."""
    return {
        "num_samples": num_samples,
        "max_tokens": params.max_tokens,
        "transform": LogitTransform.of(params),
        "stop_token_ids": tuple(params.stop_token_ids),
    }
