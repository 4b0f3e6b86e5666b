"""Read configurations in tests."""

from collections.abc import Sequence

from titanlite.config.load import parse
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import Problem


def parse_config(argv: Sequence[str]) -> tuple[JobConfig, list[Problem]]:
    """The configuration as given, and its problems with names and values."""
    parsed = parse(argv)
    return parsed.config, parsed.problems
