"""A policy: weights on a mesh, with the tokenizer, the chat template and the engine that belong to them.

``load_pretrained`` reads what a model is made of, ``load_policy`` makes it ready to answer:

    policy = load_policy("smollm2-135m-instruct")
    responses = policy.generate(["What is 2 + 3?"], temperature=0.7, num_samples=4)
    responses.texts[0]                                                        # four answers
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlvr_jax.checkpoint.manager import Checkpointer
from rlvr_jax.distributed.mesh import make_mesh
from rlvr_jax.distributed.placement import put
from rlvr_jax.envs.single_turn import response_text
from rlvr_jax.errors import WeightsError
from rlvr_jax.models import peft
from rlvr_jax.models.adapters import adapter_config, checksum, merge_adapters
from rlvr_jax.models.config import ModelConfig
from rlvr_jax.models.decoder import Params, init_params
from rlvr_jax.models.frozen import base_shardings, quantize_base
from rlvr_jax.models.quantized import Quantization
from rlvr_jax.models.weights import open_weights, read_params, resolve_model, save_weights
from rlvr_jax.rollout.engine import Engine
from rlvr_jax.tasks.splits import content_hash
from rlvr_jax.text.byte_level import byte_level_tokenizer
from rlvr_jax.text.chat import ChatTemplate, Conversation
from rlvr_jax.text.tokenizer import Tokenizer, check_vocab, load_tokenizer
from rlvr_jax.training.state import abstract_trained, check_mesh, state_shardings
from rlvr_jax.training.workdir import CONFIG_FILE
from rlvr_jax.types import Completion, Message, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """What a model directory, file or run holds: params of one dtype, NumPy on the host, or on a mesh.

    The layers' kernels are in few bits, if that was asked for.
    ``step`` is the number of updates of the run it was taken from; None for weights that are nobody's run.
    """

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    chat: ChatTemplate
    step: int | None = None


TINY = "tiny-random"


def load_pretrained(
    name_or_path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    quantization: Quantization | None = None,
    param_dtype: str | None = None,
) -> Pretrained:
    """Loads weights, tokenizer and chat template.

    Args:
      name_or_path: ``smollm2-135m-instruct``, a Hugging Face directory (local or a ``gs://`` URL), a GGUF file, the
        workdir of a run (its newest healthy checkpoint), adapters as PEFT saves them (merged into the base that they
        name), or ``tiny-random`` (random weights on bytes, for smoke tests).
      mesh: where the params go; each process reads what its devices hold, and no host holds the model. None for NumPy.
      quantization: how to keep the layers' kernels, as the frozen base of adapters. Those of a run or of adapters are
        merged in float32 before.
      param_dtype: of the params; None for float32, or, of a run, for what it keeps its parameters in.

    Raises:
      WeightsError: nothing there, damaged, or the tokenizer or the adapters are of another model.
      ValueError: the model does not divide over the mesh.
      CheckpointError: a run whose checkpoints are all damaged, or of another model than its config says.
    """
    directory = Path(name_or_path).expanduser()
    merged = None
    if name_or_path == TINY:
        merged = _tiny_random(mesh)
    elif (directory / "checkpoints").is_dir():
        merged = _newest_checkpoint(directory, mesh)
    elif (directory / peft.CONFIG_FILE).is_file():
        merged = _adapted(directory, mesh)
    if merged is not None:
        if quantization is None:
            return _cast(merged, param_dtype)
        if mesh is not None:
            base_shardings(merged.config, mesh, quantization)  # raises where blocks do not divide
        few_bits = quantize_base(_cast(merged, "float32").params, quantization, mesh)
        return dataclasses.replace(merged, params=few_bits)
    path = resolve_model(name_or_path)
    tokenizer = load_tokenizer(path)
    weights = open_weights(path)
    check_vocab(tokenizer, weights.config)
    if mesh is not None:
        check_mesh(weights.config, mesh)
        base_shardings(weights.config, mesh, quantization)  # raises before anything is read
    return Pretrained(
        config=weights.config,
        params=read_params(
            weights, jnp.dtype(param_dtype or "float32"), mesh=mesh, quantization=quantization
        ),
        tokenizer=tokenizer,
        chat=ChatTemplate(tokenizer),
    )


def _cast(pretrained: Pretrained, param_dtype: str | None) -> Pretrained:
    """The same with params of another dtype, where they are."""
    if param_dtype is None:
        return pretrained
    dtype = jnp.dtype(param_dtype)
    params = jax.tree.map(
        lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), pretrained.params
    )
    return dataclasses.replace(pretrained, params=params)


def _adapted(directory: Path, mesh: jax.sharding.Mesh | None) -> Pretrained:
    """A base with the adapters in ``directory`` merged in; in few bits before, if it was when they were trained."""
    name, quantization = peft.base_of(directory)
    try:
        base = load_pretrained(name, mesh=mesh, quantization=quantization)
    except WeightsError as error:
        raise WeightsError(f"{directory} holds adapters of {name!r}: {error}") from error
    adapter, adapters = peft.load_adapters(directory, base.config)
    return dataclasses.replace(base, params=merge_adapters(base.params, adapters, adapter))


def _newest_checkpoint(workdir: Path, mesh: jax.sharding.Mesh | None) -> Pretrained:
    """The weights a run has come to; everything else is that of the model it started from."""
    try:
        settings = json.loads((workdir / CONFIG_FILE).read_text())
        start = settings["model"]
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(
            f"{workdir} has checkpoints but no {CONFIG_FILE} that names their model "
            f"({type(error).__name__}: {error}); expected the workdir of a run"
        ) from error
    param_dtype = settings.get("param_dtype", "float32")
    adapter = adapter_config(**settings["adapter"]) if "adapter" in settings else None
    quantization = None if adapter is None else adapter.quantization
    pretrained = load_pretrained(
        start, mesh=mesh, quantization=quantization, param_dtype=param_dtype
    )
    dtype = jnp.dtype(param_dtype if adapter is None else "float32")
    abstract = abstract_trained(pretrained.config, adapter, dtype)
    if mesh is not None:
        shardings = state_shardings(pretrained.config, optax.set_to_zero(), mesh, adapter).params
        abstract = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            abstract,
            shardings,
        )
    with Checkpointer(workdir / "checkpoints") as checkpointer:
        restored = checkpointer.restore_params(abstract)
    if restored is None:
        raise WeightsError(
            f"the run in {workdir} has no finished checkpoint yet; expected at least one: wait for it "
            f"(config.checkpoint.every says how often), or take {start!r}, which it started from"
        )
    step, params, host = restored
    if mesh is None:
        params = jax.tree.map(np.asarray, params)
    if adapter is not None:
        check_base(checksum(pretrained.params), host["base"], start, workdir)
        params = merge_adapters(pretrained.params, params, adapter)
    return _cast(dataclasses.replace(pretrained, params=params, step=step), param_dtype)


def check_base(got: int | None, expected: int | None, name: str, workdir: Path) -> None:
    """Raises WeightsError when the adapters of a run belong to another base; the checksums of none are None."""
    if got != expected:
        raise WeightsError(
            f"the adapters in {workdir} were trained beside a base with checksum {expected}; got {got}: the weights "
            f"of {name!r} are not what they were. Put them back, or use --fresh to start over"
        )


def _tiny_random(mesh: jax.sharding.Mesh | None) -> Pretrained:
    tokenizer = byte_level_tokenizer()
    config = ModelConfig(
        vocab_size=-(-tokenizer.vocab_size // 64) * 64,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
    )
    params = jax.tree.map(np.asarray, init_params(config, jax.random.key(0)))
    if mesh is not None:
        params = put(params, state_shardings(config, optax.set_to_zero(), mesh).params)
    return Pretrained(
        config=config, params=params, tokenizer=tokenizer, chat=ChatTemplate(tokenizer)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Responses:
    """G answers to each of P prompts, with all that training on them takes.

    Attributes:
      prompts: the conversations that were answered.
      prompt_ids: their token ids.
      completions: P tuples of G: ids, the log-probabilities they were sampled with, why they stopped.
      texts: the answers as text, P tuples of G.
      params: how they were sampled; the objective applies the same temperature and truncation.
      policy_version: of the weights that sampled them.
    """

    prompts: tuple[Conversation, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[Completion, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    params: SamplingParams
    policy_version: int

    @property
    def group_size(self) -> int:
        """G, answers to each prompt."""
        return len(self.texts[0])

    def __len__(self) -> int:
        return len(self.prompts)


class Policy:
    """A model that answers, and that an ``Optimizer`` can train. ``load_policy`` makes it.

    Attributes:
      config: shape of the decoder.
      params: its parameters on ``mesh``, float32 or bfloat16. An update donates them: read them again after it.
      mesh: where they are.
      tokenizer, chat: of the model.
      engine: the ``Sampler`` over ``params``.
      dtype: of activations, for sampling and training: ``float32`` or ``bfloat16``.
      seed: of the samples.
      version: how many updates it has seen, those of the run it was loaded from included.
      frozen: whether updates are refused.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        tokenizer: Tokenizer,
        chat: ChatTemplate,
        mesh: jax.sharding.Mesh,
        dtype: str = "float32",
        max_rows: int = 256,
        seed: int = 0,
        version: int = 0,
        frozen: bool = False,
    ) -> None:
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {dtype!r}; expected float32 or bfloat16")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; expected at least 1 answer sampled together")
        self.config, self.mesh, self.dtype, self.seed = config, mesh, dtype, seed
        self.tokenizer, self.chat = tokenizer, chat
        self.version, self.frozen = version, frozen
        self._shardings = state_shardings(config, optax.set_to_zero(), mesh).params
        self.params = jax.device_put(params, self._shardings)
        self.engine = Engine(
            config,
            self.params,
            mesh=mesh,
            dtype=dtype,
            max_rows=max_rows,
            decode=tokenizer.decode,
            policy_version=version,
        )
        self._num_calls = 0

    def generate(
        self, prompts: Sequence[str | Conversation], *, num_samples: int = 8, **sampling: Any
    ) -> Responses:
        """Answers every prompt ``num_samples`` times.

        Args:
          prompts: conversations up to the policy's turn; a string is a user's message.
          num_samples: G, answers to each.
          **sampling: fields of ``SamplingParams``: temperature, top_k, top_p, min_p, max_tokens, stop, stop_token_ids
            (beside the tokenizer's own), seed. With ``seed`` the same call gives the same answers; without it, each
            call of a policy draws anew, and the same calls in the same order give the same answers.

        Raises:
          ValueError: no prompts, a setting out of range, a prompt that leaves no room for an answer.
        """
        conversations = tuple(
            (Message(role="user", content=prompt),) if isinstance(prompt, str) else tuple(prompt)
            for prompt in prompts
        )
        if not conversations:
            raise ValueError("there are no prompts; expected at least one")
        params = SamplingParams(**{"seed": self.seed, **sampling})
        stops = {*params.stop_token_ids, *self.tokenizer.stop_token_ids}
        params = dataclasses.replace(params, stop_token_ids=tuple(sorted(stops)))
        call = -1
        if "seed" not in sampling:
            call, self._num_calls = self._num_calls, self._num_calls + 1
        prompt_ids = tuple(tuple(self.chat.render_ids(turns)) for turns in conversations)
        completions = self.engine.sample(
            prompt_ids,
            params=params,
            num_samples=num_samples,
            request_ids=[
                content_hash("generate", call, index) % 2**32 for index in range(len(conversations))
            ],
        )
        return Responses(
            prompts=conversations,
            prompt_ids=prompt_ids,
            completions=tuple(map(tuple, completions)),
            texts=tuple(
                tuple(response_text(sample.tokens.tolist(), self.tokenizer) for sample in samples)
                for samples in completions
            ),
            params=params,
            policy_version=self.version,
        )

    def freeze(self) -> Policy:
        """A policy with a copy of the parameters as they are now, which later updates of this one do not touch."""
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=self._shardings)
        return Policy(
            self.config,
            copy(self.params),
            tokenizer=self.tokenizer,
            chat=self.chat,
            mesh=self.mesh,
            dtype=self.dtype,
            max_rows=self.engine.max_rows,
            seed=self.seed,
            version=self.version,
            frozen=True,
        )

    def load_params(self, params: Params) -> None:
        """Takes updated parameters, on the mesh already, as the next version; the engine samples from them.

        Raises:
          ValueError: the policy is frozen.
        """
        if self.frozen:
            raise ValueError(
                "this policy is frozen: its parameters stay as they are; update the policy that freeze() was called on"
            )
        self.params, self.version = params, self.version + 1
        self.engine.load_params(params, policy_version=self.version)

    def save(self, path: str | Path) -> None:
        """Writes a Hugging Face directory, which ``load_policy`` and ``transformers`` read.

        Raises:
          WeightsError: the directory holds something already.
          OSError: it cannot be written; nothing is left behind.
        """
        save_weights(path, self.config, self.params, tokenizer_files=self.tokenizer.files())


def load_policy(
    name_or_path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: str = "float32",
    param_dtype: str | None = None,
    max_rows: int = 256,
    seed: int = 0,
) -> Policy:
    """Loads a model onto a mesh.

    Args:
      name_or_path: as of ``load_pretrained``: a name, a Hugging Face directory, a GGUF file, the workdir of a run.
      mesh: all devices, as replicas, by default.
      dtype: of activations.
      param_dtype: of the parameters; None for float32, or, of a run, for what it keeps its parameters in.
      max_rows: samples decoded together.
      seed: of the samples.

    Raises:
      WeightsError, CheckpointError: see ``load_pretrained``.
      ValueError: the model does not divide over the mesh.
    """
    mesh = make_mesh() if mesh is None else mesh
    pretrained = load_pretrained(name_or_path, mesh=mesh, param_dtype=param_dtype)
    return Policy(
        pretrained.config,
        pretrained.params,
        tokenizer=pretrained.tokenizer,
        chat=pretrained.chat,
        mesh=mesh,
        dtype=dtype,
        max_rows=max_rows,
        seed=seed,
        version=pretrained.step or 0,
    )
