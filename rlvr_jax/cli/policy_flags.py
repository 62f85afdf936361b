"""What ``rlvr eval`` and ``rlvr sample`` share: which weights, and how they are sampled.

A setting comes from its flag, else from the run's ``config.json`` (``--workdir``), else from a default.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlvr_jax.errors import ConfigError

if TYPE_CHECKING:  # imported late: --help need not wait for jax
    from rlvr_jax.training.policy import Policy
    from rlvr_jax.types import SamplingParams

# Flag -> (type, where a run's config has it, default, help).
_SAMPLING: Mapping[str, tuple[Any, str, Any, str]] = {
    "temperature": (float, "rollout.temperature", 0.7, "0 is greedy"),
    "top_k": (int, "rollout.top_k", 0, "sample from the k likeliest tokens only; 0 is off"),
    "top_p": (float, "rollout.top_p", 1.0, "from the likeliest with this much mass; 1 is off"),
    "min_p": (float, "rollout.min_p", 0.0, "from those with this share of the top one's; 0 is off"),
    "max_tokens": (int, "rollout.max_tokens", 128, "longest answer, in tokens"),
    "seed": (int, "seed", 0, "of every draw"),
}


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """``--model --workdir --dtype --mesh --max-rows``."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME|DIR",
        help="smollm2-135m-instruct, tiny-random, a Hugging Face directory, a .gguf file, or a run's folder",
    )
    group.add_argument(
        "--workdir",
        type=pathlib.Path,
        metavar="RUN",
        help="a run's folder: its newest checkpoint, and its settings where no flag says otherwise; with --model, only "
        "the settings (to see how the model it started from does)",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="of activations (the run's, or float32)"
    )
    group.add_argument(
        "--mesh",
        type=_sizes,
        metavar="DATA,FSDP,TENSOR[,EXPERT[,CONTEXT]]",
        help="how devices are arranged, -1 taking the rest (the run's, or -1,1,1)",
    )
    group.add_argument(
        "--max-rows", type=int, metavar="N", help="answers sampled together (the run's, or 256)"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """The fields of ``SamplingParams``."""
    group = parser.add_argument_group("sampling (defaults: the run's with --workdir, else)")
    for name, (kind, _, default, text) in _SAMPLING.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=kind, metavar="X", help=f"{text} ({default:g})")
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end an answer with this text; may be repeated",
    )


class RunConfig:
    """The saved settings of a run, by dotted key; empty when there is none.

    Raises:
      ConfigError: the folder is no run's.
    """

    def __init__(self, workdir: pathlib.Path | None) -> None:
        self._settings: dict[str, Any] = {}
        if workdir is None:
            return
        try:
            self._settings = json.loads((workdir / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--workdir {workdir} is not the folder of a run: its config.json cannot be read "
                f"({type(error).__name__}: {error}); expected what 'rlvr train --workdir' was given"
            ) from error

    def get(self, key: str, default: Any, *, flag: Any = None) -> Any:
        """The flag's value if it was given, else the run's setting, else ``default``."""
        if flag is not None:
            return flag
        value: Any = self._settings
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return default
            value = value[part]
        return value


def sampling_of(args: argparse.Namespace, run: RunConfig) -> SamplingParams:
    """Raises ValueError for a setting out of range."""
    from rlvr_jax.types import SamplingParams

    values = {
        name: run.get(key, default, flag=getattr(args, name))
        for name, (_, key, default, _) in _SAMPLING.items()
    }
    return SamplingParams(**values, stop=tuple(run.get("rollout.stop", (), flag=args.stop)))


def policy_of(args: argparse.Namespace, run: RunConfig) -> Policy:
    """Loads the weights the flags name.

    Raises:
      ConfigError: they name none.
      WeightsError, CheckpointError: see ``load_pretrained``.
    """
    if args.model is None and args.workdir is None:
        raise ConfigError(
            "no model; give --model NAME|DIR, or --workdir RUN for its newest checkpoint"
        )
    from rlvr_jax.distributed.mesh import make_mesh
    from rlvr_jax.training.policy import load_policy

    if args.model is None and not (args.workdir / "checkpoints").is_dir():
        raise ConfigError(
            f"--workdir {args.workdir} has no checkpoints; expected those of 'rlvr train' or 'rlvr sft'"
        )
    return load_policy(
        args.model or args.workdir,
        mesh=make_mesh(**run.get("mesh", {}, flag=args.mesh)),
        dtype=run.get("dtype", "float32", flag=args.dtype),
        max_rows=run.get("rollout.max_rows", 256, flag=args.max_rows),
    )


def _sizes(text: str) -> dict[str, int]:
    """``1,-1,1``, ``1,-1,1,1`` or ``1,-1,1,1,1`` -> sizes of the mesh's axes, in the order of the flag."""
    names = ("data", "fsdp", "tensor", "expert", "context")[: max(3, text.count(",") + 1)]
    try:
        return dict(zip(names, map(int, text.split(",")), strict=True))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not three to five whole numbers, such as 1,-1,1"
        ) from None
