"""The same step in TRL and in Tunix; each script runs in an environment of its own (``benchmarks/peers/run.py``)."""
