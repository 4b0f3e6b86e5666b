"""Settings of all tests."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Soak tests are slow tests too, so that `-m "not slow"` leaves both out; before pytest itself looks at `-m`."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.slow)
