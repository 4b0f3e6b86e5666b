"""Settings of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durations import pytest_runtest_logreport, pytest_terminal_summary  # noqa: F401 these are hooks

# For the fork server, which imports modules of the tests ahead of time
REPOSITORY = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH", "")]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Soak tests are slow tests too, so that `-m "not slow"` leaves both out; before pytest itself looks at `-m`."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def pools() -> Iterator[None]:
    """Ends the ranks that served the tests."""
    # Here: pytest's first process starts its workers only when this file is imported, and runs no test itself
    from tests.pool import close_pools
    from titanlite.runtime.launch import fork_context

    fork_context()  # before anything starts the fork server: what it imports
    yield
    close_pools()
