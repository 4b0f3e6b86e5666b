"""Runs the reference and all layouts, one launch of ranks for each world size."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.config.schema import JobConfig
from titanlite.runtime.errors import UserError
from titanlite.runtime.launch import RankError, run_ranks
from titanlite.tools.parity.layouts import ONE_PROCESS, Layout, by_world_size
from titanlite.tools.parity.measure import Measurement, measure_layouts, own_dtypes, passes
from titanlite.tools.parity.reference import measure_reference
from titanlite.tools.parity.verdict import FLOAT64_BOUND, Bounds, Verdict, judge, merge_ranks, own_bounds, vacuous

TIME_LIMIT_S = 600.0
"""For one layout in one pass, all its steps."""


@dataclass(frozen=True)
class Result:
    """One layout in one pass. dtypes: of parameters, computation and reductions."""

    layout: Layout
    dtypes: tuple[str, str, str]
    verdict: Verdict


def run_reference(config: JobConfig, steps: int, folder: str) -> list[Measurement]:
    """The reference, once per pass: its weights' hashes are those of the pass's dtype. config: resolved.

    Leaves its gradients in `folder`. Raises UserError where agreement with it would prove nothing, and
    where the model loses precision.
    """
    answers = _launch("the reference", measure_reference, 1, (config, steps, folder), folder, TIME_LIMIT_S * steps)
    references = [Measurement.of_json(value) for value in answers[0]["measurements"]]
    if answers[0]["imprecise"]:
        raise UserError(f"the model is not in float64 where all of its inputs are: {answers[0]['imprecise']}")
    reason = vacuous(references[0])
    if reason is not None:
        raise UserError(f"nothing would be proven: {reason}. Other data, another seed or --steps may help")
    return references


def compare_layouts(
    config: JobConfig, layouts: Sequence[Layout], steps: int, references: Sequence[Measurement], folder: str
) -> Iterator[list[Result]]:
    """The results of each world size, with the one-process run in front of all. Raises UserError where a rank fails."""
    all_dtypes = [own_dtypes(settings) for settings in passes(config)]
    bounds: list[Bounds] = []
    for size, group in by_world_size([ONE_PROCESS, *(x for x in layouts if x != ONE_PROCESS)]).items():
        limit = TIME_LIMIT_S * len(group) * len(all_dtypes) * steps
        answers = _launch(f"{size} ranks", measure_layouts, size, (config, group, steps, folder), folder, limit)
        results = []
        for index, layout in enumerate(group):
            for number, (dtypes, reference) in enumerate(zip(all_dtypes, references, strict=True)):
                measured = merge_ranks([Measurement.of_json(rank[index][number]) for rank in answers])
                if layout == ONE_PROCESS:
                    alone = Bounds(FLOAT64_BOUND) if number == 0 else own_bounds(dtypes, None)
                    verdict = judge(measured, reference, alone)
                    bounds.append(alone if number == 0 else own_bounds(dtypes, verdict.errors))
                else:
                    verdict = judge(measured, reference, bounds[number])
                results.append(Result(layout, dtypes, verdict))
        yield results


def _launch(
    what: str, function: Callable[..., Any], ranks: int, args: tuple[Any, ...], folder: str, limit_s: float
) -> list[Any]:
    """run_ranks, whose failures become one message: which layout, and the error that came first."""
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
                raise  # before anything was measured: nothing that a configuration can bring about
            raise UserError(f"{failed[0]['what']}: {failed[0]['error']}") from None
        # A rank that was killed has told nothing, and what others tell is about its silence.
        raise UserError(f"{found[0]['what'] if found else what}: {first}") from None


def combined_hash(hashes: dict[str, str]) -> str:
    """One hash of many, in the order of their names; 16 digits."""
    text = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def workplace() -> "tempfile.TemporaryDirectory[str]":
    """A folder that is gone after the run."""
    return tempfile.TemporaryDirectory(prefix="titanlite-parity-")
