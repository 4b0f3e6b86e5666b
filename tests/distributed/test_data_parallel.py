"""Data-parallel layouts have the gradients of one process for all masks and accumulation factors, not in all pairs."""

import math
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile

from tests.distributed.documents import packed_batch
from tests.distributed.gradients import build_without_updates, compare, full_tensor, has_weights, local_batches
from tests.distributed.layouts import EXPERTS
from tests.distributed.reference import global_batch, reference_step, small_config
from tests.pool import run_ranks
from titanlite.parallel import data
from titanlite.parallel.data import cast_parameters, running_dtypes, set_gradient_sync, wrapped_modules
from titanlite.parallel.mesh import GradientSync

GATHER, EXCHANGE = "c10d::_allgather_base_", "c10d::alltoall_base_"
"""Operations of FSDP, and of expert parallelism."""
BOUNDS = {"float64": 1e-12, "float32": 1e-5}
LAYOUTS = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2)]}
"""World size: (dp_replicate, dp_shard)."""
MASKS = {"uneven": (1, 4), "silent_ranks": (2,)}
"""Masks: accumulation factors."""


def all_cases(
    layouts: list[tuple[int, int]], dtype: str, at_once_bytes: int = data.AT_ONCE_BYTES
) -> dict[str, tuple[float, str, bool]]:
    """Case: (worst relative error, its parameter, same initial weights). Steps do not update weights."""
    errors = {}
    for replicate, shard in layouts:
        for sync in ("every", "last", "hybrid"):
            config = small_config(
                replicate * shard,
                f"training.dtype={dtype}",
                f"parallelism.dp_replicate={replicate}",
                f"parallelism.dp_shard={shard}",
                f"parallelism.gradient_sync={sync}",
            )
            with patch.object(data, "AT_ONCE_BYTES", at_once_bytes):
                trainer, mesh = build_without_updates(config)
            for masks, accumulations in MASKS.items():
                batch = global_batch(masks)
                reference = reference_step(config, batch)
                for accumulation in accumulations:
                    same = has_weights(trainer, reference.weights)
                    stats = trainer.train_step(local_batches(config, mesh, batch, accumulation))
                    found = compare(trainer, stats.mean_loss, stats.grad_norm, reference, same)
                    case = f"replicate {replicate} x shard {shard}, {sync}, accumulation {accumulation}, {masks}"
                    errors[case] = (found.worst, found.parameter, found.same_initial_weights)
    return errors


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        (1, "float64"),
        pytest.param(2, "float64", marks=pytest.mark.slow),
        pytest.param(1, "float32", marks=pytest.mark.slow),
        pytest.param(2, "float32", marks=pytest.mark.soak),
        pytest.param(4, "float64", marks=pytest.mark.soak),
    ],
)
def test_gradients_are_those_of_one_process(world_size: int, dtype: str) -> None:
    for rank, errors in enumerate(run_ranks(all_cases, world_size, LAYOUTS[world_size], dtype)):
        assert len(errors) == 9 * len(LAYOUTS[world_size])
        for case, (worst, parameter, same_initial_weights) in errors.items():
            assert same_initial_weights, f"rank {rank}: {case}: initial weights differ"
            assert worst <= BOUNDS[dtype], f"rank {rank}: {case}: {parameter} is off by {worst:.1e}"


@pytest.mark.slow
def test_gradients_reduced_unit_by_unit_are_those_of_one_process() -> None:
    """As on a GPU, or of a large model."""
    for errors in run_ranks(all_cases, 2, [(2, 1)], "float64", 0):
        assert len(errors) == 9
        assert max(worst for worst, _, same in errors.values() if same) <= BOUNDS["float64"], errors


@pytest.mark.parametrize(
    ("policy", "is_last", "reduce", "over_replicas"),
    [
        ("every", False, True, True),
        ("hybrid", False, True, False),
        ("last", False, False, False),
        *((policy, True, True, True) for policy in ("every", "hybrid", "last")),
    ],
)
def test_gradient_sync_flags_of_a_microbatch(
    policy: GradientSync, is_last: bool, reduce: bool, over_replicas: bool
) -> None:
    """Gradients do not show all flags: parameters could stay gathered, buffers could wait for the last backward."""
    root = Mock(spec=FSDPModule)
    set_gradient_sync([root, nn.Identity()], policy, is_last=is_last)
    root.set_requires_gradient_sync.assert_called_once_with(reduce)
    root.set_requires_all_reduce.assert_called_once_with(over_replicas)
    root.set_reshard_after_backward.assert_called_once_with(reduce)
    root.set_is_last_backward.assert_called_once_with(is_last)


MIXED = ("training.dtype=float32", "training.mixed_precision_param=bfloat16")


def differing_gradients(names: list[str]) -> list[str]:
    """Parameters whose gradients of a microbatch differ between casts on one process and `replicate`."""
    torch._dynamo.reset()
    found, settings = [], [name for name in names if name not in DOCUMENTS]
    for reduce in ("float32", "float64"):  # the gradient is accumulated in another dtype than it is kept in: wrapped
        config = small_config(1, *MIXED, f"training.mixed_precision_reduce={reduce}", *settings)
        trainer, mesh = build_without_updates(config)
        model = trainer.model_parts[0]
        assert any(wrapped_modules(model)) == (reduce == "float64")
        assert running_dtypes(model) == (torch.float32, torch.bfloat16, getattr(torch, reduce))
        batch = packed_batch(16) if names == DOCUMENTS else global_batch("uneven")
        trainer.train_step(local_batches(config, mesh, batch, 1))
        found.append({name: full_tensor(parameter.grad) for name, parameter in model.named_parameters()})
    own, wrapped = found
    assert own.keys() == wrapped.keys()
    assert {gradient.dtype for gradient in own.values()} == {torch.float32}
    return [name for name, gradient in own.items() if not torch.equal(gradient, wrapped[name])]


TIED = ["model.tie_embeddings=true"]
FULL, BY_OP = ["activation_checkpoint.mode=full"], ["activation_checkpoint.mode=selective"]
DOCUMENTS = ["documents"]
COMPILED = ["compile.enable=true", "compile.backend=aot_eager"]


@pytest.mark.parametrize(
    ("settings", "differing"),
    [
        ([], []),
        (TIED, ["tok_embeddings.weight"]),  # its two gradients are added in float32, not in bfloat16
        (FULL, []),
        (BY_OP, []),
        (DOCUMENTS, []),  # its mask is float32, in which attention computes on CPUs
        ([*EXPERTS], []),
        pytest.param(COMPILED, [], marks=pytest.mark.slow),
        pytest.param([*COMPILED, *FULL], [], marks=pytest.mark.soak),
        pytest.param([*COMPILED, *BY_OP], [], marks=pytest.mark.soak),
    ],
)
def test_one_process_casts_parameters_without_a_wrapper(settings: list[str], differing: list[str]) -> None:
    """Bit for bit the gradients of `replicate`, which copies each gradient several times."""
    assert run_ranks(differing_gradients, 1, settings) == [differing]


def test_blocks_that_cast_their_parameters_share_compiled_graphs() -> None:
    """A class of its own for each block would compile each block."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False)) for _ in range(3)))
    cast_parameters(model, torch.bfloat16)
    torch._dynamo.reset()
    counter = CompileCounter()
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for block in model:
        torch.compile(block.forward, backend=counter)(x)
    assert counter.frame_count == 1


def gathers_and_exchanges() -> str:
    """Those of a step, in order: a letter for each gather, by size of the unit; x: an exchange of experts."""
    config = small_config(4, *EXPERTS, "parallelism.ep=2", "model.n_layers=3", "training.local_batch_size=4")
    trainer, mesh = build_without_updates(config)
    batches = local_batches(config, mesh, global_batch("uneven"))
    trainer.train_step(batches)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        trainer.train_step(batches)
    events = [event for event in profiler.events() if event.name in (GATHER, EXCHANGE)]
    events.sort(key=lambda event: event.time_range.start)
    sizes = sorted({math.prod(event.input_shapes[0]) for event in events if event.name == GATHER})
    letters = dict(zip(sizes, "ahbe", strict=True))  # embedding, head, block, experts
    return "".join("x" if event.name == EXCHANGE else letters[math.prod(event.input_shapes[0])] for event in events)


@pytest.mark.slow
def test_experts_of_the_next_block_are_gathered_before_the_host_waits() -> None:
    """It waits before the second exchange of a block; in backward, a block exchanges twice."""
    forward, backward = "abebexxxbexxxhxxx", "bebexxbexxaxx"
    assert run_ranks(gathers_and_exchanges, 4) == [forward + backward] * 4
