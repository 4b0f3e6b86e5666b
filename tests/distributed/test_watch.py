"""Values that code of a plugin notes: their means are those of one process and plain torch, on every mesh."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.configuration import HAS_EACH_SCHEDULE
from tests.distributed.gradients import CPU, build_on_mesh, local_batches
from tests.distributed.layouts import BY_LAYER, BY_OP, COMPILE, EVERY, FULL, GATHER, PAIRS, Layout, depth, schedule
from tests.distributed.reference import global_batch, plain_model, reference_step
from tests.pool import run_ranks
from titanlite.config.schema import JobConfig
from titanlite.metrics.meter import Meter, Work

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).with_name("watching_family.py")
RATE = 0.5
SETTINGS = (
    *(f'job.plugins=["{PLUGIN}"]', "model.family=watching", 'loss.terms=["noting"]'),
    *('metrics.statistics=["updates"]', f"optimizer.lr={RATE}", "optimizer.weight_decay=0.0"),
)
DEEP = (*COMPILE, *depth(10))
"""More layers than the compiler compiles a block for: they must share their compiled code."""
ONE = (Layout((1, 1, 1, 1), BY_LAYER, accumulation=4), Layout((1, 1, 1, 1), (*DEEP, *BY_OP)))
TWO = (
    Layout((1, 2, 1, 1), EVERY, accumulation=4),
    Layout((1, 1, 2, 1), FULL, rows=15, streams=3),  # one rank has filler
    Layout((1, 1, 1, 2), BY_OP),
    Layout((1, 1, 1, 1), cp=2),
    Layout((2, 1, 1, 1), (*schedule("1F1B"), *EVERY, *PAIRS, *FULL), accumulation=2),
)
SOAK = (
    Layout((1, 1, 2, 1), (*COMPILE, *FULL), rows=15, streams=3),
    Layout((1, 1, 1, 2), (*DEEP, *BY_OP)),
    Layout((1, 1, 1, 1), GATHER, cp=2),
    Layout((1, 1, 1, 1), (*GATHER, *DEEP), cp=2),
    *[Layout((2, 1, 1, 1), schedule("InterleavedZeroBubble"))] * HAS_EACH_SCHEDULE,
)
FOUR = (Layout((2, 1, 1, 2)), Layout((1, 1, 1, 2), cp=2))


def entropies(queries: Tensor, keys: Tensor) -> Tensor:
    """Of the attention of each position, the mean over the heads: (rows, seq_len)."""
    keys = keys.repeat_interleave(queries.shape[2] // keys.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / math.sqrt(queries.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = scores.masked_fill(future, -math.inf).softmax(-1)
    return -(probabilities * probabilities.clamp(min=1e-300).log()).sum(-1).mean(1)


def expected_means(config: JobConfig, rows: int) -> dict[str, float]:
    """By plain torch, with all rows in one pass."""
    batch = global_batch("silent_ranks", 0, rows)
    model: Any = plain_model(config)
    valid = batch.labels >= 0
    found: dict[str, list[Tensor]] = {"residual": [], "entropy": []}
    for index, block in enumerate(model.layers.values()):
        block.register_forward_pre_hook(lambda _, args: found["residual"].append(args[0].square().mean(-1)))
        inputs = found[f"input/{index}"] = []
        block.feed_forward.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0].sum(-1)))
    last = model.layers["1"].attention
    last.register_forward_pre_hook(lambda _, args: found["entropy"].append(entropies(*last.heads(*args[:2])[:2])))
    logits = model(batch.tokens)
    means = {name: torch.stack(values)[:, valid].mean().item() for name, values in found.items()}
    means["logsumexp"] = logits.logsumexp(-1)[valid].mean().item()
    reference = reference_step(config, batch)
    for name, gradient in reference.gradients.items():
        means[f"norm/{name}"] = gradient.norm().item()
        means[f"update/{name}"] = RATE * gradient.norm().item() / reference.weights[name].norm().item()
    return {f"watch/{name}": mean for name, mean in means.items()}


def worst_differences(layouts: Sequence[Layout]) -> list[tuple[float, str]]:
    """The largest relative difference of each layout, and its name."""
    worst = []
    for layout in layouts:
        torch._dynamo.reset()
        config = layout.config(*SETTINGS)
        trainer, mesh = build_on_mesh(config)
        group: Any = dist.group.WORLD
        nothing: dict[str, Any] = {"work": lambda _: Work(1, 0.0), "peak_flops": None}
        meter = Meter(group, CPU, **nothing, terms=["noting"], watched=trainer.watched)
        stats = trainer.train_step(local_batches(config, mesh, global_batch("silent_ranks", 0, layout.rows)))
        meter.update(1, stats, lr=0.0, data_wait_s=0.0, bad_rows=0)
        means, expected = dict(meter.flush().watched), expected_means(config, layout.rows)
        assert means.keys() == expected.keys(), means.keys() ^ expected.keys()
        assert not any(map(math.isnan, means.values())), means
        worst.append(max((abs(means[name] / expected[name] - 1), name) for name in means))
    return worst


def verify(layouts: Sequence[Layout]) -> None:
    found = run_ranks(worst_differences, layouts[0].world_size, layouts)
    for layout, (difference, name) in zip(layouts, found[0], strict=True):
        assert difference <= 1e-11, (layout, name, difference)


def test_means_are_those_of_plain_torch_with_recomputation_and_compiled_blocks() -> None:
    verify(ONE)


@pytest.mark.parametrize("layouts", [TWO, *(pytest.param(each, marks=pytest.mark.soak) for each in (SOAK, FOUR))])
def test_means_are_those_of_one_process_on_every_axis(layouts: Sequence[Layout]) -> None:
    verify(layouts)
