"""Settings of all tests."""

import os
from collections.abc import Iterator

import pytest

from tests.distributed.program import REPOSITORY
from tests.durations import pytest_runtest_logreport, pytest_terminal_summary  # noqa: F401 these are hooks
from tests.pool import close_pools
from titanlite.runtime.launch import fork_context

# For the fork server, which imports modules of the tests ahead of time
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Soak tests are slow tests too, so that `-m "not slow"` leaves both out; before pytest itself looks at `-m`."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def pools() -> Iterator[None]:
    """Ends the ranks that served the tests."""
    fork_context()  # before anything starts the fork server: what it imports
    yield
    close_pools()
