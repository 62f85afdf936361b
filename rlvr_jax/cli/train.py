"""``rlvr train``: flags to ``training.rl.train``."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr_jax.cli.flags import config_parser, parse_config_flags


def main(argv: Sequence[str]) -> int:
    """Trains; returns 0."""
    parser = config_parser(
        "rlvr train", "Reinforcement learning from verifiable rewards; run it again to resume."
    )
    flags = parse_config_flags(argv, parser)
    # After the flags: --help need not wait for jax.
    from rlvr_jax.distributed.processes import joined
    from rlvr_jax.training.rl import train

    with joined():
        train(flags.config, flags.workdir, fresh=flags.args.fresh)
    return 0
