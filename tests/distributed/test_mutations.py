"""The comparison of gradients can fail: known mistakes of distributed training, planted one at a time, are seen."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed.gradients import replaced, step_errors
from tests.pool import run_ranks
from titanlite import trainer as trainer_module
from titanlite.data.loader import Batch
from titanlite.labels import IGNORE_INDEX
from titanlite.parallel.data import gradient_sync, wrapped_modules
from titanlite.trainer import Trainer


def mean_per_rank(trainer: Trainer) -> None:
    """Each rank divides by its own count, as if all ranks had as many valid tokens."""

    def count(batches: Sequence[Batch]) -> Tensor:
        local = torch.stack([(batch.labels != IGNORE_INDEX).sum() for batch in batches]).sum()
        return local * dist.get_world_size()

    trainer.count_valid_tokens = count


def averaging_reduction(trainer: Trainer) -> None:
    """The reduction divides by the number of ranks, which is what torch does unless told otherwise."""
    for module in wrapped_modules(trainer.model_parts[0]):
        module.set_gradient_divide_factor(float(dist.get_world_size()))


def accumulated_sums_reduced_again(trainer: Trainer) -> None:
    """After each microbatch the accumulated gradient, already reduced, is summed over the ranks once more."""
    forward_backward = trainer.forward_backward

    def reduce_again(batch: Batch, num_valid: Tensor) -> Tensor:
        before = [p.grad is not None for p in trainer.model_parts[0].parameters()]
        loss = forward_backward(batch, num_valid)
        for parameter, was_there in zip(trainer.model_parts[0].parameters(), before, strict=True):
            if was_there and parameter.grad is not None:
                dist.all_reduce(parameter.grad.to_local())
        return loss

    trainer.forward_backward = reduce_again


def bypassed_wrapper(trainer: Trainer) -> None:
    """The forward pass calls modules whose hooks are gone, so nothing gathers and nothing reduces."""
    for module in trainer.model_parts[0].modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()


@contextmanager
def without_last_sync() -> Iterator[None]:
    """No microbatch is ever the last one of its step."""

    @contextmanager
    def forgetful(parts: Sequence[nn.Module], policy: str, *, is_last: bool) -> Iterator[None]:
        del is_last
        with gradient_sync(parts, policy, is_last=False):
            yield

    with replaced(trainer_module, "gradient_sync", forgetful):
        yield


MUTATIONS: dict[str, tuple[Callable[[Trainer], None], list[str]]] = {
    "mean per rank": (mean_per_rank, []),
    "averaging reduction": (averaging_reduction, []),
    "accumulated sums reduced again": (accumulated_sums_reduced_again, ["parallelism.gradient_sync=every"]),
    "bypassed wrapper": (bypassed_wrapper, []),
}


def seen(settings: list[str], mutate: Callable[[Trainer], None] | None) -> str:
    """How the comparison answers: a relative error, or an exception."""
    try:
        return f"{step_errors(settings, 'uneven', 2, mutate).worst:.3e}"
    except (RuntimeError, AssertionError) as error:
        return type(error).__name__


def all_mutations(replicate: int, shard: int) -> dict[str, str]:
    layout = [
        f"parallelism.dp_replicate={replicate}",
        f"parallelism.dp_shard={shard}",
        "training.local_batch_size=4",
    ]
    found = {"none": seen(layout, None)}
    for name, (mutate, settings) in MUTATIONS.items():
        if mutate is accumulated_sums_reduced_again and shard > 1:
            continue  # shards of different ranks are different parameters: there is nothing to sum
        found[name] = seen([*layout, *settings], mutate)
    with without_last_sync():
        found["forgotten sync on the last microbatch"] = seen([*layout, "parallelism.gradient_sync=last"], None)
    return found


@pytest.mark.parametrize(("replicate", "shard"), [(2, 1), (1, 2)])
def test_each_mistake_is_seen(replicate: int, shard: int) -> None:
    for found in run_ranks(all_mutations, 2, replicate, shard):
        print(found)
        assert float(found.pop("none")) <= 1e-12
        assert len(found) == (5 if shard == 1 else 4)
        for name, answer in found.items():
            caught = answer in ("RuntimeError", "AssertionError") or float(answer) > 1e-3
            assert caught, f"{name} went unseen: {answer}"
