"""Loads of experts and their biases: each choice of a token is counted once, on every mesh, with recomputation and
split backward passes."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import titanlite.trainer as trainer_module
from tests.distributed.gradients import build_on_mesh, errors_of_step, full_tensor, local_batches
from tests.distributed.layouts import (
    BY_OP,
    COMPILE,
    EIGHT,
    EP,
    EXPERTS,
    FULL,
    GATHER,
    GPT_OSS,
    PAIRS,
    Layout,
    depth,
    is_supported,
    measure_all,
    schedule,
)
from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, global_batch, plain_model
from tests.grouped import grouped_products
from tests.pool import run_ranks
from titanlite.batch import Batch
from titanlite.metrics.experts import ExpertLoads
from titanlite.models.experts import MixtureOfExperts, end_step
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.torch_internals import local_part
from titanlite.trainer import Trainer

N_EXPERTS, N_ACTIVE = 6, 2
LAYOUTS = (
    Layout((1, 1, 1, 1), (*EXPERTS, *FULL), accumulation=4),
    Layout((1, 1, 1, 2), (*EXPERTS, *FULL)),
    Layout((1, 1, 1, 1), (*EXPERTS, *GATHER, *FULL), cp=2),
    Layout((2, 1, 1, 1), (*EXPERTS, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS, *FULL)),
    Layout((1, 1, 2, 1), (*EXPERTS, *EP, *FULL)),
)


def padded_batch(rows: int = GLOBAL_BATCH) -> Batch:
    """With padding in most rows: row 0 has no token, row 1 no padding."""
    batch = global_batch("uneven", 0, rows)
    lengths = torch.arange(rows) * 5 % (SEQ_LEN + 1)
    lengths[1] = SEQ_LEN
    padding = torch.arange(SEQ_LEN) >= lengths.unsqueeze(1)
    return batch._replace(
        tokens=batch.tokens.masked_fill(padding, 0), labels=batch.labels.masked_fill(padding, -100), lengths=lengths
    )


def build_loads(trainer: Trainer, mesh: Mesh, blocks: int, n_experts: int) -> ExpertLoads:
    return ExpertLoads(
        trainer.model_parts,
        trainer.device,
        counts=mesh.is_first(["tp"]),
        num_blocks=blocks,
        n_experts=n_experts,
        n_active=N_ACTIVE,
        first_step=1,
        total_steps=400,
    )


def loads_on_mesh(layout: Layout) -> list[object]:
    """The totals after a step, the columns and the record of the next step, and the columns of an interval without
    steps."""
    config = layout.config()
    trainer, mesh = build_on_mesh(config)
    loads = build_loads(trainer, mesh, 3 if "model.n_layers=3" in layout.settings else 2, N_EXPERTS)
    batches = local_batches(config, mesh, padded_batch())
    trainer.train_step(batches)
    totals = loads.totals()[0].tolist()
    for part in trainer.model_parts:
        part.eval()
    trainer.train_step(batches)
    columns, record = loads.flush(2)
    return [totals, columns, None if record is None else record.rows(), loads.flush(3)[0]]


def all_loads(layouts: list[Layout]) -> list[list[object]]:
    return [loads_on_mesh(layout) for layout in layouts]


def counted(layout: Layout) -> list[list[int]]:
    """The choices of the tokens of the global batch in one process, by block and expert."""
    model, found, batch = plain_model(layout.config()), list[Tensor](), padded_batch()
    assert batch.lengths is not None
    is_token = torch.arange(SEQ_LEN) < batch.lengths.unsqueeze(1)

    def note(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[1][is_token].flatten().bincount(minlength=N_EXPERTS))

    for mixture in (module for module in model.modules() if isinstance(module, MixtureOfExperts)):
        mixture.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        model(batch.tokens)
    return [each.tolist() for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_choice_is_counted_once(world_size: int) -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == world_size and is_supported(layout)]
    columns: dict[int, dict[str, float]] = {}
    for ranks in zip(layouts, *run_ranks(all_loads, world_size, layouts), strict=True):
        layout, (totals, row, record, empty), *others = ranks
        expected = counted(layout)
        lengths = padded_batch().lengths
        assert lengths is not None
        assert [sum(block) for block in expected] == [int(lengths.sum()) * N_ACTIVE] * len(expected)
        assert totals == expected, layout
        assert [row["step"] for row in record] == [2]
        assert [sum(block) for block in record[0]["loads"]] == [sum(block) for block in expected]
        assert others == [[totals, row, None, empty]] * (world_size - 1)
        of_blocks = {
            f"{name}/{block}" for name in ("max_load", "min_load", "router_entropy") for block in range(len(expected))
        }
        assert row.keys() == of_blocks | {"balance_loss", "z_loss"}
        assert row["max_load/0"] > 1 > row["min_load/0"] > 0
        assert 0.5 < row["router_entropy/0"] < 1 < row["balance_loss"] < 2
        assert row["z_loss"] == pytest.approx(math.log(N_EXPERTS) ** 2, rel=0.2)
        assert set(empty.values()) == {0.0}
        assert row == pytest.approx(columns.setdefault(len(expected), row), rel=1e-12, abs=0), layout


COMPILED = (
    Layout((1, 1, 1, 1), (*EXPERTS, *COMPILE, *BY_OP), accumulation=3, rows=24),
    Layout((1, 1, 2, 1), (*EXPERTS, *COMPILE, *BY_OP), accumulation=2),
    Layout((1, 1, 1, 2), (*GPT_OSS, *COMPILE, *FULL)),
    Layout((1, 1, 1, 1), (*EXPERTS, *COMPILE, *FULL), cp=2),
    Layout((2, 1, 1, 1), (*EXPERTS, *schedule("ZBVZeroBubble"), *depth(3), *PAIRS, *COMPILE, *FULL)),
)


def compiled(layouts: list[Layout]) -> list[tuple[float, list[list[int]]]]:
    """The largest error of the gradients, and the loads of a step."""
    found = []
    with grouped_products():
        for layout in layouts:
            (measured,) = measure_all([layout], "float64")
            found.append((measured.gradient, loads_on_mesh(layout)[0]))
    return found  # type: ignore[return-value]


@pytest.mark.soak  # default suite: test_blocks_with_experts_are_one_graph
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_count_each_choice_once(world_size: int) -> None:
    layouts = [layout for layout in COMPILED if layout.world_size == world_size]
    for rank in run_ranks(compiled, world_size, layouts, timeout_s=900):
        for layout, (error, loads) in zip(layouts, rank, strict=True):
            assert error < 1e-12, layout
            assert loads == counted(layout), layout


@pytest.mark.slow
def test_padding_has_no_part_in_the_gradients_of_the_router() -> None:
    layouts = [layout for layout in LAYOUTS if layout.world_size == 2 and not layout.schedule]
    for worst in run_ranks(errors_with_padding, 2, layouts)[0]:
        assert worst < 1e-12


def errors_with_padding(layouts: list[Layout]) -> list[float]:
    return [errors_of_step(layout.config(), padded_batch()).worst for layout in layouts]


# Expert parallelism ---------------------------------------------------------------------------------------------------


def gradients_with_equal_scores(layouts: list[Layout]) -> list[list[list[float]]]:
    """Norms of the experts' gradients, by layout and parameter, if all positions choose experts 0 and 1."""
    found = []
    for layout in layouts:
        config = layout.config()
        trainer, mesh = build_on_mesh(config)
        for mixture in trainer.mixtures:
            local_part(mixture.router.weight).zero_()
        trainer.train_step(local_batches(config, mesh, global_batch("uneven")))
        parameters = [p for part in trainer.model_parts for name, p in part.named_parameters() if ".experts." in name]
        found.append([full_tensor(p.grad).flatten(1).norm(dim=1).tolist() for p in parameters if p.grad is not None])
    return found


@pytest.mark.slow
def test_a_rank_whose_experts_get_no_token_takes_part() -> None:
    layouts = [Layout((1, 1, 2, 1), EXPERTS), Layout((1, 1, 2, 1), (*EXPERTS, *EP))]
    replicated, dealt_out = run_ranks(gradients_with_equal_scores, 2, layouts)[0]
    assert len(dealt_out) == 6
    for one, other in zip(replicated, dealt_out, strict=True):
        assert min(one[:2]) > 0
        assert other == pytest.approx(one, rel=1e-12)
        assert one[2:] == other[2:] == [0.0] * (N_EXPERTS - 2)


# Biases ---------------------------------------------------------------------------------------------------------------

BIASED = (*EXPERTS, *EIGHT, "model.balance_loss=0.0", "model.z_loss=0.0", "model.bias_rate=0.002", "optimizer.lr=3e-4")
ADAM = ("optimizer.name=AdamW",)
MESHES = {
    1: Layout((1, 1, 1, 1), (*BIASED, *FULL, *ADAM)),
    2: Layout((1, 1, 2, 1), (*BIASED, *EP, *FULL, *ADAM)),
    4: Layout((1, 1, 2, 1), (*BIASED, "parallelism.ep=4", *FULL, *ADAM), cp=2),
}
STEPS, WINDOW = 28, 4


@contextmanager
def planted(mistake: str | None) -> Iterator[None]:
    """A mistake in the counts of a step."""
    note = MixtureOfExperts.note

    def of_this_rank(mixtures: Sequence[MixtureOfExperts], ok: Tensor, _group: object) -> None:
        end_step(mixtures, ok, None)

    def also_in_forward(self: MixtureOfExperts, *args: Any) -> Any:
        loss, sums = losses(self, *args)
        note(self, args[2].sum(dim=0) * (args[0].sum() > 0), sums)
        return loss, sums

    losses = MixtureOfExperts._losses
    if mistake == "not reduced":
        with patch.object(trainer_module, "end_step", of_this_rank):
            yield
    elif mistake == "counted in forward passes":
        with patch.object(MixtureOfExperts, "_losses", also_in_forward):
            yield
    else:
        yield


def balanced(layout: Layout, steps: int, mistake: str | None) -> tuple[list[float], list[list[list[int]]], list[float]]:
    """Losses by step, loads by window and block, and the biases after the last step, from unequal ones."""
    config = layout.config()
    trainer, mesh = build_on_mesh(config)
    for mixture in trainer.mixtures:
        assert mixture.bias is not None
        mixture.bias.copy_(torch.linspace(-0.03, 0.03, 8))
    loads, losses, windows = build_loads(trainer, mesh, 2, 8), [], []
    with planted(mistake):
        for step in range(steps):
            batch = global_batch("uneven", step)
            loss = trainer.train_step(local_batches(config, mesh, batch)).mean_loss
            dist.all_reduce(loss)
            losses.append(loss.item())
            if step % WINDOW == WINDOW - 1:
                windows.append(loads.totals()[0].tolist())
    biases = [value for mixture in trainer.mixtures if mixture.bias is not None for value in mixture.bias.tolist()]
    return losses, windows, biases


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((1, 4), marks=pytest.mark.soak)])
def test_loads_even_out_alike_on_every_mesh(sizes: tuple[int, ...]) -> None:
    results = {size: run_ranks(balanced, size, MESHES[size], STEPS, None) for size in sizes}
    losses, windows, biases = results[1][0]
    first, *_, last = (max(max(block) * 8 / sum(block) for block in window) for window in windows)
    assert first > 1.6 > 1.3 > last
    for ranks in results.values():
        for other_losses, other_windows, other_biases in ranks:
            assert other_windows == windows
            assert other_biases == biases
            assert other_losses == pytest.approx(losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["not reduced", pytest.param("counted in forward passes", marks=pytest.mark.soak)])
def test_planted_mistakes_change_the_biases(mistake: str) -> None:
    """Counts that are doubled by recomputation change the loads; the signs of the biases' changes only if microbatches
    are recomputed unequally."""
    (_, windows, biases), *_ = run_ranks(balanced, 2, MESHES[2], WINDOW, None)
    (_, wrong_windows, wrong_biases), *_ = run_ranks(balanced, 2, MESHES[2], WINDOW, mistake)
    assert biases != wrong_biases if mistake == "not reduced" else windows != wrong_windows
