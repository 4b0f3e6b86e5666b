"""Training step: collectives, host reads, skipped updates, identical replicas."""

import hashlib
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.gradients import build_on_mesh, full_tensor
from tests.distributed.reference import global_batch, plain_model, rank_batches, small_config
from tests.pool import run_ranks
from titanlite.batch import Batch
from titanlite.parallel import data
from titanlite.trainer import Trainer


class OperationCount(TorchDispatchMode):
    """Count c10d operations by name; fail if the host reads a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.reduced_dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert "_local_scalar_dense" not in name, "the host reads a tensor"
        if name.startswith("c10d."):
            self.collectives[name.removeprefix("c10d.").split(".")[0].strip("_")] += 1
            if "reduce" in name:
                tensors = args[0] if isinstance(args[0], list) else [args[0]]
                self.reduced_dtypes |= {tensor.dtype for tensor in tensors}
        return func(*args, **(kwargs or {}))


def on_mesh(*settings: str) -> tuple[Trainer, int, int]:
    """Build a trainer; return (trainer, data rank, data degree)."""
    trainer, mesh = build_on_mesh(small_config(dist.get_world_size(), *settings))
    return trainer, mesh.data_rank, mesh.data_degree


def collectives_of_steps(layouts: list[list[str]], at_once_bytes: int = data.AT_ONCE_BYTES) -> list[dict[str, int]]:
    """Number of collectives by name in a step of two microbatches, for each layout."""
    found = []
    for settings in layouts:
        with patch.object(data, "AT_ONCE_BYTES", at_once_bytes):
            trainer, rank, degree = on_mesh(*settings)
        batches = rank_batches(global_batch("uneven"), rank, degree, 2)
        trainer.train_step(batches)  # the first step also initializes
        with OperationCount() as count:
            trainer.train_step(batches)
        found.append(dict(count.collectives))
    return found


GROUPS = 4  # FSDP units: embedding, two blocks, head
REPLICATE = ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"]


def test_step_has_no_host_reads_and_the_reductions_of_its_policy() -> None:
    replicated = {"last": 1, "hybrid": 1, "every": 2}  # a small model on a CPU
    sharded = {"last": GROUPS, "hybrid": 2 * GROUPS, "every": 2 * GROUPS}
    layouts = [[*REPLICATE, f"parallelism.gradient_sync={sync}"] for sync in replicated]
    layouts += [[f"parallelism.gradient_sync={sync}"] for sync in sharded]
    for found in run_ranks(collectives_of_steps, 2, layouts):
        # One more for the number of valid tokens.
        assert found[:3] == [{"allreduce": reductions + 1} for reductions in replicated.values()]
        assert [counts["reduce_scatter_base"] for counts in found[3:]] == list(sharded.values())
        # The number of valid tokens, and the sum of squares of the gradient norm.
        assert [counts["allreduce"] for counts in found[3:]] == [2, 2, 2]
    for found in run_ranks(collectives_of_steps, 2, layouts[:3], 0):
        assert found == [{"allreduce": reductions * GROUPS + 1} for reductions in replicated.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policies",
    [{"hybrid": (2, 1)}, pytest.param({"last": (1, 1), "every": (2, 2)}, marks=pytest.mark.soak)],
    ids=["hybrid", "others"],
)
def test_hybrid_sharding_reduces_over_replicas_once(policies: dict[str, tuple[int, int]]) -> None:
    layouts = [["parallelism.dp_replicate=2", f"parallelism.gradient_sync={sync}"] for sync in policies]
    for ranks in run_ranks(collectives_of_steps, 4, layouts):
        for found, (scatters, reductions) in zip(ranks, policies.values(), strict=True):
            assert found["reduce_scatter_base"] == scatters * GROUPS, found
            assert found["allreduce"] == reductions * GROUPS + 2, found


OPTIMIZERS = {
    "AdamW": ["optimizer.name=AdamW"],
    "SGD": ["optimizer.name=SGD"],
    "SGD with momentum": ["optimizer.name=SGD", "optimizer.momentum=0.9"],
    "Lion": ["optimizer.name=Lion"],
    "Muon": ["optimizer.name=Muon"],
    "AdamW with bfloat16 moments": ["optimizer.name=AdamW", "optimizer.state_dtype=bfloat16"],
}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of this rank's weights, moments and step counts."""
    state = {}
    for name, parameter in trainer.model_parts[0].named_parameters():
        state[name] = parameter.detach()
    state |= trainer.optimizer.named_state()
    return {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def poison(trainer: Trainer, rank: int) -> Any:
    """Make the activations of the last rank NaN."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        del module, args
        return out * float("nan") if rank == dist.get_world_size() - 1 else out

    return trainer.model_parts[0].layers["0"].feed_forward.w1.register_forward_hook(hook)


def good_batches(rank: int, degree: int) -> list[Batch]:
    return rank_batches(global_batch("uneven"), rank, degree, 1)


def undisturbed_states(settings: list[str]) -> list[dict[str, Tensor]]:
    """States after the first and the second step."""
    trainer, rank, degree = on_mesh(*settings)
    states = []
    for _ in range(2):
        assert not bool(trainer.train_step(good_batches(rank, degree)).skipped)
        states.append(state_of(trainer))
    return states


def skipped_updates(settings: list[str], fault: str, undisturbed: list[dict[str, Tensor]]) -> list[str]:
    """Skip a step before the first update and before the second.

    Returns names of tensors that a skipped step changed, or that differ from `undisturbed` after the next update.
    """
    trainer, rank, degree = on_mesh(*settings)
    problems = []
    for number, expected in enumerate(undisturbed, 1):
        before = state_of(trainer)
        if fault == "no valid token":
            stats = trainer.train_step(rank_batches(global_batch("none"), rank, degree, 1))
            assert stats.mean_loss == stats.grad_norm == 0.0  # not 0 / 0
        else:
            handle = poison(trainer, rank)
            stats = trainer.train_step(good_batches(rank, degree))
            handle.remove()
        assert bool(stats.skipped)
        after = state_of(trainer)
        for name in after.keys() - before.keys():  # a skipped first step creates state, which must be 0
            before[name] = torch.zeros_like(after[name])
        assert after.keys() == before.keys()
        problems += [f"{name} before update {number}" for name in after if not torch.equal(after[name], before[name])]
        assert not bool(trainer.train_step(good_batches(rank, degree)).skipped)
        state = state_of(trainer)
        problems += [f"{name} by update {number}" for name in expected if not torch.equal(state[name], expected[name])]
    return problems


def all_skipped_updates(layout: list[str], optimizers: list[str]) -> dict[str, list[str]]:
    found = {}
    for name in optimizers:
        settings = [*layout, *OPTIMIZERS[name], "lr_schedule.warmup_steps=0", "training.local_batch_size=8"]
        undisturbed = undisturbed_states(settings)
        for fault in ("no valid token", "NaN on one rank"):
            found[f"{name}, {fault}"] = skipped_updates(settings, fault, undisturbed)
    return found


FUSED = "AdamW"


@pytest.mark.parametrize(
    ("layout", "optimizers"),
    [
        ([], [FUSED]),
        pytest.param([], ["Muon"], marks=pytest.mark.slow),  # all: tests/unit/optim/test_optimizer.py
        pytest.param([], [name for name in OPTIMIZERS if name not in (FUSED, "Muon")], marks=pytest.mark.soak),
        pytest.param(REPLICATE, [FUSED, "SGD"], marks=pytest.mark.soak),
    ],
)
def test_updates_require_a_valid_token_and_a_finite_norm(layout: list[str], optimizers: list[str]) -> None:
    for found in run_ranks(all_skipped_updates, 2, layout, optimizers):
        assert len(found) == 2 * len(optimizers)
        assert {case: names for case, names in found.items() if names} == {}


def digests_after_steps(settings: list[str]) -> tuple[str, str]:
    """SHA-256 of the full weights: initially and after several steps."""
    trainer, rank, degree = on_mesh("training.local_batch_size=2", "optimizer.name=AdamW", *settings)
    digests = []
    for steps in (0, 4):
        for step in range(steps):
            trainer.train_step(rank_batches(global_batch("uneven", step), rank, degree, 16 // (2 * degree)))
        hasher = hashlib.sha256()
        for parameter in trainer.model_parts[0].parameters():
            hasher.update(full_tensor(parameter.detach()).numpy().tobytes())
        digests.append(hasher.hexdigest())
    return digests[0], digests[1]


def repeated_digests(layouts: list[list[str]]) -> list[list[tuple[str, str]]]:
    return [[digests_after_steps(settings) for _ in range(2)] for settings in layouts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism.dp_replicate=2"],
        pytest.param(["parallelism.dp_replicate=4", "parallelism.dp_shard=1"], marks=pytest.mark.soak),
    ],
)
def test_replicas_and_repeats_are_bit_identical(layout: list[str]) -> None:
    for ranks in zip(*run_ranks(repeated_digests, 4, [layout]), strict=True):
        ((initial, trained),) = {tuple(digests) for repeats in ranks for digests in repeats}
        assert initial != trained


def placements_of_the_parameters(settings: list[str]) -> list[str]:
    trainer, _, _ = on_mesh("training.local_batch_size=1", *settings)
    model = trainer.model_parts[0]
    state = model.state_dict()
    assert set(state) == {name for name, _ in plain_model(small_config(dist.get_world_size())).named_parameters()}
    tensors = [*model.parameters(), *state.values()]
    return sorted({f"{tensor.device_mesh.mesh_dim_names} {tensor.placements}" for tensor in tensors})


@pytest.mark.slow
def test_replicated_parameters_have_a_mesh_of_one_axis() -> None:
    assert run_ranks(placements_of_the_parameters, 2, REPLICATE) == [["('dp_replicate',) (Replicate(),)"]] * 2


def mixed_precision(settings: list[str]) -> list[str]:
    """Dtypes seen in a running step: activations of a block, gradients, their reduction."""
    trainer, rank, degree = on_mesh(
        "training.dtype=float32",
        "training.local_batch_size=4",
        "training.mixed_precision_param=bfloat16",
        "training.mixed_precision_reduce=float32",
        *settings,
    )
    seen = set()
    model = trainer.model_parts[0]
    model.layers["0"].feed_forward.register_forward_hook(
        lambda *hook_args: seen.add(f"activation {hook_args[2].dtype}")
    )
    with OperationCount() as count:
        trainer.train_step(rank_batches(global_batch("uneven"), rank, degree, 4 // degree))
    seen |= {f"reduced {dtype}" for dtype in count.reduced_dtypes}
    seen |= {f"parameter {parameter.dtype}" for parameter in model.parameters()}
    seen |= {f"gradient {parameter.grad.dtype}" for parameter in model.parameters() if parameter.grad is not None}
    return sorted(seen)


def mixed_precisions(layouts: list[list[str]]) -> list[list[str]]:
    return [mixed_precision(settings) for settings in layouts]


@pytest.mark.slow
def test_mixed_precision_applies_on_every_mesh() -> None:
    expected = [
        "activation torch.bfloat16",
        "gradient torch.float32",
        "parameter torch.float32",
        "reduced torch.float32",
        "reduced torch.int64",  # the number of valid tokens
    ]
    # One process reduces nothing, unless gradients accumulate in another dtype than that of the parameters.
    cast = [line for line in expected if line != "reduced torch.float32"]
    alone = [[], ["training.mixed_precision_reduce=bfloat16"]]
    assert run_ranks(mixed_precisions, 1, alone) == [[cast, sorted([*cast, "reduced torch.bfloat16"])]]
    # the sum of squares of sharded gradients
    sharded = sorted([*expected, "reduced torch.float64"])
    assert run_ranks(mixed_precisions, 2, [REPLICATE, []]) == [[expected, sharded]] * 2


EXACT = ("training.bit_equal=true", "training.dtype=float32", "training.local_batch_size=1")


def state_around_the_update(*settings: str) -> list[list[bool]]:
    """Whether state that checkpoints have is as before the step: when before_update is called, and after the step."""
    trainer, rank, degree = on_mesh("optimizer.name=AdamW", "faults.spike_factor=3.0", *settings)
    batches = rank_batches(global_batch("uneven"), rank, degree, 1 if settings else 2)
    assert trainer.spikes is not None
    trainer.train_step(batches)
    tensors = [*trainer.model_parts[0].parameters(), *(value for _, value in trainer.optimizer.named_state())]
    tensors.append(trainer.spikes.norms)
    if trainer.exact is not None:
        tensors += trainer.exact.largest.values()
    before = [tensor.clone() for tensor in tensors]
    found: list[list[bool]] = []

    def compare() -> None:
        found.append([torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True)])

    trainer.before_update = compare
    trainer.train_step(batches)
    compare()
    return found


def test_state_of_checkpoints_is_unchanged_until_the_call_before_the_update() -> None:
    """The copies of an asynchronous save run until then."""
    for settings, extra in (((), 0), (EXACT, 21)):
        ((unchanged, changed),) = run_ranks(state_around_the_update, 1, *settings)
        assert all(unchanged)
        assert not any(changed)
        assert extra == 0 or len(unchanged) > extra
