"""Command: does every layout compute what one process computes, for a user's own configuration?

python -m titanlite parity CONFIG [--ranks N | --layouts L ...] [--steps K] [--shrink] [--json FILE]
    [--section.key value ...]
"""
