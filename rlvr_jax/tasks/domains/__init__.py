"""One file a domain or a few related ones. Every module here is imported with ``rlvr_jax.tasks``."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
