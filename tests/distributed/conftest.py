"""Fixtures for programs and processes, which stop after their tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.program import Program, Starter, start_program
from tests.distributed.recovered import Undisturbed, undisturbed_runs


@pytest.fixture
def start() -> Iterator[Starter]:
    """`start_program`; stops the programs that a failed test left running."""
    programs: list[Program] = []

    def start_and_record(*args: Any, **kwargs: Any) -> Program:
        programs.append(start_program(*args, **kwargs))
        return programs[-1]

    yield start_and_record
    for program in programs:
        program.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Reference runs without faults, trained once per test session."""
    return undisturbed_runs(tmp_path_factory.mktemp("undisturbed"))
