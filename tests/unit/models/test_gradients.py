"""Loss and gradients of every family on rows of several documents, as stored numbers: in float64, each gradient by its
product with fixed noise.

`gradients.json` has those of a tiny model of each family, as it is, with the other kind of embeddings, and with a base
model. If they change on purpose, the commit message says why: `python -m tests.unit.models.test_gradients` writes it.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.models.shaken import perturbed_model
from tests.unit.models.test_families import small
from titanlite.batch import IGNORE_INDEX
from titanlite.models.experts import mixtures_of
from titanlite.models.family import Family
from titanlite.models.registry import SHIPPED

FILE = Path(__file__).with_name("gradients.json")
BOUND = 1e-10
"""Relative: rounding by other kernels of float64."""


def variants(family: Family) -> Iterator[tuple[str, Any]]:
    """(name, configuration) of a tiny model, with the other kind of embeddings, and with a base model."""
    plain = small(family, n_layers=4)
    yield "plain", plain
    names = {field.name for field in fields(plain)}
    if "tie_embeddings" in names:
        name = "untied" if plain.tie_embeddings else "tied"
        yield name, small(family, n_layers=4, tie_embeddings=not plain.tie_embeddings)
    if "linear_key_heads" not in names:  # there is no rule for linear attention
        yield "base model", small(family, n_layers=4, base_dim=plain.dim // 2, base_layers=2)


def gradients_of(family: Family, config: Any) -> dict[str, float]:
    """The loss, and the product of each gradient with noise, by its name."""
    model = perturbed_model(family, config)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(51, (3, 33), generator=generator)
    labels = tokens[:, 1:].masked_fill(torch.rand(3, 32, generator=generator) < 0.2, IGNORE_INDEX)
    starts = torch.rand(3, 32, generator=generator) < 0.15
    num_valid = (labels != IGNORE_INDEX).sum().expand(3)
    for mixture in mixtures_of([model]):
        mixture.start_step(torch.tensor(3), torch.tensor(96))
    loss = model(tokens[:, :-1], document_ids=starts.cumsum(1), labels=labels, num_valid=num_valid).sum()
    loss.backward()
    found = {"loss": float(loss.detach())}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        found[name] = 0.0 if parameter.grad is None else float((parameter.grad * noise).sum())
    return found


def all_gradients(family: Family) -> dict[str, dict[str, float]]:
    return {name: gradients_of(family, config) for name, config in variants(family)}


@pytest.mark.slow
@pytest.mark.parametrize("family", SHIPPED, ids=lambda family: family.name)
def test_loss_and_gradients(family: Family) -> None:
    stored = json.loads(FILE.read_text())[family.name]
    found = all_gradients(family)
    assert found.keys() == stored.keys()
    for name, numbers in found.items():
        largest = max(map(abs, numbers.values()))
        assert numbers == pytest.approx(stored[name], rel=BOUND, abs=BOUND * largest), name


if __name__ == "__main__":
    FILE.write_text(json.dumps({family.name: all_gradients(family) for family in SHIPPED}, indent=0) + "\n")
