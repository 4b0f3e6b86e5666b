"""Known mistakes, planted one at a time, are detected by the tests' comparison and reported by `titanlite parity`.

With -s, prints the table of docs/layouts.md: each mistake, its layout, and how it is detected.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.documents import documents_step
from tests.distributed.gradients import errors_of_step, mesh_of
from tests.distributed.layouts import BOUNDS, Layout, is_supported
from tests.distributed.mistakes import MISTAKES, QUICK, SOAK, Around, Mistake
from tests.distributed.reference import global_batch
from tests.pool import run_ranks
from titanlite.config.schema import JobConfig
from titanlite.tools.parity import layouts as parity
from titanlite.tools.parity.measure import Measurement, measure_layout
from titanlite.tools.parity.reference import measure_reference
from titanlite.tools.parity.shrink import resolved_config
from titanlite.tools.parity.verdict import FLOAT64_BOUND, Bounds, judge, merge_ranks

BOUND = 1e-12
"""Bound of relative errors without a mistake."""


def errors(layout: Layout, documents: bool) -> dict[str, Any]:
    """The tests' comparison with one process: relative errors, whether initial weights and positions are correct."""
    if documents:
        return documents_step(layout)
    return asdict(errors_of_step(layout.config(), global_batch("uneven", 0, layout.rows)))


def measured(layout: Layout, folder: Path) -> dict[str, Any]:
    """The measurement of `titanlite parity` on this rank."""
    ep = layout.config().parallelism.ep
    chosen = parity.Layout(layout.degrees, layout.schedule or None, ep)  # type: ignore[arg-type]
    config = parity.config_of(on_one_process(layout), chosen)
    return asdict(measure_layout(config, mesh_of(config), 1, folder / model_of(layout), config))


def on_one_process(layout: Layout) -> JobConfig:
    return resolved_config(layout.config())


def model_of(layout: Layout) -> str:
    """The family of the layout's model, and whether its embeddings are tied."""
    model = layout.config().model
    return f"{model.family}{'-tied' if model.overrides.get('tie_embeddings') else ''}"


def references(layouts: Sequence[Layout], folder: Path) -> dict[str, Any]:
    """References of `titanlite parity` by model. Rank 0 writes files for all ranks."""
    found = {}
    if dist.get_rank() == 0:
        for model, layout in {model_of(layout): layout for layout in layouts}.items():
            (folder / model).mkdir()
            (found[model],) = measure_reference(on_one_process(layout), 1, str(folder / model))["measurements"]
    dist.barrier()
    return found


def both(layout: Layout, documents: bool, folder: Path, planted: Around) -> list[dict[str, Any]]:
    """Results of the two comparisons, or the names of their exceptions."""
    found = []
    for compare in (lambda: errors(layout, documents), lambda: {} if documents else measured(layout, folder)):
        with planted():
            try:
                found.append(compare())
            except (RuntimeError, AssertionError, AttributeError) as error:
                found.append({"error": type(error).__name__})
    return found


def all_results(numbers: Sequence[int], folder: str) -> dict[str, Any]:
    """Results on this rank: of each layout without a mistake, and of each mistake."""
    cases = layouts_of(numbers)
    expected = references([layout for layout, documents in cases if not documents], Path(folder))
    right = [both(layout, documents, Path(folder), nullcontext) for layout, documents in cases]
    mistakes = [MISTAKES[number] for number in numbers]
    wrong = [both(mistake.layout, mistake.documents, Path(folder), mistake.planted) for mistake in mistakes]
    return {"expected": expected, "right": right, "wrong": wrong}


def layouts_of(numbers: Sequence[int]) -> list[tuple[Layout, bool]]:
    """Distinct (layout, whether its rows hold documents)."""
    mistakes = [MISTAKES[number] for number in numbers]
    return list(dict.fromkeys((mistake.layout, mistake.documents) for mistake in mistakes))


def different(ranks: Sequence[dict[str, Any]], bound: float) -> dict[str, float]:
    """Differences that the tests' comparison finds on any rank, with their largest error."""
    found: dict[str, float] = {}
    for rank in ranks:
        if "error" in rank:
            found[rank["error"]] = 0.0
            continue
        for name, key in {"gradient": "gradient", "loss": "loss", "grad norm": "grad_norm"}.items():
            if not rank[key] <= bound:
                found[name] = max(found.get(name, 0.0), rank[key])
        if not rank["same_initial_weights"]:
            found["initial weights"] = 0.0
        if not rank.get("restarts", True):
            found["positions"] = 0.0
    return found


def first_difference(ranks: Sequence[dict[str, Any]], expected: dict[str, Any]) -> str:
    """First difference that `titanlite parity` reports; "" if all values agree."""
    if "error" in ranks[0]:
        return str(ranks[0]["error"])
    merged = merge_ranks([Measurement.of_json(rank) for rank in ranks])
    return judge(merged, Measurement.of_json(expected), Bounds(FLOAT64_BOUND)).first_difference or ""


def shown(found: dict[str, float]) -> str:
    """Text of the largest error, or the name of a difference without a number."""
    if not found:
        return "nothing"
    name = max(found, key=lambda name: found[name])
    return f"{name} {found[name]:.1e}" if found[name] else name


def suite_of(mistake: Mistake) -> str:
    return "quick" if mistake.name in QUICK else "soak" if (mistake.name, mistake.layout) in SOAK else "slow"


@pytest.mark.parametrize(
    ("world_size", "suite"),
    [
        (2, "quick"),
        pytest.param(2, "slow", marks=pytest.mark.slow),
        *(pytest.param(size, "soak", marks=pytest.mark.soak) for size in (2, 4)),
    ],
)
def test_each_mistake_is_detected(world_size: int, suite: str, tmp_path: Path) -> None:
    selected = [
        mistake.layout.world_size == world_size and suite_of(mistake) == suite and is_supported(mistake.layout)
        for mistake in MISTAKES
    ]
    numbers = [number for number, chosen in enumerate(selected) if chosen]
    ranks = run_ranks(all_results, world_size, numbers, str(tmp_path))
    expected = ranks[0]["expected"]
    cases = layouts_of(numbers)
    for (layout, documents), *case in zip(cases, *(rank["right"] for rank in ranks), strict=True):
        ours, theirs = zip(*case, strict=True)
        assert different(ours, BOUND) == {}, layout
        assert documents or first_difference(theirs, expected[model_of(layout)]) == "", layout
    undetected = []
    for number, *case in zip(numbers, *(rank["wrong"] for rank in ranks), strict=True):
        mistake = MISTAKES[number]
        ours, theirs = zip(*case, strict=True)
        found = different(ours, 10 * BOUNDS["float64"])
        first = "" if mistake.documents else first_difference(theirs, expected[model_of(mistake.layout)])
        named = first.removeprefix("step 1, ").partition(", bound")[0] or "not compared"
        print(f"| {mistake.name} | {mistake.layout.name} | {shown(found)} | {named} |")
        if found.keys() != mistake.seen or mistake.first not in first or not (first or mistake.documents):
            undetected.append(f"{mistake.name}, {mistake.layout.name}: {found}; {first}")
    assert undetected == []
