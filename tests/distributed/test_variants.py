"""Variants of a family: exact on every axis, or refused; nothing of theirs is replaced or dropped silently."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.configuration import HAS_EACH_SCHEDULE
from tests.distributed.layouts import (
    BOUNDS,
    BY_OP,
    COMPILE,
    EXPERTS,
    FULL,
    FURTHER,
    GATHER,
    QWEN3_5,
    TIED,
    Layout,
    measure,
    schedule,
)
from tests.distributed.program import REPOSITORY
from tests.pool import run_ranks
from titanlite.runtime.errors import ConfigError

EXAMPLES = {
    "value_residual": ("model.family=value_residual",),
    "capped": ("model.family=capped", "model.head_dim=16"),
    "short_convolution": ("model.family=short_convolution",),
    "watched": ("model.family=watched", "model.n_layers=4"),
}
"""Plugin -> settings that choose it."""

HEADS, GATHERED = Layout((1, 1, 1, 1), cp=2), Layout((1, 1, 1, 1), GATHER, cp=2)
PIPELINE = Layout((2, 1, 1, 1))
LAYOUTS = (
    Layout((1, 2, 1, 1)),
    Layout((1, 1, 1, 2), COMPILE),
    PIPELINE,
    Layout((1, 1, 2, 1), FULL),
    Layout((1, 1, 1, 2)),
    Layout((1, 1, 1, 1), BY_OP, cp=2),
    GATHERED,
    Layout((2, 1, 1, 1), schedule("InterleavedZeroBubble" if HAS_EACH_SCHEDULE else "1F1B")),
)
SOME = (GATHERED,)
COMBINED = (Layout((2, 1, 1, 2)), Layout((2, 1, 1, 1), cp=2))
PLANTED = Path(__file__).with_name("planted_families.py")

Case = tuple[str, tuple[str, ...], Layout]
"""Plugin, settings of the model or the loss, and a layout."""


def run(cases: Sequence[Case]) -> list[Any]:
    """The errors of each case, or the problems of its refusal."""
    found: list[Any] = []
    for plugin, settings, layout in cases:
        try:
            found.append(asdict(measure(layout, f'job.plugins=["{plugin}"]', *settings)))
        except ConfigError as error:
            found.append(str(error))
    return found


def verify(ranks: int, cases: Sequence[Case], refusals: Sequence[str | None]) -> None:
    """Run the cases, and compare with one process, or with a part of the refusal."""
    for found in run_ranks(run, ranks, cases):
        for case, refusal, errors in zip(cases, refusals, found, strict=True):
            if refusal is not None:
                assert refusal in errors, (case, errors)
                continue
            assert isinstance(errors, dict), (case, errors)
            worst = max(errors[key] for key in ("gradient", "loss", "grad_norm", "trajectory"))
            assert worst <= BOUNDS["float64"], (case, errors)
            assert errors["learned"] > 1e-4, "the update is too small to compare the second step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "ranks", "of_all"),
    [
        (LAYOUTS[3:], 2, SOME),
        pytest.param(LAYOUTS, 2, LAYOUTS, marks=pytest.mark.soak),
        pytest.param(COMBINED, 4, COMBINED, marks=pytest.mark.soak),
    ],
)
def test_the_examples_compute_on_every_axis_what_one_process_does(
    layouts: Sequence[Layout], ranks: int, of_all: Sequence[Layout]
) -> None:
    """The value residual and the short convolution on each layout, all examples on those `of_all`."""
    cases = [
        (str(REPOSITORY / "examples" / f"{name}.py"), settings, layout)
        for name, settings in EXAMPLES.items()
        for layout in layouts
        if name in ("value_residual", "short_convolution") or layout in of_all
    ]
    verify(ranks, cases, [None] * len(cases))


@pytest.mark.slow
@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_code_of_a_family_is_called_on_what_a_rank_has_or_refused(*, further: bool) -> None:
    """Before, context parallelism replaced an own `attend` (llama3 was trained), and a pipeline dropped the second
    tensor between blocks; both silently."""
    mask = "gives some of the queries, with their mask, another result"
    kept = "uses a result of layers.0.attention"
    table = [
        *(("capped", layout, None) for layout in (HEADS, GATHERED, Layout((2, 1, 1, 1), TIED))),
        ("method", HEADS, None),
        ("biased", Layout((1, 1, 1, 2)), None),
        ("biased", Layout((1, 1, 2, 1), FULL), None),
        ("without_mask", HEADS, None),
        ("without_mask", GATHERED, f"layers.0.attention.attend {mask}"),
        ("across_heads", HEADS, "gives some of the heads another result"),
        ("across_heads", GATHERED, None),
        ("uncalled", HEADS, "layers.0.attention does not call self.core"),
        ("uncalled", Layout((1, 1, 2, 1)), None),
        ("own_core", HEADS, "layers.0.attention.core gives some of the heads another result than among all"),
        ("own_core", GATHERED, 'layers.0.attention has a core of its own: use context_parallel = "heads"'),
        ("few_heads", HEADS, None),
        ("few_heads", Layout((1, 1, 1, 2)), "tp cuts layers.0.attention.rates.weight along 1 numbers"),
        ("keeps_aside", PIPELINE, kept),
        ("keeps_aside", Layout((1, 1, 1, 2)), None),
        ("shifted", HEADS, "positions interact outside of the core of a Mixer"),
        ("shifted", Layout((1, 1, 1, 2)), None),
        ("smear", GATHERED, "positions interact outside of the core of a Mixer"),
        ("smear", Layout((1, 1, 1, 2)), "positions interact outside of modules that gather"),
        ("scaled", PIPELINE, "each stage would call its run_blocks"),
        ("mixture", HEADS, None),
        *(("latent", HEADS, None), ("hybrid", HEADS, None), ("latent", PIPELINE, None)),
    ]
    if further:
        table = [(family, Layout((1, 1, 1, 2)), None) for family in ("mixture", "latent", "hybrid")]
    more = {"mixture": EXPERTS, "latent": FURTHER, "hybrid": QWEN3_5}
    chosen = {family: (f"model.family={family}", *settings[1:]) for family, settings in more.items()}
    cases = [(str(PLANTED), chosen.get(family, (f"model.family={family}",)), layout) for family, layout, _ in table]
    verify(2, cases, [refusal for *_, refusal in table])
