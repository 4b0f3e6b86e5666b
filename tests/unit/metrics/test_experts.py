"""Columns, records and warnings of experts."""

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from titanlite.metrics.experts import ExpertLoads
from titanlite.metrics.records import ExpertsRecord
from titanlite.metrics.tensorboard import CELL, heat_map
from titanlite.models.experts import ROUTER_SUMS, MixtureOfExperts, Placement
from titanlite.models.family import LanguageModel
from titanlite.models.qwen3_moe import QWEN3_MOE
from titanlite.models.watch import parts_of

N_EXPERTS = 4


class Blocks(torch.nn.Module):
    """Two mixtures of experts, of which the second one is block 2 of 3."""

    def __init__(self, bias_rate: float) -> None:
        super().__init__()
        small = {"dim": 4, "ffn_dim": 4, "n_experts": N_EXPERTS, "n_active_experts": 2, "bias_rate": bias_rate}
        config = replace(QWEN3_MOE.flavors["debug"], **small)
        self.mixtures = torch.nn.ModuleList(MixtureOfExperts(config) for _ in range(2))
        self.mixtures[1].placement = Placement(2)

    def note(self, *loads: list[int]) -> None:
        """The terms of 10 rows and sum(loads) / 2 positions."""
        for mixture, load in zip(self.mixtures, loads, strict=True):
            assert isinstance(mixture, MixtureOfExperts)
            mixture.load = torch.tensor(load)
            sums = {"balance_loss": 11.0, "rows": 10.0, "z_loss": 3.0 * sum(load) / 2, "router_entropy": 0.0}
            mixture.router_sums = parts_of(torch.tensor([sums[name] for name in ROUTER_SUMS]))


def loads_of(model: Blocks, total_steps: int = 10) -> ExpertLoads:
    sizes = {"num_blocks": 3, "n_experts": N_EXPERTS, "n_active": 2}
    parts: list[LanguageModel] = [model]  # type: ignore[list-item]
    return ExpertLoads(parts, torch.device("cpu"), counts=True, first_step=1, total_steps=total_steps, **sizes)


def test_columns(group: dist.ProcessGroup) -> None:
    del group
    model = Blocks(0.1)
    for index, mixture in enumerate(model.mixtures):
        assert isinstance(mixture, MixtureOfExperts)
        assert mixture.bias is not None
        mixture.bias += torch.tensor([-0.5, -0.25, -0.125, -0.75]) * (index + 1)
    loads = loads_of(model)
    model.note([1, 2, 3, 2], [0, 0, 8, 0])
    columns, record = loads.flush(1)
    assert (columns["max_load/0"], columns["min_load/0"]) == (1.5, 0.5)
    assert (columns["max_load/2"], columns["min_load/2"]) == (4.0, 0.0)
    assert (columns["bias_range/0"], columns["bias_range/2"]) == (0.625, 1.25)
    assert columns["balance_loss"] == pytest.approx(2 * 1.1 / 3)  # block 1 has no experts here
    assert record == ExpertsRecord(1, [[1, 2, 3, 2], [0, 0, 0, 0], [0, 0, 8, 0]])


def test_without_biases_and_without_experts(group: dist.ProcessGroup) -> None:
    del group
    model = Blocks(0.0)
    model.note([1, 2, 3, 2], [0, 0, 8, 0])
    columns, _ = loads_of(model).flush(1)
    assert not [name for name in columns if name.startswith("bias")]
    nothing = ExpertLoads(
        [], torch.device("cpu"), counts=True, num_blocks=3, n_experts=1, n_active=1, first_step=1, total_steps=10
    )
    assert nothing.flush(1) == ({}, None)


def test_a_long_run_has_few_records(group: dist.ProcessGroup) -> None:
    del group
    loads = loads_of(Blocks(0.0), total_steps=2000)
    assert [step for step in range(1, 41) if loads.flush(step)[1] is not None] == [1, 11, 21, 31]


def test_an_expert_without_positions_is_reported_once(
    group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    del group
    model = Blocks(0.0)
    loads = loads_of(model)
    few, dead = [1, 1, 0, 0], [400, 400, 0, 0]
    with caplog.at_level(logging.WARNING, "titanlite"):
        for step, counts in ((10, few), (20, dead), (30, dead), (40, [400, 400, 1, 0]), (50, dead)):
            model.note([100, 100, 100, 100], counts)
            loads.flush(step)
    found = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert found == [
        "No position chose experts 2, 3 of block 2 in the last 10 steps",
        "No position chose experts 2, 3 of block 2 in the last 10 steps",
    ]


def test_the_picture_of_tensorboard() -> None:
    picture = heat_map([[0, 1, 2, 5], [0, 0, 0, 0]])
    assert picture.shape == (2 * CELL, 4 * CELL)
    assert picture[0, ::CELL].tolist() == [0, 63, 127, 255]
    assert not picture[CELL:].any()
    assert picture.dtype == np.uint8
