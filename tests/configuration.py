"""Read configurations in tests."""

from collections.abc import Sequence

import pytest
import torch

from titanlite.config.load import parse
from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import Problem

HAS_EACH_SCHEDULE = torch.__version__ >= "2.13"
EACH_SCHEDULE = pytest.mark.skipif(not HAS_EACH_SCHEDULE, reason="torch before 2.13 lacks some schedules")
"""Of tests that take all pipeline schedules."""


def parse_config(argv: Sequence[str]) -> tuple[JobConfig, list[Problem]]:
    """The configuration as given, and its problems with names and values."""
    parsed = parse(argv)
    return parsed.config, parsed.problems
