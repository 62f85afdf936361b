"""Runs the peers on the work of a report of ours, one after another, and compares.

``TRL_PYTHON`` and ``TUNIX_PYTHON`` name the interpreters of their environments; each script says what it needs. All
read the same random weights, written once as a Hugging Face directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.work import MODELS, number_tokenizer
from rlvr_jax.errors import ConfigError
from rlvr_jax.models.decoder import init_params
from rlvr_jax.models.weights import save_weights

# The variable that names a peer's Python, and its script: of a whole step, and of an update alone.
PEERS = {
    "trl": ("TRL_PYTHON", "trl_grpo.py"),
    "tunix": ("TUNIX_PYTHON", "tunix_grpo.py"),
}
UPDATE_PEERS = {
    "torch": ("TRL_PYTHON", "torch_update.py"),
    "tunix": ("TUNIX_PYTHON", "tunix_update.py"),
}
# Micro-batches meant to fit into 16 GiB; their sizes were not tuned.
SETTINGS: dict[tuple[str, str], tuple[str, ...]] = {
    ("trl", "smollm2"): ("--micro", "16"),
    ("tunix", "smollm2"): ("--train-micro", "1"),
}
COMPARED = ("step_s", "rollout_s", "ref_s", "update_s", "peak_rss_gib")


def check_peers(names: Sequence[str], known: Mapping[str, tuple[str, str]] = PEERS) -> None:
    """Raises ConfigError for a peer that is unknown, or whose interpreter is not there."""
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown peer {name!r}; expected {', '.join(known)}")
        variable, script = known[name]
        python = os.environ.get(variable, "")
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"{variable} is {python!r}; expected the Python of an environment for {name}: "
                f"benchmarks/peers/{script} says what to install into one"
            )


def peer_command(peer: tuple[str, str], model_dir: Path, sizes: Mapping[str, int]) -> list[str]:
    """The command line of a peer's script."""
    variable, script = peer
    command = [os.environ[variable], str(Path(__file__).parent / script)]
    command += ["--model-dir", str(model_dir)]
    for name, size in sizes.items():
        command += [f"--{name.replace('_', '-')}", str(size)]
    return command


def peer_environment() -> dict[str, str]:
    """Ours without XLA_FLAGS, which holds our own virtual devices: a peer runs as its users run it."""
    return {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}


def run_peers(names: Sequence[str], ours: Mapping[str, Any], *, timeout_s: float) -> list[dict]:
    """Runs each peer on the work of our report; a peer that fails or takes too long says so in ``error``."""
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / ours["model"]
        write_weights(directory, ours["model"], ours["seed"])
        for name in names:
            keys = ("prompts", "group", "prompt_len", "new_tokens", "steps", "warmup", "seed")
            command = peer_command(PEERS[name], directory, {key: ours[key] for key in keys})
            # TRL is faster in bfloat16, as we are, and Tunix in float32.
            command += ["--dtype", ours["dtype"] if name == "trl" else "float32"]
            command += SETTINGS.get((name, ours["model"]), ())
            reports.append({"peer": name, **_run(command, timeout_s)})
    return reports


def _run(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, env=peer_environment(), stdout=subprocess.PIPE, timeout=timeout_s, check=True
        )
        return json.loads(done.stdout.decode().strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {timeout_s:g} s"}
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        return {"error": f"failed ({type(error).__name__}); what it printed is above"}


def write_weights(directory: Path, model: str, seed: int) -> None:
    """The random weights of our own run, and the number tokenizer, for ``transformers``."""
    config = MODELS[model]
    params = jax.device_get(init_params(config, jax.random.key(seed)))
    files = number_tokenizer(config.vocab_size).files()
    del files[
        "generation_config.json"
    ]  # torch refuses a padding id that has no row in the embedding
    save_weights(directory, config, params, tokenizer_files=files)


def format_comparison(ours: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> str:
    """A table: medians of the peers and, in brackets, how many times ours they take."""
    lines = [f"{'':<12}" + "".join(f"{key:>18}" for key in COMPARED)]
    for report in (ours, *reports):
        if "error" in report:
            lines.append(f"{report['peer']:<12}{report['error']}")
            continue
        cells = (
            f"{report[key]:.4g} ({report[key] / ours[key]:.2f}x)" if ours[key] else "-"
            for key in COMPARED
        )
        lines.append(f"{report['peer']:<12}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)
