"""The rounds of owners by formula, against those that deal() gives with the parts of all ranks."""

import pytest
import torch

from tests.unit.planning.test_step_time import config_of
from titanlite.optim.muon import flops
from titanlite.optim.owners import deal, divisions_of
from titanlite.planning.estimate import estimate
from titanlite.planning.memory_check import remedies
from titanlite.planning.owner_rounds import OwnerRounds, owner_rounds
from titanlite.planning.stages import Matrices, Stage

STEPS = 5
# shape, dimension that tp shards, dimension that dp_shard shards: matrices of equal and of other costs, stacks whose
# matrices are on some ranks only, or parts of each on all, and a matrix of which tp ranks have copies
PARAMETERS = (
    ((12, 8), 0, 0),
    ((8, 12), 1, 0),
    ((7, 5), 0, 0),
    ((6, 9, 5), 1, 0),
    ((6, 5, 9), 2, 1),
    ((5, 3), None, 0),
    ((12, 8), 0, 0),
    ((9, 10), 1, 0),
)


def part_of_first(shape: tuple[int, ...], cuts: list[tuple[int, int, int]]) -> list[int]:
    sizes = list(shape)
    for dimension, number, _ in cuts:
        sizes[dimension] = -(-sizes[dimension] // number)
    return sizes


def planned_and_dealt(shards: int, tp: int, replicas: int) -> tuple[OwnerRounds, tuple[int, ...], int]:
    """The rounds by formula; calls and elements of the all-to-alls and the broadcasts; FLOPs of rank 0."""
    divided, matrices = [], []
    for shape, tp_dimension, dimension in PARAMETERS:
        cuts = [
            ([(tp_dimension, tp, rank % tp)] if tp_dimension is not None else []) + [(dimension, shards, rank // tp)]
            for rank in range(shards * tp)
        ]
        divided.append(divisions_of(shape, cuts))
        (*stack, rows, columns), (*own, own_rows, own_columns) = shape, part_of_first(shape, cuts[0])
        copies, sizes = tp if tp_dimension is None else 1, sorted((rows, columns))
        matrices.append(Matrices(*sizes, 1, *(stack or [1]), *(own or [1]), own_rows * own_columns, copies))
    parameters = [torch.empty(shape, device="meta") for shape, *_ in PARAMETERS]
    size = shards * tp
    rounds = deal(
        parameters, divided, lambda rows, columns: flops(rows, columns, STEPS), rank=0, size=size, replicas=replicas
    )
    sent = returned = broadcasts = passed_on = work = 0
    for dealt in rounds:
        here = [matrix for matrix in dealt if matrix.replica == 0]
        sent += sum(matrix.division.size(0) for matrix in here if 0 in matrix.division.senders)
        (owned,) = (matrix for matrix in here if matrix.owner == 0)
        returned += sum(owned.division.size(rank) for rank in range(size))
        work += flops(*owned.shape, STEPS)
        of_replica = [0] * replicas
        for matrix in dealt:
            of_replica[matrix.replica] += matrix.division.size(0)
        broadcasts += replicas - of_replica.count(0)
        passed_on += sum(of_replica)
    stage = Stage(0, True, 0, 0, 0, 0, 0, (), tuple(matrices), 0, (), wrapped=True, shared=())
    planned = owner_rounds([stage], size, replicas, torch.float32, torch.float32, STEPS)
    return planned, (2 * len(rounds), sent + returned, broadcasts, passed_on), work


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_rounds_are_those_that_are_dealt(shards: int, tp: int, replicas: int) -> None:
    planned, (calls, exchanged, broadcasts, passed_on), work = planned_and_dealt(shards, tp, replicas)
    expected = [
        *([("dp_shard x tp", "all-to-all", calls, 4 * exchanged, shards * tp)] if shards * tp > 1 else []),
        *([("dp_replicate", "broadcast", broadcasts, 4 * passed_on, replicas)] if replicas > 1 else []),
    ]
    found = [(part.axis, part.operation, part.calls, part.bytes, part.ranks) for part in planned.traffic]
    assert found == expected
    assert sum(product.flops for product in planned.products) == work


def test_only_muon_has_rounds_and_the_flops_are_those_of_the_model() -> None:
    adamw, muon = (
        estimate(config_of(4, (f"optimizer.name={name}", "parallelism.tp=2")), 4, device_type="cuda").ranks[0]
        for name in ("AdamW", "Muon")
    )
    assert adamw.owners == OwnerRounds()
    assert muon.owners.products
    assert muon.traffic == (*adamw.traffic, *muon.owners.traffic)
    assert (muon.flops, muon.recomputed_flops) == (adamw.flops, adamw.recomputed_flops)


def test_no_rank_of_a_pipeline_exchanges_what_it_does_not_have() -> None:
    """The last stage has only the output layer."""
    settings = ("optimizer.name=Muon", "parallelism.pp=2", 'parallelism.pp_split=["norm"]')
    first, last = estimate(config_of(4, settings), 4, device_type="cuda").ranks
    assert last.owners == OwnerRounds()
    assert [part.calls for part in first.owners.traffic] == [2 * 8 * 7 // 2]


def test_remedies_of_an_update_with_muon_reduce_its_rounds() -> None:
    settings = ("parallelism.dp_replicate=4", "optimizer.name=Muon", "optimizer.newton_schulz_dtype=float32")
    config = config_of(8, settings)
    dtype, optimizer = remedies(config, "update")
    assert "optimizer.newton_schulz_dtype" in dtype
    assert "AdamW" in optimizer

    def update_bytes(*changes: str) -> int:
        return estimate(config_of(8, (*settings, *changes)), 8, device_type="cuda").ranks[0].memory.update

    before = update_bytes()
    changes = ("optimizer.newton_schulz_dtype=bfloat16", "optimizer.name=AdamW")
    assert all(update_bytes(change) < before for change in changes)
