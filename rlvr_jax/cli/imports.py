"""``--import MODULE``: domains and verifiers of the user's own, the same flag for every command that may meet them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from rlvr_jax.errors import ConfigError


def add_import_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--import``; the names are in ``args.imports``, for ``import_modules``."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import a module that registers domains or verifiers of your own, from the current folder too; may be "
        "repeated",
    )


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that register things; the current folder counts as a place to find them.

    Raises:
      ConfigError: there is no such module.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"--import {name}: {error}; expected a module on PYTHONPATH or in the current folder"
            ) from error
