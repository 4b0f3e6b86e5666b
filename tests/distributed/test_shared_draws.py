"""Initial weights that ranks draw together: the values of one process, and how many blocks each rank draws."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.distributed.gradients import build_on_mesh, has_weights
from tests.distributed.layouts import EXPERTS
from tests.distributed.reference import plain_model, small_config
from tests.distributed.resuming import Start, start_runs
from tests.pool import run_ranks
from titanlite.models import init as init_module
from titanlite.models import shared_draws
from titanlite.models.family import Init
from titanlite.models.init import init_parameters_
from titanlite.models.shared_draws import Plan
from titanlite.runtime.torch_internals import local_part

NORMAL = Init("normal", 0.02)
BLOCK = 64
Layout = tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]
"""Degrees of the mesh, placements, shape."""
ON_2: list[Layout] = [
    ((2,), (Shard(0),), (7, 5, 30)),
    ((2,), (Shard(1),), (7, 5, 30)),
    ((2,), (Shard(2),), (6, 9, 33)),
    ((2,), (Shard(-1),), (37, 41)),
    ((2,), (Shard(1),), (40, 1, 60)),  # the second rank has none
]
ON_4: list[Layout] = [
    ((4,), (Shard(0),), (9, 6, 31)),
    ((4,), (Shard(1),), (9, 6, 90)),  # two, two, two and no rows
    ((4,), (Shard(1),), (33, 25)),
    ((2, 2), (Shard(0), Shard(1)), (5, 7, 90)),
    ((2, 2), (Shard(1), Shard(2)), (6, 9, 35)),
    ((2, 2), (Shard(2), Shard(1)), (6, 9, 35)),
    ((2, 2), (Shard(1), Shard(1)), (11, 7, 30)),
    ((2, 2), (Replicate(), Shard(1)), (9, 5, 50)),
    ((2, 2), (Shard(1), Shard(0)), (9, 5, 90)),
]
CUT_TWICE = 11, 12, 20
"""Shape of a parameter that tp and fully_shard cut along the same dimension: a strided shard."""


class Counted:
    """Counts drawn blocks by parameter."""

    def __init__(self) -> None:
        self.indices: dict[str, list[int]] = {}
        self._draw = init_module.draw_block_

    def __call__(self, out: Tensor, seed: int, name: str, init: Init, index: int, *memory: Tensor) -> None:
        self.indices.setdefault(name, []).append(index)
        self._draw(out, seed, name, init, index, *memory)


def full(name: str, shape: Sequence[int]) -> Tensor:
    """The values of one process."""
    module = nn.ParameterDict({name: nn.Parameter(torch.empty(*shape))})
    init_parameters_(module, 3, lambda _: NORMAL)
    return module[name].detach()


def drawn(layouts: Sequence[Layout], blocks_at_once: int, always: bool) -> list[dict[str, Any]]:
    """By layout on this rank: whether the values are those of one process, own numbers, and the drawn blocks. always:
    share also what each rank could draw alone."""
    found = []
    names = ("a", "b")
    meshes = {
        degrees: init_device_mesh("cpu", degrees, mesh_dim_names=names[: len(degrees)]) for degrees, _, _ in layouts
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(init_module, "BLOCK_NUMEL", BLOCK))
        stack.enter_context(patch.object(shared_draws, "BLOCKS_AT_ONCE", blocks_at_once))
        if always:
            stack.enter_context(sharing_all())
        for degrees, placements, shape in layouts:
            expected = {name: full(name, shape) for name in ("v", "w")}
            parts = {
                name: distribute_tensor(each, meshes[degrees], placements, src_data_rank=None)
                for name, each in expected.items()
            }
            empty = {name: nn.Parameter(torch.full_like(part, float("nan"))) for name, part in parts.items()}
            found.append(draws_of(nn.ParameterDict(empty), {name: part.to_local() for name, part in parts.items()}))
        if len(meshes) > 1:
            found.append(cut_twice(meshes[2, 2]))
    return found


def draws_of(module: nn.Module, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    counted = Counted()
    with patch.object(init_module, "draw_block_", counted):
        init_parameters_(module, 3, lambda _: NORMAL)
    values = {name: local_part(parameter) for name, parameter in module.named_parameters()}
    same = all(torch.equal(values[name], part) for name, part in expected.items())
    return {"same": same, "own": values["w"].numel(), "blocks": counted.indices["w"] if counted.indices else []}


def cut_twice(mesh: DeviceMesh) -> dict[str, Any]:
    """Dimension 1 is cut over b, and its parts over a."""
    cut = distribute_tensor(torch.empty(CUT_TWICE), mesh["b"], [Shard(1)], src_data_rank=None)
    module = nn.ParameterDict({"w": nn.Parameter(cut)})
    fully_shard(module, mesh=mesh["a"], shard_placement_fn=lambda _: Shard(1))
    with torch.no_grad():
        module["w"].to_local().fill_(float("nan"))
    of_b = full("w", CUT_TWICE).chunk(2, dim=1)[mesh.get_local_rank("b")]
    own = [*of_b.chunk(2, dim=1), of_b[:, :0]][mesh.get_local_rank("a")]
    return draws_of(module, {"w": own})


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ON_2), (4, ON_4)])
def test_values_are_those_of_one_process(ranks: int, layouts: list[Layout]) -> None:
    """If each rank draws too much alone, and if all cuts are shared; in several rounds, and in one."""
    for at_once, always in ((1, False), (4, True), (1, True)):
        by_rank = run_ranks(drawn, ranks, layouts, at_once, always)
        shapes = [shape for _, _, shape in layouts] + ([CUT_TWICE] if ranks == 4 else [])
        for shape, of_layout in zip(shapes, zip(*by_rank, strict=True), strict=True):
            assert all(each["same"] for each in of_layout), (shape, [each["same"] for each in of_layout])
            most = max(each["own"] for each in of_layout)
            for each in of_layout:
                assert len(each["blocks"]) <= 2 * (most / BLOCK + 1) or always, (shape, each)
            if always and ranks == 2:
                blocks = sorted(block for each in of_layout for block in each["blocks"])
                assert blocks == list(range(-(-prod(shape) // BLOCK))), "each block is drawn once"


def sharing_all() -> AbstractContextManager[object]:
    """Inside, ranks share also what each could draw alone."""
    return patch.object(shared_draws, "shared_cuts", lambda _, cuts, __: len(cuts))


def experts_of_a_run(layouts: Sequence[tuple[str, ...]]) -> list[tuple[bool, int]]:
    """By layout: whether a model with experts has the weights of one process, and the number of exchanges."""
    found = []
    with patch.object(init_module, "BLOCK_NUMEL", BLOCK), sharing_all():
        for layout in layouts:
            config = small_config(4, *EXPERTS, *layout)
            expected = dict(plain_model(config).named_parameters())
            with patch.object(Plan, "exchange_", autospec=True, side_effect=Plan.exchange_) as exchanged:
                trainer, _ = build_on_mesh(config)
            found.append((has_weights(trainer, expected), exchanged.call_count))
    return found


@pytest.mark.slow
def test_experts_of_a_run() -> None:
    """All parameters of a model are shared; dp_shard cuts experts along their features, or ep and tp along both."""
    axes = ("dp_shard=4",), ("dp_shard=2", "tp=2", "ep=2")
    layouts = [tuple(f"parallelism.{axis}" for axis in each) for each in axes]
    for of_rank in run_ranks(experts_of_a_run, 4, layouts):
        for layout, (same, exchanges) in zip(layouts, of_rank, strict=True):
            assert same, layout
            assert exchanges > 0, layout


@contextmanager
def counting(file: Path) -> Iterator[None]:
    """Append the number of blocks that are drawn inside to `file`."""
    counted = Counted()
    with patch.object(init_module, "draw_block_", counted):
        yield
    with file.open("a") as out:
        out.write(f"{sum(map(len, counted.indices.values()))}\n")


@pytest.mark.slow
def test_a_start_that_loads_weights_draws_none(tmp_path: Path) -> None:
    """Resumes, and starts from another run's weights or state. Without them, and without checkpoints, they are drawn,
    and the average of the weights begins at them."""
    file, averaged = tmp_path / "counts", ("training.steps=2", "optimizer.ema_decay=0.9")
    others = (
        Start(averaged),
        Start((*averaged, "training.steps=3")),
        Start((*averaged, f"checkpoint.initial_load_path={tmp_path}/run/checkpoint"), run="weights"),
        Start((*averaged, f"checkpoint.initial_load_path={tmp_path}/run/checkpoint",
               "checkpoint.initial_load_model_only=false", "training.steps=4"), run="state"),
        Start((*averaged, "checkpoint.enable=false"), run="unsaved"),
    )  # fmt: skip
    found = start_runs(tmp_path, [replace(start, around=partial(counting, file)) for start in others])
    assert [outcome.error for outcome in found] == [""] * 5
    first, *resumed, unsaved = map(int, file.read_text().split())
    assert first == unsaved > 0
    assert resumed == [0, 0, 0]
    assert found[4].begin.items() <= found[0].begin.items()  # which also has the state of the optimizer
    for name, value in found[0].begin.items():
        if name.endswith(" in the average"):
            assert value == found[0].begin[name.removesuffix(" in the average")]
