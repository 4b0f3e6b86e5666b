"""Programs and processes that end with their tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.forked import Parent
from tests.distributed.program import Program, Starter, start_program
from tests.distributed.recovered import Undisturbed, undisturbed_runs


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


@pytest.fixture(scope="session")
def parent() -> Iterator[Parent]:
    """Forks ranks that may die."""
    process = Parent()
    yield process
    process.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The run that others are compared with, once for all tests."""
    return undisturbed_runs(tmp_path_factory.mktemp("undisturbed"))
