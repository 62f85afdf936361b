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
    from rlvr_jax.training.rl import train  # after the flags: --help need not wait for jax

    train(flags.config, flags.workdir, fresh=flags.args.fresh)
    return 0
