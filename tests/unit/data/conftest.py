"""Fixtures of the data tests."""

import functools

import pytest

from titanlite.data.sources import hf


@pytest.fixture
def cached_hub_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache `hf.hub_files`, which the many loaders of a test call for the same dataset."""
    monkeypatch.setattr(hf, "hub_files", functools.cache(hf.hub_files))
