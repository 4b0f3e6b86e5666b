"""The plan's communication equals that of a real step: calls by axis, bytes gathered and sent."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.custom_loss import LOSS, registered
from tests.distributed.gradients import build_on_mesh
from tests.distributed.layouts import DEEPSEEK_V3, EXPERTS, FULL, FURTHER, GATHER, OLMOE, QWEN3_5, QWEN3_5_MOE, TIED
from tests.distributed.reference import global_batch, rank_batches, small_config
from tests.pool import run_ranks
from titanlite.planning.communication import Traffic
from titanlite.planning.estimate import estimate

# Data and tensor parallelism call different torch operations, which identifies their axes. Context parallelism that
# gathers calls those of tensor parallelism. Expert parallelism calls those of the other two. Muon's owners exchange
# matrices by the operation of context parallelism.
OPERATIONS = {
    "c10d::_allgather_base_": "dp_shard all-gather",
    "c10d::_reduce_scatter_base_": "dp_shard reduce-scatter",
    "c10d::allgather_into_tensor_coalesced_": "tp all-gather",
    "c10d::reduce_scatter_tensor_coalesced_": "tp reduce-scatter",
    "c10d::alltoall_base_": "cp all-to-all",
    "c10d::broadcast_": "dp_replicate broadcast",
    "c10d::send": "pp send",
    "c10d::allreduce_": "all-reduce",
}
SAME_OPERATIONS = {"expert_shard": "dp_shard", "ep": "cp", "dp_shard x tp": "cp"}
DEEP = ["model.n_layers=3", "training.local_batch_size=4"]
TP = ["parallelism.tp=2", "training.local_batch_size=8", "model.vocab_size=132"]
EP = ["parallelism.ep=2", *EXPERTS, "training.local_batch_size=4"]
PP = ["parallelism.pp=2", *DEEP, "model.n_layers=9"]
MUON = ["optimizer.name=Muon", "training.local_batch_size=4"]

SOAK = [
    ["parallelism.tp=2", *MUON],
    ["parallelism.pp=2", *MUON],
    ["parallelism.pp=2", "parallelism.pp_schedule=Interleaved1F1B", "model.n_layers=5", *MUON],
    ["parallelism.cp=2", *MUON],
    ["parallelism.dp_replicate=2", "parallelism.dp_shard=1", *MUON],
    ["parallelism.cp=2", "activation_checkpoint.mode=full", *GATHER, *DEEP],
    ["parallelism.fsdp_reshard_after_forward=always", *DEEP],
    ["activation_checkpoint.mode=full", *TP],
    ["parallelism.gradient_sync=last", *DEEP],
    ["activation_checkpoint.mode=selective", *TP],
    ["parallelism.fsdp_reshard_after_forward=never", *DEEP],
    ["model.family=qwen3", "model.head_dim=16", *TP],
    ["activation_checkpoint.mode=selective", "activation_checkpoint.selective_policy=layer", *TP],
    DEEP,
    ["parallelism.cp=2", *DEEP],
    ["parallelism.cp=2", "activation_checkpoint.mode=full", *EP],
    ["parallelism.cp=2", "activation_checkpoint.mode=selective", *EP],
    ["activation_checkpoint.mode=full", *EP],
    ["parallelism.pp=2", *TIED, *DEEP],
    [*DEEPSEEK_V3, *TP],
    [*DEEPSEEK_V3, "activation_checkpoint.mode=full", *TP],
    [*DEEPSEEK_V3, "activation_checkpoint.mode=selective", *TP],
    [*DEEPSEEK_V3, "parallelism.cp=2", *DEEP],
    [*DEEPSEEK_V3, "parallelism.cp=2", *GATHER, *DEEP],
    [*DEEPSEEK_V3, "parallelism.ep=2", "activation_checkpoint.mode=full", *DEEP],
    [*FURTHER, "activation_checkpoint.mode=full", *TP],
    [*FURTHER, "parallelism.pp=2", *DEEP],
    [*QWEN3_5, FURTHER[-1], *TP],
    [*QWEN3_5, "parallelism.cp=2", "activation_checkpoint.mode=full", *DEEP],
    [*QWEN3_5, "parallelism.cp=2", "activation_checkpoint.mode=selective", *GATHER, *DEEP],
    [*QWEN3_5_MOE, "activation_checkpoint.mode=selective", *TP],
    [*QWEN3_5_MOE, FURTHER[-1], "parallelism.ep=2", "parallelism.cp=2", "activation_checkpoint.mode=full", *DEEP],
]

LAYOUTS: dict[int, list[list[str]]] = {
    2: [TP, MUON, ["activation_checkpoint.mode=selective", *EP]],
    4: [
        ["parallelism.tp=2", "training.dtype=float32", "training.mixed_precision_param=bfloat16", *DEEP],
        *[
            ["parallelism.pp=2", "parallelism.pp_schedule=" + schedule, *DEEP, "model.n_layers=9"]
            for schedule in (
                *("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
                "DualPipeV",
            )
        ],
        ["parallelism.gradient_sync=every", "parallelism.tp=2", *PP],
        ["parallelism.tp=2", *TIED, *PP],
        EP,
        [*PP, *EP],
        ["parallelism.tp=2", *MUON],
        ["parallelism.dp_replicate=2", *MUON],
        ["parallelism.tp=2", "parallelism.dp_shard=2", "model.dim=40", "model.ffn_dim=50", *MUON],
        ["parallelism.dp_replicate=2", *EP, *MUON],
        ["parallelism.tp=2", *EP, *MUON],
        [*EP, *MUON],
    ],
}


def elements_by_name(function: Callable[[], object]) -> dict[str, list[int]]:
    """The number of elements of the first input of each operation that `function` calls, by the operation's name."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    found: dict[str, list[int]] = {}
    for event in profiler.events():
        if event.name in OPERATIONS or event.name.startswith("gloo:"):
            found.setdefault(event.name, []).append(math.prod(event.input_shapes[0]))
    return found


def calls_and_bytes(layouts: list[list[str]]) -> list[tuple[dict[str, int], int, dict[str, int], int]]:
    """Calls of a step by axis and operation; number of elements that this rank passes to all-gathers and sends.

    Then the calls of the update alone, and the elements that this rank passes to its all-to-alls.
    """
    found = []
    for settings in layouts:
        config = small_config(dist.get_world_size(), *settings)
        trainer, mesh = build_on_mesh(config)
        rows = 16 // mesh.data_degree
        pipelined = config.parallelism.pp > 1 and config.parallelism.gradient_sync != "every"
        accumulation = 1 if pipelined else rows // config.training.local_batch_size
        batches = rank_batches(global_batch("uneven"), mesh.data_rank, mesh.data_degree, accumulation)
        trainer.train_step(batches)
        step = elements_by_name(partial(trainer.train_step, batches))
        update = elements_by_name(partial(trainer.optimizer.step_if, torch.tensor(True)))
        elements = sum(step.get("gloo:all_gather", [])) + sum(step.get("gloo:send", []))
        calls, calls_of_update = (
            {
                axis if config.parallelism.tp > 1 else axis.replace("tp", "cp"): len(each[name])
                for name, axis in OPERATIONS.items()
                if name in each
            }
            for each in (step, update)
        )
        found.append((calls, elements, calls_of_update, sum(update.get("gloo:all_to_all", []))))
    return found


def _name(part: Traffic) -> str:
    """Of its axis, or of one with the same torch operations, and of its operation."""
    return f"{SAME_OPERATIONS.get(part.axis, part.axis)} {part.operation}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [(2, LAYOUTS[2]), *(pytest.param(*case, marks=pytest.mark.soak) for case in ((2, SOAK), (4, LAYOUTS[4])))],
)
def test_calls_and_bytes_match_a_real_step(world_size: int, layouts: list[list[str]]) -> None:
    ranks = run_ranks(calls_and_bytes, world_size, layouts)
    for number, settings in enumerate(layouts):
        config = small_config(world_size, *settings)
        plan = estimate(config, world_size, device_type="cpu")
        size = {"float64": 8, "bfloat16": 2}[config.training.mixed_precision_param]
        for pp_rank, rank in enumerate(plan.ranks):
            calls, elements, calls_of_update, exchanged = ranks[pp_rank * world_size // len(plan.ranks)][number]
            parts = [part for part in rank.traffic if part.operation != "all-reduce"]
            planned: Counter[str] = Counter()
            for part in parts:
                planned[_name(part)] += part.calls
            assert {key: count for key, count in calls.items() if key in planned} == planned, (settings, pp_rank)
            # In an all-gather over n ranks, each rank contributes 1/n of the output.
            contributed = sum(part.bytes / part.ranks for part in parts if part.operation == "all-gather")
            sent = sum(part.bytes for part in parts if part.operation == "send")
            assert contributed + sent == elements * size, (settings, pp_rank)
            owners = {_name(part): part for part in rank.owners.traffic}
            assert calls_of_update == {name: part.calls for name, part in owners.items()}, (settings, pp_rank)
            planned_exchange = sum(part.bytes for part in rank.owners.traffic if part.operation == "all-to-all")
            assert planned_exchange == exchanged * size, (settings, pp_rank)


@pytest.mark.soak
def test_all_reduces_of_norms_over_all_heads() -> None:
    """Those of olmoe, compared with qwen3_moe: all-reduces over other axes and of scalars are the same."""
    layouts = [[*family, *FULL, *TP] for family in (EXPERTS, OLMOE)]
    measured = [calls["all-reduce"] for calls, *_ in run_ranks(calls_and_bytes, 2, layouts)[0]]
    plans = [estimate(small_config(2, *settings), 2, device_type="cpu").ranks[0].traffic for settings in layouts]
    planned = [sum(part.calls for part in plan if part.operation == "all-reduce") for plan in plans]
    assert measured[1] - measured[0] == planned[1] - planned[0] > 0


def with_registered_loss(layouts: list[list[str]]) -> list[int]:
    """All-reduces of a step."""
    with registered():
        return [calls["all-reduce"] for calls, *_ in calls_and_bytes(layouts)]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world_size", "settings"),
    [(2, TP), (4, [*TP, "parallelism.pp=2", "parallelism.pp_schedule=InterleavedZeroBubble", "model.n_layers=4"])],
)
def test_all_reduces_of_a_registered_loss(world_size: int, settings: list[str]) -> None:
    """Those of its logits, and one for the denominators of its terms, compared with the cross-entropy's."""
    layouts = [settings, [*settings, f"loss.name={LOSS.name}"]]
    measured = run_ranks(with_registered_loss, world_size, layouts)[-1]
    with registered():
        plans = [estimate(small_config(world_size, *each), world_size, device_type="cpu") for each in layouts]
    planned = [sum(part.calls for part in plan.ranks[-1].traffic if part.operation == "all-reduce") for plan in plans]
    assert measured[1] - measured[0] == planned[1] - planned[0] + 1
