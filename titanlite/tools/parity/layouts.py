"""Layouts: their text form, the layouts of a number of ranks, and the configuration of each."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

from titanlite.config.check import check_config
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import AXES, PARAMETER_AXES, PipelineSchedule
from titanlite.parallel.pipeline import num_stages
from titanlite.runtime.errors import Problem

SCHEDULE_NAMES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
SCHEDULES_PER_PIPELINE = 3
MAX_RANKS = 64
"""Each rank is a process on this machine."""
EXAMPLE = "x".join("2" if axis in ("pp", "dp_shard") else "1" for axis in PARAMETER_AXES)
FORM = f"{'x'.join(axis.upper() for axis in PARAMETER_AXES)}[-cpCP][-epEP][:SCHEDULE]"


@dataclass(frozen=True)
class Layout:
    """A mesh and a pipeline schedule.

    degrees: of the mesh axes, in the order of AXES. schedule: None if pp = 1. ep: degree of expert parallelism.
    """

    degrees: tuple[int, ...]
    schedule: PipelineSchedule | None = None
    ep: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees)

    def __str__(self) -> str:
        degrees = dict(zip(AXES, self.degrees, strict=True))
        context = f"-cp{degrees['cp']}" if degrees["cp"] > 1 else ""
        experts = f"-ep{self.ep}" if self.ep > 1 else ""
        schedule = f":{self.schedule}" if self.schedule else ""
        return f"{'x'.join(str(degrees[axis]) for axis in PARAMETER_AXES)}{context}{experts}{schedule}"


ONE_PROCESS = Layout((1,) * len(AXES))


@dataclass(frozen=True)
class Refusal:
    """A layout that the checks of the configuration reject, and the problems."""

    layout: Layout
    problems: tuple[Problem, ...]


def layout_from_text(text: str, own_schedule: PipelineSchedule) -> Layout | Problem:
    """Parse a layout. If a pipeline has no schedule, it uses the configuration's schedule."""
    number, more = r"[1-9]\d*", len(PARAMETER_AXES) - 1
    form = rf"({number}(?:x{number}){{{more}}})(?:-cp({number}))?(?:-ep({number}))?(?::(\w+))?"
    found = re.fullmatch(form, text)
    if not found:
        return Problem("--layouts", text, f"{FORM}; degrees are 1 or more", f"write for example {EXAMPLE}")
    given_degrees = dict(zip(PARAMETER_AXES, map(int, found[1].split("x")), strict=True)) | {"cp": int(found[2] or 1)}
    degrees = tuple(given_degrees[axis] for axis in AXES)
    if math.prod(degrees) > MAX_RANKS:
        return Problem("--layouts", text, f"at most {MAX_RANKS} ranks, processes on this machine", "use fewer ranks")
    schedule, has_pipeline = found[4], given_degrees["pp"] > 1
    if schedule and not has_pipeline:
        return Problem("--layouts", text, "a schedule needs pp above 1", f"write {text.partition(':')[0]}")
    if schedule and schedule not in SCHEDULE_NAMES:
        return Problem("--layouts", text, f"the schedules: {', '.join(SCHEDULE_NAMES)}", "name one of them")
    given = next((name for name in SCHEDULE_NAMES if name == schedule), own_schedule)
    return Layout(degrees, given if has_pipeline else None, int(found[3] or 1))


def candidate_layouts(ranks: int, own_schedule: PipelineSchedule, n_experts: int = 1) -> Iterator[tuple[Layout, ...]]:
    """Yield, for each factorization of `ranks`, its layouts in order of preference.

    Without a pipeline there is one layout. With a pipeline, the configuration's schedule comes first; the order of the
    others rotates between factorizations, so that each schedule is used. A model with experts also has the same layouts
    with the largest degree of expert parallelism. The last one has a data rank less than there are ranks, which as a
    rule does not divide the batch, so that steps have filler rows.
    """
    others = [name for name in SCHEDULE_NAMES if name != own_schedule]
    turn = 0
    for degrees in _factorizations(ranks, len(AXES)):
        sizes = dict(zip(AXES, degrees, strict=True))
        for ep in sorted({1, math.gcd(n_experts, sizes["dp_shard"] * sizes["cp"])}):
            if sizes["pp"] == 1:
                yield (Layout(degrees, ep=ep),)
                continue
            rotated = [others[(turn + index) % len(others)] for index in range(len(others))]
            turn += SCHEDULES_PER_PIPELINE - 1
            yield tuple(Layout(degrees, name, ep) for name in (own_schedule, *rotated))
    if ranks > 2:
        yield (Layout(tuple(ranks - 1 if axis == "dp_shard" else 1 for axis in AXES)),)


def choose_layouts(config: JobConfig, ranks: int) -> tuple[list[Layout], list[Refusal]]:
    """The candidate layouts that pass the checks of the configuration, and the refused ones.

    Each factorization with a pipeline gets up to SCHEDULES_PER_PIPELINE schedules.
    """
    accepted: list[Layout] = []
    refused: list[Refusal] = []
    n_experts = config.hyper_parameters.n_experts
    for candidates in candidate_layouts(ranks, config.parallelism.pp_schedule, n_experts):
        left = SCHEDULES_PER_PIPELINE
        for layout in candidates:
            if not left:
                break
            problems = check_layout(config, layout)
            if problems:
                refused.append(Refusal(layout, tuple(problems)))
            else:
                accepted.append(layout)
                left -= 1
    return accepted, refused


def check_layout(config: JobConfig, layout: Layout) -> list[Problem]:
    """The problems that a training run with this layout would report."""
    return check_config(config_of(config, layout), world_size=layout.world_size, device_type="cpu")


def config_of(config: JobConfig, layout: Layout) -> JobConfig:
    """The configuration with this layout. Keeps pp_split only if it matches the layout's number of stages."""
    degrees: dict[str, Any] = dict(zip(AXES, layout.degrees, strict=True))
    schedule = layout.schedule or config.parallelism.pp_schedule
    section = replace(config.parallelism, **degrees, ep=layout.ep, pp_schedule=schedule)
    if len(section.pp_split) != num_stages(section) - 1:
        section = replace(section, pp_split=())
    return replace(config, parallelism=section)


def _factorizations(number: int, factors: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `number` as a product of `factors` factors."""
    if factors == 1:
        yield (number,)
        return
    for first in (divisor for divisor in range(1, number + 1) if number % divisor == 0):
        for rest in _factorizations(number // first, factors - 1):
            yield (first, *rest)
