"""``rlvr sweep``: a config run over the grid it gives, one run after another, with a table at the end.

Each run is a process of its own, so that one that fails or runs out of memory costs itself only. Started again, the
sweep leaves out the runs that are finished and resumes the one that was cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import pathlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from rlvr_jax.cli.compilation_cache import keep_compiled
from rlvr_jax.cli.flags import apply_overrides, config_parser, load_config
from rlvr_jax.cli.imports import import_modules
from rlvr_jax.errors import ConfigError

EPILOG = """The config file gives the grid in get_sweep(arg=""), beside get_config(arg=""):
  a dict of lists, every combination of which is run:  {"optimizer.learning_rate": [1e-6, 1e-5], "seed": [0, 1]}
  or a list of dicts, one a run:                       [{"seed": 0}, {"seed": 1, "dtype": "bfloat16"}]

examples:
  rlvr sweep --config configs/rl_sweep_example.py --workdir runs/sweep
  rlvr sweep --config configs/rl_sweep_example.py:tiny --workdir runs/sweep --config.num_steps=2 --dry-run

Each run has a folder of its own in DIR, and its output in DIR/NAME.log. Running the command again leaves out finished
runs. The table is also DIR/sweep.json. Exit status 1 when a run failed.
"""
# Overrides that are longer than this as a folder's name are cut and told apart by a hash.
MAX_NAME = 100
STOP_GRACE_S = 20.0


def grid(sweep: Any, source: str) -> list[dict[str, Any]]:
    """The runs that ``get_sweep`` asks for, as overrides.

    Raises:
      ConfigError: it is neither a dict of lists nor a list of dicts, is empty, or has a run twice.
    """
    if isinstance(sweep, Mapping) and all(isinstance(v, list | tuple) for v in sweep.values()):
        runs = [
            dict(zip(sweep, values, strict=True)) for values in itertools.product(*sweep.values())
        ]
    elif isinstance(sweep, list | tuple) and all(isinstance(run, Mapping) for run in sweep):
        runs = [dict(run) for run in sweep]
    else:
        raise ConfigError(
            f"get_sweep of {source} returned {sweep!r}; expected a dict of lists, or a list of dicts"
        )
    if not runs or sweep == {}:
        raise ConfigError(f"get_sweep of {source} asks for no runs; expected at least one")
    for number, run in enumerate(runs):
        if run in runs[:number]:
            raise ConfigError(f"get_sweep of {source} asks for {run} twice; expected it once")
    return runs


def load_sweep(spec: str) -> list[dict[str, Any]]:
    """Runs ``get_sweep(arg)`` of a config file; raises ConfigError if it has none, or as ``grid`` does."""
    name, separator, argument = spec.partition(":")
    get_sweep = runpy.run_path(name).get("get_sweep")
    if get_sweep is None:
        raise ConfigError(
            f"config file {name!r} has no get_sweep(arg); expected one returning a dict of lists or a list of dicts"
        )
    return grid(get_sweep(argument) if separator else get_sweep(), name)


def flag(key: str, value: Any) -> str:
    """The command line argument that sets a value."""
    text = value if isinstance(value, str) else repr(value)
    return f"--config.{key}={text}"


def run_name(overrides: Mapping[str, Any]) -> str:
    """A folder's name for a run, the same whatever else is in the sweep: ``learning_rate=1e-05,seed=0``."""
    keys = [key.rpartition(".")[2] for key in overrides]
    unique = len(set(keys)) == len(keys)
    pairs = zip(keys if unique else overrides, overrides.values(), strict=True)
    plain = ",".join(f"{key}={value}" for key, value in pairs)
    name = re.sub(r"[^\w.,=+-]", "_", plain) or "base"
    if name == plain and len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(repr(sorted(overrides.items())).encode()).hexdigest()[:8]
    return f"{name[:MAX_NAME]}-{digest}" if name != "base" else name


def _finished(folder: pathlib.Path, config: Any) -> dict[str, Any] | None:
    """The summary of a run that was finished with these settings, else None."""
    with contextlib.suppress(OSError, ValueError):
        saved = json.loads((folder / "config.json").read_text())
        if saved == json.loads(config.to_json_best_effort()):
            return json.loads((folder / "summary.json").read_text())
    return None


def _execute(command: Sequence[str], log: pathlib.Path, show: Callable[[str], None]) -> int:
    """Runs a command; what it prints goes to ``log`` and, line by line, to ``show``. Returns its exit status."""
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                file.flush()
                show(line.rstrip())
            return process.wait()
        except BaseException:  # interrupted: a run may be ended at any moment, and resumes
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_S)
            process.kill()
            raise


def _columns(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The numbers at the top of the summaries, in their order, but for the seed, which is a setting."""
    found: dict[str, None] = {}
    for run in runs:
        for name, value in (run["summary"] or {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and name != "seed":
                found[name] = None
    return list(found)


def table(runs: Sequence[Mapping[str, Any]]) -> rich.table.Table:
    """One row a run: what it was given, how it ended, what it came to."""
    keys = list(dict.fromkeys(key for run in runs for key in run["overrides"]))
    columns = _columns(runs)
    made = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for heading in (*keys, "status", *columns):
        made.add_column(heading, justify="left" if heading == "status" else "right")
    for run in runs:
        summary = run["summary"] or {}
        cells = [
            *(str(run["overrides"].get(key, "")) for key in keys),
            run["status"],
            *(f"{summary[name]:.4g}" if name in summary else "" for name in columns),
        ]
        made.add_row(*map(rich.text.Text, cells))
    return made


def _parser() -> argparse.ArgumentParser:
    parser = config_parser(
        "rlvr sweep", "Runs a config over the grid it gives, one run after another."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--command", choices=("train", "sft"), default="train", help="what to run (%(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the runs and stop")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs what is not finished, prints the table; returns 1 if a run failed."""
    args, shared = _parser().parse_known_args(list(argv))
    if args.seed is not None:
        shared.append(f"--config.seed={args.seed}")
    keep_compiled(args.compilation_cache)  # the runs inherit it
    import_modules(args.imports)
    # Every run's settings are known to be right before the first one starts.
    load_config(args.config)
    planned = []
    for overrides in load_sweep(args.config):
        flags = [*shared, *(flag(key, value) for key, value in overrides.items())]
        config = apply_overrides(load_config(args.config), flags, source=args.config)
        planned.append((run_name(overrides), overrides, flags, config))
    console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)
    if args.dry_run:
        for name, *_ in planned:
            console.print(name)
        return 0
    workdir: pathlib.Path = args.workdir
    workdir.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for number, (name, overrides, flags, config) in enumerate(planned, start=1):
        folder = workdir / name
        label = f"[{number}/{len(planned)}] {name}"
        run: dict[str, Any] = {"name": name, "overrides": overrides, "workdir": str(folder)}
        runs.append(run)
        summary = None if args.fresh else _finished(folder, config)
        if summary is not None:
            console.print(f"{label}: finished already")
            run |= {"status": "done", "summary": summary, "error": None}
        else:
            console.print(label)
            run |= _run(args, folder, flags, console)
        partial = workdir / "sweep.partial"
        partial.write_text(json.dumps({"config": args.config, "runs": runs}, indent=2) + "\n")
        partial.replace(workdir / "sweep.json")
    width = None if console.is_terminal else 160
    rich.console.Console(width=width).print(table(runs))
    failed = [run for run in runs if run["status"] == "failed"]
    for run in failed:
        console.print(f"{run['name']} failed: {run['error']} (all of it: {run['workdir']}.log)")
    console.print(f"the table is in {workdir / 'sweep.json'}")
    return 1 if failed else 0


def _run(
    args: argparse.Namespace,
    folder: pathlib.Path,
    flags: Sequence[str],
    console: rich.console.Console,
) -> dict[str, Any]:
    """Runs one of them, and says how it ended."""
    command = [sys.executable, "-m", "rlvr_jax", args.command, f"--config={args.config}"]
    command += [*flags, *(f"--import={name}" for name in args.imports)]
    command += [f"--workdir={folder}", *(["--fresh"] if args.fresh else [])]
    last = ["no output"]

    def show(line: str) -> None:
        console.print(f"  {line}")
        if line:
            last[0] = line

    status = _execute(command, folder.with_name(f"{folder.name}.log"), show)
    if status:
        console.print(f"  failed with exit status {status}; going on with the next run")
        return {"status": "failed", "summary": None, "error": last[0].strip()}
    summary = json.loads((folder / "summary.json").read_text())
    return {"status": "done", "summary": summary, "error": None}
