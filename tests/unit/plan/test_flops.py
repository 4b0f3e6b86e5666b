"""Floating-point operations by unit add up to those of the model."""

from dataclasses import replace

import pytest

from titanlite.models.llama3 import LLAMA3


@pytest.mark.parametrize("tied", [False, True])
def test_units_add_up_to_the_model(tied: bool) -> None:
    config = replace(LLAMA3.flavors["8B"], tie_embeddings=tied)
    units = LLAMA3.plan(config).units
    found = sum(LLAMA3.unit_flops_per_token(config, 8192, unit[0]) for unit in units)
    assert found == LLAMA3.flops_per_token(config, 8192)
