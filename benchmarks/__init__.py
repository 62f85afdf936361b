"""Speed and memory of an optimizer step, ours and the closest peers', on the same work; see ``benchmarks/step.py``."""
