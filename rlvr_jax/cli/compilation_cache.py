"""Where compiled programs are kept: a second run of the same programs need not compile them again.

JAX's persistent cache, on by default for the commands that compute. Its keys cover the program, the options, the
versions of JAX and XLA, and the devices; the folder may be deleted at any time.
"""

from __future__ import annotations

import os
import pathlib
import sys

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
ENABLED = "JAX_ENABLE_COMPILATION_CACHE"
OFF = "off"
FALSE = ("n", "no", "f", "false", "off", "0")  # as JAX reads them
# Programs that compile faster than this are not kept: reading them would take as long.
MIN_COMPILE_S = 0.2


def default_folder() -> pathlib.Path | None:
    """``$XDG_CACHE_HOME/rlvr_jax/xla``, by default in ``~/.cache``; None for a user without a home."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    return pathlib.Path(base) / "rlvr_jax" / "xla"


def keep_compiled(choice: str | None = None) -> pathlib.Path | None:
    """Turns the cache on for this process and those it starts. Before anything is compiled.

    Args:
      choice: a folder, made when something is put into it; ``off``; None for JAX's own ``JAX_COMPILATION_CACHE_DIR``
        where that is set (with the other ``JAX_PERSISTENT_CACHE_*`` as they are), else ``default_folder``.

    Returns:
      The folder; None when the cache is off.
    """
    if choice == OFF:
        _set(ENABLED, False)
        return None
    if choice is not None:
        folder = pathlib.Path(choice).expanduser().absolute()
    elif os.environ.get(ENABLED, "true").lower() in FALSE:
        return None
    elif VARIABLE in os.environ:
        return pathlib.Path(os.environ[VARIABLE]) if os.environ[VARIABLE] else None
    else:
        folder = default_folder()
    if folder is None:
        return None
    _set(ENABLED, True)
    _set(VARIABLE, str(folder))
    _set("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", MIN_COMPILE_S)
    return folder


def _set(variable: str, value: str | float | bool) -> None:
    """A setting of JAX, whether it has been imported or not."""
    os.environ[variable] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(variable.lower(), value)
