"""Samples during training: the gathered weights are those of the layout, and training does not change."""

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gradients import build_on_mesh, local_batches
from tests.distributed.layouts import COMPILE, EVERY, PAIRS, QUICK, QWEN3, QWEN3_5, TIED, Layout, schedule
from tests.distributed.reference import global_batch, plain_model
from tests.pool import run_ranks
from titanlite.generation.config import SamplesConfig, check_samples
from titanlite.generation.generate import Prompt
from titanlite.generation.model import gather_model
from titanlite.generation.samples import Samples
from titanlite.metrics.records import SamplesRecord
from titanlite.models.family import resolve_model

TWO = (*[layout for layout in QUICK if layout.world_size == 2][::3], Layout((1, 1, 1, 1), QWEN3_5, cp=2))
FOUR = (
    Layout((1, 2, 2, 1), QWEN3),
    Layout((2, 1, 1, 2), TIED),
    Layout((2, 1, 2, 1), (*schedule("Interleaved1F1B"), *PAIRS), accumulation=3, rows=24),
    Layout((2, 1, 1, 2), (*schedule("ZBVZeroBubble"), *EVERY)),
)


class Letters:
    """A tokenizer whose tokens are characters."""

    eos_id = None

    def byte_tokens(self) -> frozenset[int]:
        return frozenset()

    def has(self, _: int) -> bool:
        return True

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(0x4E00 + token) for token in ids)


def losses(layout: Layout, *, samples: bool) -> tuple[list[float], list[tuple[str, str]]]:
    """Losses and gradient norms of two steps, and the last texts of rank 0; with samples between the steps."""
    config = layout.config("optimizer.lr=0.5")
    trainer, mesh = build_on_mesh(config)
    family, hyper_parameters = resolve_model(config.model)
    loggers = MagicMock()
    texts: list[tuple[str, str]] = []
    if samples:
        first = gather_model(trainer.model_parts, mesh, family, hyper_parameters, torch.float64)
        assert (first is not None) == (dist.get_rank() == 0)
        if first is not None:
            expected = dict(plain_model(config).named_parameters())
            assert expected.keys() == dict(first.named_parameters()).keys()
            assert all(torch.equal(value, expected[name]) for name, value in first.named_parameters())
    writer = Samples(
        *(SamplesConfig(("a", "b"), max_new_tokens=8), trainer, family, hyper_parameters, torch.float64, Letters(), ()),
        *([Prompt("a", "a", (1, 2, 3)), Prompt("b", "b", (4,))], mesh.new_group(60), MagicMock(), loggers),
    )
    found = []
    for step in (1, 2):
        batch = global_batch("uneven", seed=step, rows=config.training.global_batch_size)
        stats = trainer.train_step(local_batches(config, mesh, batch))
        found += [float(stats.mean_loss), float(stats.grad_norm)]
        if samples:
            random = torch.random.get_rng_state()
            writer.after_step(step)
            assert torch.equal(random, torch.random.get_rng_state())
    for call in loggers.write.call_args_list:
        assert isinstance(call.args[0], SamplesRecord)
        texts = [*call.args[0].texts]
    return found, texts


def run(layouts: Sequence[Layout]) -> list[list[tuple[str, str]]]:
    """The texts by layout, on rank 0."""
    found = []
    for layout in layouts:
        with_samples, texts = losses(layout, samples=True)
        assert with_samples == losses(layout, samples=False)[0], layout
        found.append(texts)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(TWO, id="two ranks"),
        pytest.param(FOUR, id="four ranks", marks=pytest.mark.soak),
        pytest.param([Layout((1, 1, 1, 1), COMPILE)], id="compiled"),
    ],
)
def test_samples_are_those_of_one_process_and_do_not_change_training(layouts: Sequence[Layout]) -> None:
    ranks = run_ranks(run, layouts[0].world_size, layouts)
    alone = [Layout((1, 1, 1, 1), one_process(layout), layout.accumulation, layout.rows) for layout in layouts]
    (expected,) = run_ranks(run, 1, alone)
    assert ranks[0] == expected
    assert all(len(text) == 8 for texts in expected for _, text in texts)
    assert not any(texts for rank in ranks[1:] for texts in rank)


def one_process(layout: Layout) -> tuple[str, ...]:
    """The settings of the model."""
    return tuple(text for text in layout.settings if text.startswith("model."))


def test_prompts_need_a_tokenizer() -> None:
    (problem,) = check_samples(SamplesConfig(("a",)), has_tokenizer=False)
    assert problem.key == "samples.prompts"
    assert check_samples(SamplesConfig(), has_tokenizer=False) == []
