"""Run the reference and all layouts, with one launch of ranks per world size."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.ranks.launch import RankError, run_ranks
from titanlite.runtime.errors import UserError
from titanlite.tools.parity.layouts import ONE_PROCESS, Layout
from titanlite.tools.parity.measure import Measurement, measure_layouts, own_dtypes, passes
from titanlite.tools.parity.reference import measure_reference
from titanlite.tools.parity.verdict import (
    FLOAT64_BOUND,
    Bounds,
    Verdict,
    failed,
    judge,
    merge_ranks,
    own_bounds,
    vacuous,
)

TIME_LIMIT_S = 600.0
"""Time limit per layout, pass and step."""


Measure = Callable[[JobConfig, Sequence[Layout], int, str], list[Any]]
"""On a rank: what it has measured of each layout, as JSON. Takes the resolved configuration, layouts of one world size,
the number of steps, the folder of record_status."""


@dataclass(frozen=True)
class Result:
    """The result of one layout in one pass. dtypes: of parameters, computation and reductions."""

    layout: Layout
    dtypes: tuple[str, str, str]
    verdict: Verdict


def run_reference(config: JobConfig, steps: int, folder: str) -> list[Measurement]:
    """Run the reference; returns one measurement per pass, with the weights hashed in the pass's dtype.

    config: resolved. Writes the gradients to `folder`. Raises UserError if agreement would prove nothing, or if the
    model computes below float64.
    """
    answers = _launch("the reference", measure_reference, 1, (config, steps, folder), folder, TIME_LIMIT_S * steps)
    references = [Measurement.of_json(value) for value in answers[0]["measurements"]]
    if answers[0]["imprecise"]:
        raise UserError(
            f"the model computes below float64 although all inputs are float64: {answers[0]['imprecise']}; compute in "
            "the dtype of the inputs there, without a cast to a fixed dtype such as .float()"
        )
    reason = vacuous(references[0])
    if reason is not None:
        raise UserError(f"the comparison would prove nothing: {reason}. Other data, another seed or --steps may help")
    return references


def compare_layouts(
    config: JobConfig, layouts: Sequence[Layout], steps: int, references: Sequence[Measurement], folder: str
) -> Iterator[list[Result]]:
    """Yield the results of each world size; the one-process run comes first, and raises UserError if it fails. Another
    layout that fails gets a verdict with the error."""
    all_dtypes = [own_dtypes(settings) for settings in passes(config)]
    bounds: list[Bounds] = []
    for _, of_this_size in _by_size(layouts):
        results = []
        for layout, answers in _measure(measure_layouts, config, list(of_this_size), steps, folder, len(all_dtypes)):
            if isinstance(answers, str):
                results.append(Result(layout, all_dtypes[0], failed(answers)))
                continue
            for number, (dtypes, reference) in enumerate(zip(all_dtypes, references, strict=True)):
                measured = merge_ranks([Measurement.of_json(rank[number]) for rank in answers])
                if layout == ONE_PROCESS:
                    alone = Bounds(FLOAT64_BOUND) if number == 0 else own_bounds(dtypes, None, config.loss.name)
                    verdict = judge(measured, reference, alone)
                    bounds.append(alone if number == 0 else own_bounds(dtypes, verdict.errors))
                else:
                    verdict = judge(measured, reference, bounds[number])
                results.append(Result(layout, dtypes, verdict))
        yield results


def measured_layouts(
    measure: Measure, config: JobConfig, layouts: Sequence[Layout], steps: int, folder: str
) -> Iterator[tuple[Layout, list[Any] | str]]:
    """What `measure` returns for one process and each layout, by rank, or the layout's error. Raises UserError if one
    process fails."""
    for _, of_this_size in _by_size(layouts):
        yield from _measure(measure, config, list(of_this_size), steps, folder, 1)


def _by_size(layouts: Sequence[Layout]) -> Iterator[tuple[int, Iterator[Layout]]]:
    """One process and the layouts, by number of ranks."""
    by_size = sorted(dict.fromkeys([ONE_PROCESS, *layouts]), key=lambda layout: layout.world_size)
    return groupby(by_size, lambda layout: layout.world_size)


def _measure(
    measure: Measure, config: JobConfig, layouts: Sequence[Layout], steps: int, folder: str, num_passes: int
) -> list[tuple[Layout, list[Any] | str]]:
    """What the ranks of each layout have measured, or its error. The layouts have one world size: they share a launch,
    and are launched one by one if it fails."""
    size = layouts[0].world_size
    limit = TIME_LIMIT_S * len(layouts) * num_passes * steps
    try:
        ranks = _launch(f"{size} ranks", measure, size, (config, layouts, steps, folder), folder, limit)
    except UserError as error:
        if ONE_PROCESS in layouts:
            raise
        if len(layouts) == 1:
            return [(layouts[0], str(error))]
        return [each for layout in layouts for each in _measure(measure, config, [layout], steps, folder, num_passes)]
    return [(layout, [rank[index] for rank in ranks]) for index, layout in enumerate(layouts)]


def _launch(
    what: str, function: Callable[..., Any], ranks: int, args: tuple[Any, ...], folder: str, limit_s: float
) -> list[Any]:
    """Call run_ranks; on failure raise a UserError with the layout and the earliest error of any rank."""
    for status in Path(folder).glob("rank-*.json"):
        status.unlink()
    try:
        return run_ranks(function, ranks, *args, timeout_s=limit_s)
    except RankError as error:
        found = [json.loads(status.read_text()) for status in sorted(Path(folder).glob("rank-*.json"))]
        failed = sorted((status for status in found if "error" in status), key=lambda status: status["time"])
        first = str(error).partition("\n")[0]
        if first.endswith("failed:"):
            if not failed:
                raise  # failed before any measurement: no configuration causes that
            raise UserError(f"{failed[0]['what']}: {failed[0]['error']}") from None
        # A killed rank leaves no error, and the errors of the other ranks only follow from its death.
        raise UserError(f"{found[0]['what'] if found else what}: {first}") from None


def combined_hash(hashes: dict[str, str]) -> str:
    """One hash over many, sorted by name; 16 hex digits."""
    text = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
