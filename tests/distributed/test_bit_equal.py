"""training.bit_equal: weights, optimizer state, losses and gradient norms are equal to the last bit on all meshes."""

from collections.abc import Iterable, Sequence
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.gradients import build_on_mesh, full_tensor, local_batches
from tests.distributed.layouts import ALL_OPTIMIZERS, EXPERTS, QWEN3
from tests.distributed.reference import global_batch, small_config
from tests.pool import run_ranks
from titanlite.config.schema import JobConfig
from titanlite.parallel.digest import combine, sum_of_bits, weights_digest
from titanlite.parallel.mesh import AXES
from titanlite.parallel.pipeline import SCHEDULES
from titanlite.trainer import Trainer

STEPS = 4
EXACT = (
    *("training.bit_equal=true", "training.dtype=float32", "training.global_batch_size=12", "training.max_norm=1.0"),
    *("optimizer.name=AdamW", "optimizer.lr=0.01", "model.dim=36", "model.ffn_dim=50", "model.n_heads=2"),
)
"""Odd sizes, so that shards are uneven and have tails; the norm is clipped in some steps, see test_cases_are_hard."""

Axes = tuple[int, int, int, int, int]
"""Degrees in the order of AXES."""
Case = tuple[Axes, tuple[str, ...]]
Table = dict[str, tuple[tuple[str, ...], Sequence[Case]]]
"""What is computed -> settings of all cases, and cases."""

EVERY, LAST = "parallelism.gradient_sync=every", "parallelism.gradient_sync=last"
FULL, BY_OP = "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"
PAIRS = ("training.local_batch_size=2", "parallelism.pp_microbatch_size=2")


def schedule(name: str) -> str:
    return f"parallelism.pp_schedule={name}"


QUICK: Table = {
    "plain": (
        (),
        [((1, 1, 2, 1, 1), ()), ((1, 2, 1, 1, 1), (EVERY,)), ((2, 1, 1, 1, 1), (schedule("ZBVZeroBubble"),))],
    ),
    "two rows, bfloat16": (
        (*PAIRS, "training.mixed_precision_param=bfloat16", "optimizer.ema_decay=0.9"),
        [((1, 1, 2, 1, 1), (EVERY, FULL)), ((2, 1, 1, 1, 1), (EVERY,))],
    ),
}
FOUR: Table = {
    "plain": (
        (),
        [
            ((1, 2, 2, 1, 1), (EVERY,)),
            ((2, 1, 2, 1, 1), (EVERY,)),
            ((2, 2, 1, 1, 1), (schedule("InterleavedZeroBubble"),)),
            ((1, 1, 4, 1, 1), (BY_OP,)),
        ],
    ),
    "all optimizers": (ALL_OPTIMIZERS[:4] + ALL_OPTIMIZERS[6:], [((1, 2, 2, 1, 1), ()), ((2, 1, 2, 1, 1), ())]),
    "experts": (EXPERTS, [((1, 2, 2, 1, 1), ()), ((2, 1, 2, 1, 1), ())]),
}
SOAK: Table = {
    "plain": (
        (),
        [
            *(((1, 1, 2, 1, 1), (sync,)) for sync in (EVERY, LAST)),
            *(((1, 2, 1, 1, 1), (sync,)) for sync in (FULL, LAST)),
            *(((2, 1, 1, 1, 1), (each,)) for each in (EVERY, FULL, BY_OP)),
            *(((2, 1, 1, 1, 1), (schedule(name),)) for name in ("GPipe", "DualPipeV", "InterleavedZeroBubble")),
            *(((1, 1, 3, 1, 1), (sync,)) for sync in (EVERY, LAST)),
            *(((1, 3, 1, 1, 1), (sync,)) for sync in (EVERY, LAST)),
            ((3, 1, 1, 1, 1), ()),
            *(((1, 2, 2, 1, 1), (sync,)) for sync in (LAST, FULL)),
            *(((2, 1, 2, 1, 1), (schedule(name),)) for name in ("LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble")),
            ((2, 2, 1, 1, 1), (schedule("DualPipeV"), EVERY)),
            ((1, 1, 5, 1, 1), (EVERY,)),
            ((1, 5, 1, 1, 1), ()),
            ((1, 2, 3, 1, 1), (EVERY,)),
            ((3, 1, 2, 1, 1), ()),
            ((1, 1, 8, 1, 1), ()),
            ((2, 2, 2, 1, 1), (EVERY,)),
            ((2, 2, 2, 1, 1), (schedule("ZBVZeroBubble"),)),
        ],
    ),
    "two rows": (
        PAIRS,
        [((1, 1, 3, 1, 1), (EVERY,)), ((2, 2, 1, 1, 1), ()), ((1, 1, 4, 1, 1), ()), ((1, 5, 1, 1, 1), ())],
    ),
    "bfloat16 weights": (
        ("training.dtype=bfloat16", "optimizer.state_dtype=bfloat16"),
        [((1, 1, 2, 1, 1), ()), ((2, 1, 1, 1, 1), ()), ((1, 3, 1, 1, 1), ()), ((1, 2, 2, 1, 1), (EVERY,))],
    ),
    "compiled": (
        ("compile.enable=true", "training.mixed_precision_param=bfloat16"),
        [((1, 1, 2, 1, 1), ()), ((2, 1, 1, 1, 1), ()), ((1, 2, 2, 1, 1), (EVERY,))],
    ),
    "SGD": (("optimizer.name=SGD", "optimizer.momentum=0.9"), [((1, 1, 2, 1, 1), ()), ((2, 2, 1, 1, 1), ())]),
    "Muon": (("optimizer.name=Muon", *QWEN3), [((1, 1, 2, 1, 1), ()), ((1, 1, 3, 1, 1), ()), ((2, 2, 1, 1, 1), ())]),
    "Lion": (("optimizer.name=Lion",), [((1, 2, 1, 1, 1), ()), ((2, 1, 2, 1, 1), ())]),
    "tied": (("model.tie_embeddings=true",), [((1, 2, 1, 1, 1), ()), ((1, 1, 3, 1, 1), (EVERY,))]),
}
NEEDS_MORE = {
    "tp": (((1, 1, 1, 1, 2), ()), [((1, 2, 1, 1, 2), ()), ((1, 1, 2, 1, 2), (EVERY,)), ((2, 1, 1, 1, 2), ())]),
    "cp": (((1, 1, 1, 2, 1), ()), [((1, 2, 1, 2, 1), ()), ((1, 1, 2, 2, 1), (EVERY,)), ((2, 1, 1, 2, 1), ())]),
}
"""Axes that change the shapes of products: equal among layouts with the same degrees of them."""


def config_of(case: Case, settings: Sequence[str]) -> JobConfig:
    axes, own = case
    degrees = (f"parallelism.{axis}={degree}" for axis, degree in zip(AXES, axes, strict=True))
    return small_config(prod(axes), *EXACT, *settings, *degrees, *own)


def trained(config: JobConfig) -> list[str]:
    """Losses, norms, digest of the weights; digest of each tensor of weights, averages and state of optimizers."""
    trainer, mesh = build_on_mesh(config)
    assert trainer.exact is not None
    numbers = []
    for step in range(STEPS):
        batch = global_batch("uneven", step, config.training.global_batch_size)
        stats = trainer.train_step(local_batches(config, mesh, batch))
        totals = torch.stack([stats.mean_loss, stats.loss_sum])
        dist.all_reduce(totals)
        numbers += [repr(totals.tolist()), repr(stats.grad_norm.item()), "skipped" if stats.skipped else "updated"]
    every: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, {name: digest({name: tensor}) for name, tensor in state_of(trainer)})
    merged: dict[str, str] = {}
    for found in every:
        for name, value in found.items():
            assert merged.setdefault(name, value) == value, name
    return [*numbers, weights_digest(trainer.exact), *(f"{name} {value}" for name, value in sorted(merged.items()))]


def digest(tensors: dict[str, Tensor]) -> str:
    named = {name: full_tensor(tensor.detach()) for name, tensor in tensors.items()}
    return combine(named, (int(sum_of_bits(each, each.shape, (0,) * each.dim())) for each in named.values()))


def state_of(trainer: Trainer) -> Iterable[tuple[str, Tensor]]:
    for part in trainer.model_parts:
        yield from part.named_parameters()
    yield from trainer.optimizer.named_state()
    yield from ((f"{name}/average", tensor) for name, tensor in trainer.average.tensors.items())
    assert trainer.exact is not None
    yield from ((f"{name}/largest", tensor) for name, tensor in trainer.exact.largest.items())


def run(cases: Sequence[tuple[Case, Sequence[str]]]) -> list[list[str]]:
    return [trained(config_of(case, settings)) for case, settings in cases]


def different(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    assert len(expected) == len(found)
    return [f"{one} | {other}" for one, other in zip(expected, found, strict=True) if one != other]


ALONE: Case = ((1, 1, 1, 1, 1), ())


def is_supported(own: Sequence[str]) -> bool:
    """Whether torch can split the backward pass, if the case needs it."""
    chosen = [SCHEDULES[shape] for shape in SCHEDULES if schedule(shape) in own]
    return torch.__version__ >= "2.13" or not any(shape.splits_backward for shape in chosen)


def compare(table: Table, alone: Case = ALONE) -> list[list[str]]:
    """Compare each case with `alone`; returns what `alone` gave with the settings of each row."""
    settings = [each for each, _ in table.values()]
    expected = run_ranks(run, prod(alone[0]), [(alone, each) for each in settings])[0]
    cases = [(n, case) for n, (_, row) in enumerate(table.values()) for case in row if is_supported(case[1])]
    for size in sorted({prod(axes) for _, (axes, _) in cases}):
        own = [(n, case) for n, case in cases if prod(case[0]) == size]
        results = run_ranks(run, size, [(case, settings[n]) for n, case in own])[0]
        for (n, case), found in zip(own, results, strict=True):
            assert not different(expected[n], found), (case, settings[n])
    return expected


def test_two_ranks_have_the_bits_of_one() -> None:
    first, *_ = compare(QUICK)
    norms = [float(text) for text in first[1 : 3 * STEPS : 3]]
    assert "skipped" not in first
    assert min(norms) < 1 < max(norms), "the norm is clipped in some steps only"


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_one() -> None:
    compare(FOUR)


@pytest.mark.soak
def test_all_layouts_have_the_bits_of_one_process() -> None:
    count = sum(len(cases) for table in (QUICK, FOUR, SOAK) for _, cases in table.values())
    assert count == 61, "docs/numerics.md has this number"
    compare(SOAK)
    for alone, cases in NEEDS_MORE.values():
        compare({"": ((), cases)}, alone)
