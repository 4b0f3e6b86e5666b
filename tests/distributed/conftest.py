"""Programs that end with their test."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.program import Program, Starter, start_program


@pytest.fixture
def start() -> Iterator[Starter]:
    """start_program; what a failed test has left running is ended."""
    programs: list[Program] = []

    def start_and_note(*args: Any, **kwargs: Any) -> Program:
        programs.append(start_program(*args, **kwargs))
        return programs[-1]

    yield start_and_note
    for program in programs:
        program.close()
