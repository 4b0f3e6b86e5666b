"""Command: generate text from a saved run."""
