"""The FLOPs of all FSDP units add up to those of the model."""

from dataclasses import replace

import pytest

from titanlite.models.registry import FAMILIES
from titanlite.tools.plan.activations import unit_flops_per_token


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_units_add_up_to_the_model(name: str, tied: bool) -> None:
    family = FAMILIES[name]
    config = replace(family.flavors["8B"], tie_embeddings=tied)
    units = family.plan(config).units
    found = sum(unit_flops_per_token(config, 8192, unit[0]) for unit in units)
    assert found == family.flops_per_token(config, 8192)
