"""training.bit_equal: weights, optimizer state, losses and gradient norms are equal to the last bit on all meshes."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.distributed.gradients import CPU, build_on_mesh, full_tensor, local_batches
from tests.distributed.layouts import ALL_OPTIMIZERS, EXPERTS, GEMMA2, QWEN3, QWEN3_5, QWEN3_5_MOE
from tests.distributed.reference import global_batch, small_config
from tests.distributed.test_float8 import small_blocks
from tests.distributed.test_watch import PLUGIN
from tests.pool import run_ranks
from titanlite.batch import Batch
from titanlite.config.schema import JobConfig
from titanlite.metrics.experts import ExpertLoads
from titanlite.metrics.meter import Meter, Work
from titanlite.models import linear
from titanlite.models.losses import LOSSES, Loss, Term, cross_entropy
from titanlite.parallel.digest import combine, sum_of_bits, weights_digest
from titanlite.parallel.exact import ExactGradients, _row_box
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

BLOCKS = "model.ffn_dim=52"  # a multiple of small_blocks
EVERY, LAST = "parallelism.gradient_sync=every", "parallelism.gradient_sync=last"
FULL, BY_OP = "activation_checkpoint.mode=full", "activation_checkpoint.mode=selective"
PAIRS = ("training.local_batch_size=2", "parallelism.pp_microbatch_size=2")


MIXED = ALL_OPTIMIZERS[:4] + ALL_OPTIMIZERS[6:]
WATCHING = (f'job.plugins=["{PLUGIN}"]', "model.family=watching", 'loss.terms=["noting"]')


def scaled(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of `label % H`, times a factor that `label // H` chooses."""
    size = logits.shape[1] // len(FACTORS)
    return cross_entropy(logits, labels % size) * logits.new_tensor(FACTORS)[labels // size % len(FACTORS)]


FACTORS = (8.0, -8.0, 2.0**-29)
Z_LOSS = Term(lambda logits, labels: 2.0**-32 * logits.logsumexp(1).square(), torch.ones_like)  # noqa: ARG005
CANCELLING = Loss("cancelling", scaled, {"z_loss": Z_LOSS})


def cancelling(batch: Batch, vocab_size: int) -> Batch:
    """The gradients of rows 0 and 7 cancel: those of the others, 2^-32 as large, depend on the order of a sum."""
    size = vocab_size // len(FACTORS)
    kind = torch.full((len(batch.tokens), 1), 2)
    kind[0], kind[7] = 0, 1
    tokens, labels = batch.tokens.clone(), batch.labels % size
    tokens[7], labels[7] = tokens[0], labels[0]
    return batch._replace(tokens=tokens, labels=labels + size * kind)


def schedule(name: str) -> str:
    return f"parallelism.pp_schedule={name}"


QUICK: Table = {
    "plain": ((), [((1, 2, 1, 1, 1), (EVERY,))]),
    "cancelling": (("loss.name=cancelling",), [((1, 1, 2, 1, 1), (EVERY,))]),
}
TWO: Table = {
    "plain": ((), [((1, 1, 2, 1, 1), ()), ((2, 1, 1, 1, 1), (schedule("ZBVZeroBubble"),))]),
    "two rows, bfloat16": (
        (*PAIRS, "training.mixed_precision_param=bfloat16", "optimizer.ema_decay=0.9"),
        [((1, 1, 2, 1, 1), (EVERY, FULL)), ((2, 1, 1, 1, 1), (EVERY,))],
    ),
    "noted values, term": (WATCHING, [((1, 2, 1, 1, 1), ()), ((2, 1, 1, 1, 1), ())]),
    "experts": (EXPERTS, [((1, 1, 2, 1, 1), (EVERY,))]),
    "float8": (("float8.recipe=rowwise",), [((1, 1, 2, 1, 1), (EVERY, FULL)), ((2, 1, 1, 1, 1), (EVERY,))]),
}
FOUR: Table = {
    "plain": ((), [((1, 2, 2, 1, 1), (EVERY,)), ((2, 2, 1, 1, 1), (schedule("InterleavedZeroBubble"),))]),
    "all optimizers": (MIXED, [((2, 1, 2, 1, 1), ())]),
    "experts": (EXPERTS, [((2, 1, 2, 1, 1), ())]),
    "noted values, term": (WATCHING, [((2, 1, 2, 1, 1), (FULL,))]),
    "mxfp8": (("float8.recipe=mxfp8", BLOCKS), [((2, 1, 2, 1, 1), (EVERY,))]),
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
            ((2, 1, 2, 1, 1), (EVERY,)),
            ((1, 1, 4, 1, 1), (BY_OP,)),
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
    "all optimizers": (MIXED, [((1, 2, 2, 1, 1), ())]),
    "experts": (EXPERTS, [((1, 2, 2, 1, 1), ()), ((1, 1, 5, 1, 1), ())]),
    "blockwise": (("float8.recipe=blockwise", "float8.scale=float32", BLOCKS), [((2, 2, 1, 1, 1), ())]),
    "noted values, term": (WATCHING, [((1, 1, 5, 1, 1), ())]),
    "cancelling": (
        ("loss.name=cancelling",),
        [((1, 1, 3, 1, 1), ()), *(((*axes, 1, 1), ()) for axes in ((1, 2, 1), (1, 2, 2), (2, 1, 1)))],
    ),
    "Lion, QK-clip": (
        ("optimizer.name=Lion", "optimizer.qk_clip=0.045"),
        [((1, 2, 1, 1, 1), ()), ((2, 1, 2, 1, 1), ())],
    ),
    "qwen3_5": (QWEN3_5, [((1, 2, 1, 1, 1), ()), ((2, 1, 2, 1, 1), (EVERY, FULL))]),
    "qwen3_5_moe": (QWEN3_5_MOE, [((1, 1, 3, 1, 1), ())]),
    "gemma2, tied": (("model.tie_embeddings=true", *GEMMA2), [((1, 2, 1, 1, 1), ()), ((1, 1, 3, 1, 1), (EVERY,))]),
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


def trained(config: JobConfig, steps: int) -> list[str]:
    """Losses, norms and digests of the steps; values of log lines; digest of each tensor of weights, averages and
    state of optimizers."""
    trainer, mesh = build_on_mesh(config)
    assert trainer.exact is not None
    numbers, digests = [], []
    logged: list[object] = []
    meter, loads = logging_of(config, trainer)
    for step in range(steps):
        batch = global_batch("uneven", step, config.training.global_batch_size)
        if config.loss.name == CANCELLING.name:
            batch = cancelling(batch, config.hyper_parameters.vocab_size)
        stats = trainer.train_step(local_batches(config, mesh, batch))
        meter.update(step + 1, stats, lr=0.0, data_wait_s=0.0, bad_rows=0)
        record = meter.flush()
        logged += [record.loss, record.interval_loss, record.max_score, record.terms, sorted(record.watched.items())]
        digests.append(weights_digest(trainer.exact))
        totals = torch.stack([stats.mean_loss, stats.loss_sum])
        dist.all_reduce(totals)
        numbers += [repr(totals.tolist()), repr(stats.grad_norm.item()), "skipped" if stats.skipped else "updated"]
    every: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, {name: digest({name: tensor}) for name, tensor in state_of(trainer)})
    merged: dict[str, str] = {}
    for found in every:
        for name, value in found.items():
            assert merged.setdefault(name, value) == value, name
    assert len(set(digests)) == steps - numbers.count("skipped")
    logged.append(loads.flush(steps)[0])
    return [*numbers, *digests, *map(repr, logged), *(f"{name} {value}" for name, value in sorted(merged.items()))]


def logging_of(config: JobConfig, trainer: Trainer) -> tuple[Meter, ExpertLoads]:
    model, group = config.hyper_parameters, dist.group.WORLD
    assert group is not None
    sizes = {"work": lambda _: Work(1, 0.0), "peak_flops": None}
    meter = Meter(group, CPU, **sizes, terms=list(config.loss.chosen.terms), watched=trainer.watched)  # type: ignore[arg-type]
    blocks = {"num_blocks": model.n_layers, "n_experts": model.n_experts, "n_active": model.n_active_experts}
    is_first = trainer.mesh.is_first(["tp"])
    return meter, ExpertLoads(trainer.model_parts, CPU, counts=is_first, **blocks, first_step=1, total_steps=STEPS)


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


def run(cases: Sequence[tuple[Case, Sequence[str]]], steps: int = STEPS) -> list[list[str]]:
    by_onednn = patch.object(linear, "LEAST_PRODUCTS", 1)  # all products, as those of larger models
    with patch.dict(LOSSES, {CANCELLING.name: CANCELLING}), small_blocks(), by_onednn:
        return [trained(config_of(case, settings), steps) for case, settings in cases]


def run_planted(mistake: str, case: Case, settings: Sequence[str]) -> list[str]:
    """Like `run`, one step with a mistake of MISTAKES, or with none: ""."""
    reduce: Any = _fsdp_param_group.foreach_reduce

    def in_float32(parameters: Any, gradients: list[Tensor], *others: Any, **keys: Any) -> Any:
        gradients[:] = [gradient.float() for gradient in gradients]
        others = tuple(torch.float32 if each is torch.float64 else each for each in others)  # the dtype of the sum
        return reduce(parameters, gradients, *others, **keys)

    with (
        patch.object(_fsdp_param_group, "foreach_reduce", in_float32 if mistake == "float32" else reduce),
        patch.object(ExactGradients, "_rounding", MISTAKES.get(mistake, ROUNDING)),
    ):
        return run([(case, settings)], steps=1)[0]


ROUNDING = ExactGradients._rounding


def rounding_before_the_cast(exact: ExactGradients, name: str, parameter: Tensor) -> Callable[[Tensor], Tensor]:
    """A hook that rounds in the parameter's dtype, which has too few digits for it."""
    note, shifts = ROUNDING(exact, name, parameter), exact._rows.of_each(exact._shifts)[name][_row_box(parameter)]

    def rounded(gradient: Tensor) -> Tensor:
        note(gradient.clone())
        shift = shifts.unflatten(-1, (-1, *[1] * (gradient.dim() - shifts.dim()))).to(parameter.dtype)
        sums: Tensor = gradient.to(parameter.dtype) + shift
        return sums.sub_(shift).to(gradient.dtype)

    return rounded


MISTAKES = {"not rounded": lambda *_: lambda _: None, "before the cast": rounding_before_the_cast, "float32": ROUNDING}


def different(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    assert len(expected) == len(found)
    return [f"{one} | {other}" for one, other in zip(expected, found, strict=True) if one != other]


ALONE: Case = ((1, 1, 1, 1, 1), ())


def is_supported(own: Sequence[str]) -> bool:
    """Whether torch can split the backward pass, if the case needs it."""
    chosen = [SCHEDULES[shape] for shape in SCHEDULES if schedule(shape) in own]
    return torch.__version__ >= "2.13" or not any(shape.splits_backward for shape in chosen)


def compare(table: Table, alone: Case = ALONE, steps: int = STEPS) -> list[list[str]]:
    """Compare each case with `alone`; returns what `alone` gave with the settings of each row."""
    settings = [each for each, _ in table.values()]
    expected: list[list[str]] = run_ranks(run, prod(alone[0]), [(alone, each) for each in settings], steps)[0]
    cases = [(n, case) for n, (_, row) in enumerate(table.values()) for case in row if is_supported(case[1])]
    for size in sorted({prod(axes) for _, (axes, _) in cases}):
        own = [(n, case) for n, case in cases if prod(case[0]) == size]
        results = run_ranks(run, size, [(case, settings[n]) for n, case in own], steps)[0]
        for (n, case), found in zip(own, results, strict=True):
            assert not different(expected[n], found), (case, settings[n])
    return expected


def test_two_ranks_have_the_bits_of_one() -> None:
    first, *_ = compare(QUICK)
    norms = [float(text) for text in first[1 : 3 * STEPS : 3]]
    assert "skipped" not in first
    assert min(norms) < 1 < max(norms), "the norm is clipped in some steps only"


@pytest.mark.parametrize(
    ("alone", "shared"),
    [
        ("not rounded", "not rounded"),
        ("", "before the cast"),  # on both, sums would be equal: of gradients with far fewer digits
        pytest.param("float32", "float32", marks=pytest.mark.soak),
    ],
)
def test_mistakes_in_the_sum_of_gradients_are_seen(alone: str, shared: str) -> None:
    settings, (case, *_) = QUICK["cancelling"]
    runs = ((alone, ALONE), (shared, case))
    one, two = (run_ranks(run_planted, prod(each[0]), mistake, each, settings)[0] for mistake, each in runs)
    assert different(one, two)


@pytest.mark.slow
def test_four_ranks_have_the_bits_of_one() -> None:
    """In two steps, and with microbatches of two rows where the ranks have an even number."""
    in_pairs = {
        name: (settings, cases) if name == "plain" else ((*settings, *PAIRS), cases)
        for name, (settings, cases) in FOUR.items()
    }
    compare(in_pairs, steps=2)


@pytest.mark.soak
def test_all_layouts_have_the_bits_of_one_process() -> None:
    count = sum(len(cases) for table in (QUICK, TWO, FOUR, SOAK) for _, cases in table.values())
    assert count == 79, "docs/numerics.md has this number"
    for table in (TWO, FOUR, SOAK):
        compare(table)
    for alone, cases in NEEDS_MORE.values():
        compare({"": ((), cases)}, alone)
