"""Random sweeps: a fixed small selection of seeds by default, many as a soak test."""

import pytest


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrizes `seeds`, over which the test loops: one case of the first few, one soak case of the others."""
    others = pytest.param(range(few, many), marks=pytest.mark.soak, id="others")
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), others])
