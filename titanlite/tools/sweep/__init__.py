"""Command: train all combinations of some values of a configuration."""
