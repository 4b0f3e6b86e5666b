"""Command: verify that every layout computes the same as one process, for a user's configuration."""
