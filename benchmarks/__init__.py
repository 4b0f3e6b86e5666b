"""Measured comparisons. `python -m benchmarks` lists them."""
