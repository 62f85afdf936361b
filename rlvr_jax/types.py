"""The nouns of the stack: what flows from a task to an update.

Host side (ragged, NumPy): ``Message``, ``Task``, ``SamplingParams``, ``Completion``, ``Reward``, ``Trajectory``,
``Group``.
Device side (fixed shapes, JAX): ``TrainBatch``, ``TrainState``. ``data.packing.pack_groups`` is the only crossing.
Protocols name what the parts expect of one another; nothing here has behaviour worth testing on its own.

Letters: ``B`` rows, ``T`` time, ``P`` prompts, ``G`` samples per prompt.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

StopReason = Literal["stop", "length", "abort", "error"]
RewardStatus = Literal["ok", "failed", "timeout"]
JSON = Any  # str | int | float | bool | None | list[JSON] | dict[str, JSON]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation: ``role`` is system, user, assistant or tool."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem whose answer can be checked. Plain JSON, no behaviour.

    Attributes:
      id: unique within the domain and stable across runs; (domain, id) is the task's key.
      domain: the registered domain that made the task and scores its responses.
      prompt: the conversation up to the point where the policy answers.
      answer: the gold answer, in whatever form the domain's verifier takes.
      metadata: JSON values: ``level`` (difficulty, from 0), ``source``, ``licence`` and what a verifier needs.
    """

    id: str
    domain: str
    prompt: tuple[Message, ...]
    answer: JSON
    metadata: Mapping[str, JSON] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return (self.domain, self.id)

    @property
    def level(self) -> int:
        return int(self.metadata.get("level", 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. ``top_k=0``, ``top_p=1`` and ``min_p=0`` are off; ``temperature=0`` is greedy.

    ``stop`` are strings that end a response (the text keeps them); ``stop_token_ids`` are ids that end it
    (the id is kept: it was sampled, so it is trained on).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        checks = {
            "temperature": (
                self.temperature >= 0 and math.isfinite(self.temperature),
                "a finite number >= 0",
            ),
            "top_k": (self.top_k >= 0, "an integer >= 0 (0 is off)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 is off)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 is off)"),
            "max_tokens": (self.max_tokens >= 1, "an integer >= 1"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ValueError(
                    f"SamplingParams.{name} is {getattr(self, name)!r}; expected {expected}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled response.

    Attributes:
      tokens: int32[T], the sampled ids, the stop id included.
      logprobs: float32[T], nats, under the distribution that was sampled from.
      stop_reason: ``stop`` (a stop id or string), ``length`` (ran out of tokens), ``abort`` or ``error``.
      policy_version: the weights that sampled it.
      experts: int16[S + T, L, k], of a mixture of experts whose routing is recorded: the experts that each layer sent
        the tokens of prompt and response to, -1 for those that never went through the model (the last sampled one).
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    stop_reason: StopReason
    policy_version: int
    experts: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reward:
    """One verdict. Right, wrong and could-not-judge are three things: only ``status="ok"`` values count."""

    name: str
    value: float
    weight: float = 1.0
    status: RewardStatus = "ok"
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode, token for token as the model saw it.

    Attributes:
      tokens: int32[T], prompt, responses and observations, in order.
      response_mask: bool[T], true where the policy sampled the token.
      logprobs: float32[T], nats, of sampled tokens under the behaviour policy; 0 elsewhere.
      turn_starts: index of the first sampled token of each turn.
      rewards: the verdicts, one a verifier.
      stop_reason: of the last turn.
      policy_version: (lowest, highest) version of the weights that sampled its tokens.
      sample_index: which of the group's samples this is.
      text: the response as text (of all turns, joined), as the verifiers saw it.
      error: what the outside world did wrong, or None.
      experts: int16[T, L, k], as of ``Completion``; for the update alone, a store does not keep it.
    """

    tokens: np.ndarray
    response_mask: np.ndarray
    logprobs: np.ndarray
    turn_starts: tuple[int, ...]
    rewards: tuple[Reward, ...]
    stop_reason: StopReason
    policy_version: tuple[int, int]
    sample_index: int = 0
    text: str = ""
    error: str | None = None
    experts: np.ndarray | None = None

    @property
    def scored(self) -> bool:
        """Whether every verifier gave a verdict; an unscored trajectory is counted, and not trained on."""
        return (
            self.error is None
            and bool(self.rewards)
            and all(r.status == "ok" for r in self.rewards)
        )

    @property
    def score(self) -> float:
        """Weighted sum of the verdicts; NaN when one is missing (never 0: that would be a wrong answer)."""
        return float(sum(r.weight * r.value for r in self.rewards)) if self.scored else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """A task and its G trajectories: the unit of advantages, of storage and of resume. Never split or merged."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    step: int

    @property
    def key(self) -> tuple[str, str]:
        return self.task.key

    @property
    def scores(self) -> np.ndarray:
        """float64[G], NaN where a trajectory could not be scored."""
        return np.array([t.score for t in self.trajectories], np.float64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What one update sees. Entry ``t`` of masks, advantages and logprobs is about token ``t`` as the target.

    A row holds one or more token trees: a prompt once, then its responses, each attending to the prompt and to
    itself. A plain sequence is a tree with one branch. The shift from a token to its prediction is ``parents``.

    Attributes:
      tokens: int32[B, T].
      positions: int32[B, T], distance from the start of the token's own sequence (prompt included).
      segment_ids: int32[B, T], which span of the row the token is in, from 1; 0 is padding.
      prefix_ids: int32[B, T], the segment this token's segment continues (its prompt); 0 for none.
      parents: int32[B, T], column of the token before this one in its own sequence, -1 if it has none: the
        hidden state there predicts this token.
      sample_ids: int32[B, T], index of the token's trajectory in the batch, -1 for prompts and padding.
      loss_mask: float32[B, T], 1 where the token is trained on.
      advantages, behavior_logprobs, ref_logprobs: float32[B, T]; 0 where loss_mask is 0.
      experts: int16[B, T, L, k], the experts that each layer sent the token to while sampling, -1 where that is not
        known; None when nothing is replayed.
    """

    tokens: jax.Array
    positions: jax.Array
    segment_ids: jax.Array
    prefix_ids: jax.Array
    parents: jax.Array
    sample_ids: jax.Array
    loss_mask: jax.Array
    advantages: jax.Array
    behavior_logprobs: jax.Array
    ref_logprobs: jax.Array
    experts: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything an update changes. ``step`` counts updates and is the policy version.

    Attributes:
      step: int32[].
      params: nested dict of float arrays.
      opt_state: optax state of the same layout.
      key: PRNG key data, uint32[2].
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


@runtime_checkable
class Sampler(Protocol):
    """Whatever turns token ids into sampled continuations: the engine, a remote server, a scripted fake."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        params: SamplingParams,
        num_samples: int,
        request_ids: Sequence[int],
    ) -> list[list[Completion]]:
        """Draws ``num_samples`` completions for each prompt.

        Args:
          prompts: P lists of token ids.
          params: how to draw; ``params.seed`` is the root of every key.
          num_samples: G.
          request_ids: P integers in [0, 2**32); sample g of request r uses the key
            ``fold_in(fold_in(fold_in(key(seed), r), g), position)``, whatever it is batched with.

        Returns:
          P lists of G completions.
        """
        ...


@runtime_checkable
class Verifier(Protocol):
    """Judges one response. Pure, picklable, no I/O beyond what it declares; run in a worker with a deadline."""

    name: str

    def __call__(self, task: Task, response: str) -> float:
        """Returns the score, 0 to 1 unless the verifier says otherwise. Raising means *could not judge*."""
        ...


@runtime_checkable
class TrajectoryStore(Protocol):
    """Append-only storage of groups."""

    def append(self, groups: Sequence[Group]) -> None: ...

    def read(self) -> list[Group]: ...
