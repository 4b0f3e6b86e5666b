"""Construction of all parts of a run from a JobConfig."""
