"""Loads of experts: each choice is counted once, on every mesh, with recomputation and split backward passes."""

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import EXPERTS, FULL, GATHER, Layout, depth, schedule
from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, global_batch, plain_model
from tests.pool import run_ranks
from titanlite.metrics.experts import ExpertLoads
from titanlite.models.experts import MixtureOfExperts

N_EXPERTS, N_ACTIVE = 6, 2
LAYOUTS = (
    Layout((1, 1, 1, 1), (*EXPERTS, *FULL), accumulation=4),
    Layout((1, 1, 1, 2), (*EXPERTS, *FULL)),
    Layout((1, 1, 1, 1), (*EXPERTS, *GATHER, *FULL), cp=2),
    Layout((2, 1, 1, 1), (*EXPERTS, *schedule("ZBVZeroBubble"), *depth(3), *FULL)),
)


def loads_on_mesh(layout: Layout) -> list[object]:
    """The totals after one step, the row of the next step, and the row of an interval without steps."""
    config = layout.config()
    trainer, mesh = build_on_mesh(config)
    blocks = 3 if "model.n_layers=3" in layout.settings else 2
    sizes = {"num_blocks": blocks, "n_experts": N_EXPERTS}
    loads = ExpertLoads(trainer.model_parts, trainer.device, counts=mesh.is_first(["tp"]), **sizes)
    batches = local_batches(config, mesh, global_batch("silent_ranks"))
    trainer.train_step(batches)
    totals = loads.totals().tolist()
    trainer.model_parts[0].eval()
    trainer.train_step(batches)
    return [totals, dict(loads.flush()), dict(loads.flush())]


def all_loads(layouts: list[Layout]) -> list[list[object]]:
    return [loads_on_mesh(layout) for layout in layouts]


def counted(layout: Layout) -> list[list[int]]:
    """The choices of the global batch in one process, by block and expert."""
    model, found = plain_model(layout.config()), list[Tensor]()

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[1].flatten().bincount(minlength=N_EXPERTS))

    for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        mixture.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        model(global_batch("silent_ranks").tokens)
    return [each.tolist() for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_choice_is_counted_once(world_size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size]
    for ranks in zip(layouts, *run_ranks(all_loads, world_size, layouts), strict=True):
        layout, (totals, row, empty), *others = ranks
        expected = counted(layout)
        assert [sum(block) for block in expected] == [GLOBAL_BATCH * SEQ_LEN * N_ACTIVE] * len(expected)
        assert totals == expected, layout
        assert others == [[totals, row, empty]] * (world_size - 1)
        assert row.keys() == {f"{name}/{block}" for name in ("max_load", "min_load") for block in range(len(expected))}
        assert row["max_load/0"] > 1 > row["min_load/0"] > 0
        assert set(empty.values()) == {0.0}
