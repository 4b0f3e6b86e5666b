"""Seeds of randomized tests: a few by default, many as a soak test."""

import pytest


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize `seeds`, over which the test loops: one case with the first few, one soak case with the others."""
    others = pytest.param(range(few, many), marks=pytest.mark.soak, id="others")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), others])
