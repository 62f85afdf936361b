"""``rlvr sft``: supervised fine-tuning on chat data."""

from __future__ import annotations

from collections.abc import Sequence

from rlvr_jax.cli.flags import config_parser, parse_config_flags


def main(argv: Sequence[str]) -> int:
    """Trains, and prints the held-out loss before and after and where the model is."""
    parser = config_parser("rlvr sft", "Supervised fine-tuning on chat data.")
    config, workdir, args = parse_config_flags(argv, parser)
    # Imported once the command line is known to be right: a mistake in it shows at once.
    from rlvr_jax.distributed.processes import is_first, joined
    from rlvr_jax.training.sft import train

    with joined():
        summary = train(config, workdir, fresh=args.fresh)
        if not is_first():
            return 0
    before, after = summary["eval_loss_before"], summary["eval_loss_after"]
    if after is not None:
        print(f"held-out loss {before:.4f} -> {after:.4f} nats a token")
    print(
        f"{summary['steps']} steps in {summary['seconds']:.0f} s; the model is in {workdir / 'model'}"
    )
    return 0
