"""Settings of the tests of data."""

import functools

import pytest

from titanlite.data.sources import hf


@pytest.fixture
def hub_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The many loaders of a test need not ask `datasets` each time."""
    monkeypatch.setattr(hf, "hub_files", functools.cache(hf.hub_files))
