"""Compiles for devices which the planning process does not have: ``python -m rlvr_jax.planning.worker``.

A pickled ``Request`` comes on stdin; a pickled ``Measured``, or the message of what the trainer would refuse, goes to
stdout; progress, marked with ``> ``, to stderr.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import jax
from jax.experimental import topologies
from ml_collections import ConfigDict

from rlvr_jax.errors import ConfigError
from rlvr_jax.planning.measure import measure
from rlvr_jax.planning.targets import Request


def _devices(request: Request) -> Any:
    if request.topology is None:
        return jax.devices()
    one = {"chips_per_host_bounds": (1, 1, 1)} if request.num_devices == 1 else {}
    name = request.topology
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **one).devices


def main() -> None:
    answer_to = os.dup(1)
    os.dup2(2, 1)  # libraries that print must not end up in the answer
    request: Request = pickle.load(sys.stdin.buffer)
    config = ConfigDict(request.config)
    try:
        answer: Any = measure(
            config,
            request.model,
            _devices(request),
            prompt_tokens=request.prompt_tokens,
            stop_token_ids=request.stop_token_ids,
            on_cpu=False,
            shallow_decode=request.shallow_decode,
            say=lambda text: print(f"> {text}", file=sys.stderr, flush=True),
            only=request.only,
        )
    except (ConfigError, ValueError, NotImplementedError) as error:
        answer = str(error)
    with os.fdopen(answer_to, "wb") as file:
        pickle.dump(answer, file)


if __name__ == "__main__":
    main()
