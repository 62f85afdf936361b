"""``python -m rlvr_jax`` is ``rlvr``."""

import sys

from rlvr_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
