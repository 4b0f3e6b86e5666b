"""Settings for all tests."""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.unsynced  # noqa: F401
from tests.durations import pytest_runtest_logreport, pytest_terminal_summary  # noqa: F401 these are hooks
from tests.stores import faulty_store, moto_server, store  # noqa: F401 these are fixtures

# for the fork server, which imports test modules ahead of time
REPOSITORY = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [REPOSITORY, os.environ.get("PYTHONPATH", "")]))
# A shell starts background jobs with SIGINT ignored, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A third of the CPU time of the collection of tests is garbage collections, which find nothing
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark soak tests as slow, so that `-m "not slow"` deselects both. Runs before pytest evaluates `-m`."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exclude all modules and tests from later collections: each run in this process would visit them twice, 0.2 s
    each."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def pools() -> Iterator[None]:
    """Ends the ranks of the pools after the tests."""
    # imported late: the main process of pytest-xdist imports this file before it starts its workers, and runs no test
    from tests.pool import close_pools
    from titanlite.ranks.launch import fork_context

    fork_context()  # sets the modules that the fork server imports, before anything starts it
    yield
    close_pools()


@pytest.fixture
def own_log() -> Iterator[None]:
    """Restores titanlite's logger after the test."""
    log = logging.getLogger("titanlite")
    before = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = before[0], before[2]
    log.setLevel(before[1])


@pytest.fixture
def propagating_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """caplog receives titanlite's lines."""
    monkeypatch.setattr(logging.getLogger("titanlite"), "propagate", True)
    caplog.set_level(logging.INFO, logger="titanlite")
