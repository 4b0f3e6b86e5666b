"""What one step does beside its gradients: collectives, host reads, withheld updates, replicas that stay alike."""

import hashlib
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.gradients import build_on_mesh, whole
from tests.distributed.reference import global_batch, plain_model, rank_batches, small_config
from tests.pool import run_ranks
from titanlite.trainer import Trainer


class OperationCount(TorchDispatchMode):
    """Counts c10d operations by name, and refuses to let the host read a tensor."""

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
    """(trainer, data rank, data degree)"""
    trainer, data_mesh = build_on_mesh(small_config(dist.get_world_size(), *settings))
    return trainer, data_mesh.get_local_rank(), data_mesh.size()


def collectives_of_a_step(settings: list[str], accumulation: int) -> dict[str, int]:
    local_batch_size = 16 // (dist.get_world_size() * accumulation)
    trainer, rank, degree = on_mesh(f"training.local_batch_size={local_batch_size}", *settings)
    batches = rank_batches(global_batch("uneven"), rank, degree, accumulation)
    trainer.train_step(batches)  # the first step also sets things up
    with OperationCount() as count:
        trainer.train_step(batches)
    return dict(count.collectives)


GROUPS = 4  # embedding, two blocks, head: the units that the plan names


def test_a_step_reads_nothing_on_the_host_and_reduces_as_often_as_its_policy_says() -> None:
    replicate = ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"]
    for sync, reductions in (("last", GROUPS), ("hybrid", GROUPS), ("every", 4 * GROUPS)):
        found = run_ranks(collectives_of_a_step, 2, [*replicate, f"parallelism.gradient_sync={sync}"], 4)
        # One more for the number of valid tokens.
        assert found == [{"allreduce": reductions + 1}] * 2, sync
    for sync, scatters in (("last", GROUPS), ("hybrid", 4 * GROUPS), ("every", 4 * GROUPS)):
        for found_on_rank in run_ranks(collectives_of_a_step, 2, [f"parallelism.gradient_sync={sync}"], 4):
            assert found_on_rank["reduce_scatter_base"] == scatters, sync
            # The number of valid tokens, and the sum of squares of the gradient norm.
            assert found_on_rank["allreduce"] == 2, sync


@pytest.mark.slow
def test_hybrid_sharding_reduces_over_replicas_once() -> None:
    for sync, scatters, reductions in (("last", 1, 1), ("hybrid", 4, 1), ("every", 4, 4)):
        settings = ["parallelism.dp_replicate=2", f"parallelism.gradient_sync={sync}"]
        for found in run_ranks(collectives_of_a_step, 4, settings, 4):
            assert found["reduce_scatter_base"] == scatters * GROUPS, sync
            assert found["allreduce"] == reductions * GROUPS + 2, sync


OPTIMIZERS = {
    "fused AdamW": ["optimizer.name=AdamW", "optimizer.implementation=fused"],
    "foreach AdamW": ["optimizer.name=AdamW", "optimizer.implementation=foreach"],
    "for-loop AdamW": ["optimizer.name=AdamW", "optimizer.implementation=for-loop"],
    "foreach SGD": ["optimizer.name=SGD", "optimizer.implementation=foreach"],
    "for-loop SGD": ["optimizer.name=SGD", "optimizer.implementation=for-loop"],
}


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of weights, moments and step counts, this rank's parts."""
    state = {}
    for name, parameter in trainer.model_parts[0].named_parameters():
        state[name] = parameter.detach()
        for key, value in trainer.optimizer.optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = value
    return {k: (v.to_local() if isinstance(v, DTensor) else v).clone() for k, v in state.items()}


def poison(trainer: Trainer, rank: int) -> Any:
    """One rank's activations become NaN."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        del module, args
        return out * float("nan") if rank == dist.get_world_size() - 1 else out

    return trainer.model_parts[0].layers["0"].feed_forward.w1.register_forward_hook(hook)


def withheld_update(settings: list[str], fault: str, first_step: bool) -> list[str]:
    """Names of what a withheld update changed, and of what the step after it did otherwise than in a run without."""
    trainer, rank, degree = on_mesh("lr_schedule.warmup_steps=0", *settings)
    control, _, _ = on_mesh("lr_schedule.warmup_steps=0", *settings)
    good = rank_batches(global_batch("uneven"), rank, degree, 1)
    if not first_step:
        for one in (trainer, control):
            assert not bool(one.train_step(good).skipped)
    before = state_of(trainer)
    if fault == "no valid token":
        stats = trainer.train_step(rank_batches(global_batch("none"), rank, degree, 1))
        assert stats.mean_loss == stats.grad_norm == 0.0  # not 0 / 0
    else:
        handle = poison(trainer, rank)
        stats = trainer.train_step(good)
        handle.remove()
    assert bool(stats.skipped)
    after = state_of(trainer)
    for name in after.keys() - before.keys():  # state that the withheld first step created: nothing has happened yet
        before[name] = torch.zeros_like(after[name])
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert after.keys() == before.keys()
    for one in (trainer, control):
        assert not bool(one.train_step(good).skipped)
    left, right = state_of(trainer), state_of(control)
    return changed + [f"next step: {name}" for name in right if not torch.equal(left[name], right[name])]


def all_withheld_updates(layout: list[str]) -> dict[str, list[str]]:
    found = {}
    for name, settings in OPTIMIZERS.items():
        for fault in ("no valid token", "NaN on one rank"):
            for first_step in (True, False):
                case = f"{name}, {fault}, {'first' if first_step else 'second'} step"
                found[case] = withheld_update([*layout, *settings, "training.local_batch_size=8"], fault, first_step)
    return found


@pytest.mark.parametrize("layout", [["parallelism.dp_replicate=2", "parallelism.dp_shard=1"], []])
def test_an_update_happens_only_with_a_valid_token_and_a_finite_norm(layout: list[str]) -> None:
    for found in run_ranks(all_withheld_updates, 2, layout):
        assert len(found) == 4 * len(OPTIMIZERS)
        assert {case: names for case, names in found.items() if names} == {}


def digest_after_steps(settings: list[str]) -> tuple[str, str]:
    """Digests of the weights after several steps and of the initial ones, by the whole tensors."""
    trainer, rank, degree = on_mesh("training.local_batch_size=2", "optimizer.name=AdamW", *settings)
    digests = []
    for steps in (0, 4):
        for step in range(steps):
            trainer.train_step(rank_batches(global_batch("uneven", step), rank, degree, 16 // (2 * degree)))
        hasher = hashlib.sha256()
        for parameter in trainer.model_parts[0].parameters():
            hasher.update(whole(parameter.detach()).numpy().tobytes())
        digests.append(hasher.hexdigest())
    return digests[0], digests[1]


@pytest.mark.slow
def test_replicas_stay_alike_and_repeats_are_bit_identical() -> None:
    for settings in (["parallelism.dp_replicate=4", "parallelism.dp_shard=1"], ["parallelism.dp_replicate=2"]):
        ranks = [tuple(digests) for digests in run_ranks(digest_after_steps, 4, settings)]
        again = [tuple(digests) for digests in run_ranks(digest_after_steps, 4, settings)]
        assert len({*ranks, *again}) == 1
        assert ranks[0][0] != ranks[0][1]


def shapes_of_the_parameters(settings: list[str]) -> list[str]:
    trainer, _, _ = on_mesh("training.local_batch_size=1", *settings)
    model = trainer.model_parts[0]
    state = model.state_dict()
    assert set(state) == {name for name, _ in plain_model(small_config(dist.get_world_size())).named_parameters()}
    tensors = [*model.parameters(), *state.values()]
    return sorted({f"{tensor.device_mesh.mesh_dim_names} {tensor.placements}" for tensor in tensors})


def test_replicated_parameters_live_on_a_mesh_of_one_axis() -> None:
    replicate = ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"]
    assert run_ranks(shapes_of_the_parameters, 2, replicate) == [["('dp_replicate',) (Replicate(),)"]] * 2


def mixed_precision(settings: list[str]) -> list[str]:
    """Dtypes seen in a running step: activations of a block, gradients, their reduction."""
    trainer, rank, degree = on_mesh(
        "training.dtype=float32",
        "training.local_batch_size=1",
        "training.mixed_precision_param=bfloat16",
        "training.mixed_precision_reduce=float32",
        *settings,
    )
    seen = set()
    model = trainer.model_parts[0]
    model.layers["0"].feed_forward.register_forward_hook(lambda *seen_by: seen.add(f"activation {seen_by[2].dtype}"))
    with OperationCount() as count:
        trainer.train_step(rank_batches(global_batch("uneven"), rank, degree, 16 // degree))
    seen |= {f"reduced {dtype}" for dtype in count.reduced_dtypes}
    seen |= {f"parameter {parameter.dtype}" for parameter in model.parameters()}
    seen |= {f"gradient {parameter.grad.dtype}" for parameter in model.parameters() if parameter.grad is not None}
    return sorted(seen)


@pytest.mark.slow
def test_mixed_precision_is_in_force_on_every_mesh() -> None:
    expected = [
        "activation torch.bfloat16",
        "gradient torch.float32",
        "parameter torch.float32",
        "reduced torch.float32",
        "reduced torch.int64",  # the number of valid tokens
    ]
    replicate = ["parallelism.dp_replicate=2", "parallelism.dp_shard=1"]
    assert run_ranks(mixed_precision, 1, []) == [expected]
    assert run_ranks(mixed_precision, 2, replicate) == [expected] * 2
    # one dtype for computing and reducing, and another one for the parameters
    both = [line if line != "reduced torch.float32" else "reduced torch.bfloat16" for line in expected]
    assert run_ranks(mixed_precision, 1, ["training.mixed_precision_reduce=bfloat16"]) == [sorted(both)]
    # the sum of squares of sharded gradients
    assert run_ranks(mixed_precision, 2, []) == [sorted([*expected, "reduced torch.float64"])] * 2
