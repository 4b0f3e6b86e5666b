"""Command: verify that every layout computes the same as one process, for a user's configuration.

titanlite parity CONFIG [--ranks N | --layouts L ...] [--steps K] [--shrink] [--json FILE]
    [--section.key value ...]
"""
