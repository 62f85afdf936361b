"""From ``--config configs/x.py --config.key=value --workdir DIR`` to a locked config and a folder.

Overrides go through ml_collections' ``config_flags`` (types are those of the config's own values); what is added here:
an unknown key names the nearest and the known ones, lists can be written ``a,b,c``, and nothing is global, so a
process may parse as many command lines as it likes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_flags import tuple_parser

from rlvr_jax.cli.compilation_cache import VARIABLE, keep_compiled
from rlvr_jax.cli.imports import add_import_flag, import_modules
from rlvr_jax.errors import ConfigError

_OVERRIDE = re.compile(r"--?(no)?config\.(?P<key>[^=]+)")


class ConfigFlags(NamedTuple):
    """A parsed command line.

    Attributes:
      config: locked, overrides applied.
      workdir: the run's folder (not created yet).
      args: the other flags: ``fresh``, ``seed`` and whatever the command added to its parser.
    """

    config: ConfigDict
    workdir: pathlib.Path
    args: argparse.Namespace


def _literal(text: str) -> Any:
    """The Python literal written in ``text`` (or true/false/none in lower case), else the text itself."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def _items(text: str) -> list[Any]:
    """The elements written in ``text``: ``[1, 2]``, ``(1, 2)``, ``1,2`` or ``a,b``."""
    value = _literal(text)
    if isinstance(value, list | tuple):
        return list(value)
    return [_literal(part.strip()) for part in text.split(",") if part.strip()]


class _ListParser(flags.ArgumentParser):
    def parse(self, argument: str | list[Any]) -> list[Any]:
        return _items(argument) if isinstance(argument, str) else list(argument)


class _TupleParser(tuple_parser.TupleParser):
    def parse(self, argument: Any) -> tuple[Any, ...]:
        return tuple(_items(argument)) if isinstance(argument, str) else super().parse(argument)


class _AnyParser(flags.ArgumentParser):
    def parse(self, argument: Any) -> Any:
        return _literal(argument) if isinstance(argument, str) else argument


config_flags.register_flag_parser_for_type(list, _ListParser())
config_flags.register_flag_parser_for_type(tuple, _TupleParser())
config_flags.register_flag_parser_for_type(type(None), _AnyParser())


def load_config(spec: str) -> ConfigDict:
    """Runs ``get_config(arg)`` of a config file and locks the result.

    Args:
      spec: ``path.py`` or ``path.py:arg``.

    Raises:
      ConfigError: the file is missing (names the configs beside it), or gives no ConfigDict.
    """
    name, separator, argument = spec.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        known = sorted(str(p) for p in path.parent.glob("*.py") if p.name != "__init__.py")
        found = f"; there are: {', '.join(known)}" if known else ""
        raise ConfigError(f"config file {name!r} does not exist{found}")
    module_spec = importlib.util.spec_from_file_location(f"rlvr_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(
            f"config file {name!r} is not Python; expected a .py file with get_config(arg)"
        )
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ConfigError(
            f"config file {name!r} has no get_config(arg); expected one returning a ConfigDict"
        )
    if separator and not inspect.signature(get_config).parameters:
        raise ConfigError(
            f"get_config of {name!r} takes no argument, got {argument!r}; use --config {name}"
        )
    config = get_config(argument) if separator else get_config()
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"get_config of {name!r} returned {type(config).__name__}; expected a ConfigDict"
        )
    return config.lock()


def config_keys(config: ConfigDict, prefix: str = "") -> Iterator[str]:
    """The dotted names of all values, groups themselves left out."""
    for key, value in config.items():
        if isinstance(value, ConfigDict):
            yield from config_keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_key(config: ConfigDict, key: str, spec: str) -> None:
    """Raises ConfigError unless ``key`` names one value of ``config``."""
    known = list(config_keys(config))
    if key in known:
        return
    in_group = [name for name in known if name.startswith(f"{key}.")]
    if in_group:
        raise ConfigError(
            f"--config.{key} is a group of settings; set one of them, as in --config.{in_group[0]}=VALUE. "
            f"Known: {', '.join(in_group)}"
        )
    group, _, leaf = key.rpartition(".")
    siblings = [name for name in known if name.rpartition(".")[0] == group]
    near = (
        [name for name in known if name.rpartition(".")[2] == leaf]
        or difflib.get_close_matches(key, siblings, n=1)
        or difflib.get_close_matches(key, known, n=1)
    )
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise ConfigError(
        f"unknown config key {key!r} in {spec}{hint} Known: {', '.join(siblings or known)}"
    )


def apply_overrides(
    config: ConfigDict, overrides: Sequence[str], *, source: str = "the config"
) -> ConfigDict:
    """Sets values from ``--config.key=value`` arguments, in place, and returns the locked config.

    Args:
      config: as from ``load_config``.
      overrides: command line arguments, all of them overrides.
      source: where the config came from, for messages.

    Raises:
      ConfigError: an unknown key or flag, a value of the wrong type, a stray argument.
    """
    for argument in overrides:
        match = _OVERRIDE.match(argument)
        if match:
            _check_key(config, match["key"], source)
    argv = ["rlvr", *overrides]
    values = flags.FlagValues()
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        stray = values(argv)[1:]
    except (flags.Error, TypeError, ValueError) as error:
        raise ConfigError(f"{error} (in {source})") from error
    if stray:
        raise ConfigError(
            f"unexpected argument {stray[0]!r}; expected flags such as --config.key=value"
        )
    return config.lock()


def config_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The flags every training command has; a command may add its own before ``parse_config_flags``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        epilog="Any setting can be overridden: --config.optimizer.learning_rate=2e-6 --config.domains=a,b",
    )
    parser.add_argument("--config", required=True, metavar="FILE.py[:ARG]", help="config file")
    parser.add_argument(
        "--workdir", required=True, type=pathlib.Path, metavar="DIR", help="the run's folder"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="start over instead of resuming what is in DIR"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="same as --config.seed=N")
    parser.add_argument(
        "--compilation-cache",
        metavar="DIR",
        help="where compiled programs are kept for the next run, or 'off' "
        f"(default: ${VARIABLE}, else ~/.cache/rlvr_jax/xla)",
    )
    add_import_flag(parser)
    return parser


def parse_config_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> ConfigFlags:
    """Parses a training command's arguments, imports the modules they name, and turns the compilation cache on.

    Args:
      argv: the arguments after the command's name.
      parser: from ``config_parser``.

    Raises:
      ConfigError: as ``import_modules``, ``load_config`` and ``apply_overrides``.
      SystemExit: ``--help``, or a missing or malformed flag of the parser's own.
    """
    args, overrides = parser.parse_known_args(list(argv))
    if args.seed is not None:
        overrides.append(f"--config.seed={args.seed}")
    keep_compiled(args.compilation_cache)
    import_modules(args.imports)
    config = apply_overrides(load_config(args.config), overrides, source=args.config)
    return ConfigFlags(config, args.workdir, args)
