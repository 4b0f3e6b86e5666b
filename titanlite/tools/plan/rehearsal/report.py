"""What `titanlite plan --rehearse` says: per rank memory, collectives and saved bytes, and what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from titanlite.runtime.memory import GIB, USABLE
from titanlite.runtime.text import aligned, counted

GAPS = {
    "compile": "off: blocks run operation by operation, as planned; compiled blocks keep less",
    "norms": "titanlite's function for CPUs, which keeps the same tensors as the GPU's kernel",
    "attention": "the kernel for CPUs, in the compute dtype, which keeps the same tensors; not with sinks in a window",
    "experts": "the host reads equal numbers of rows for all ranks",
    "streams": "none: memory that a stream returns later is not measured, nor are the allocator and buffers of NCCL",
    "initial weights": "not drawn",
}
"""What differs from the program of a GPU -> how."""
KNOWN_READS = {"parallel/expert.py", "models/experts.py"}
"""Places of a step where the host waits for the device: numbers of rows of experts (docs/performance.md)."""
OWNERS = "dp_shard x tp"
"""Axis over which owners of matrices exchange them: planning/owner_rounds.py."""
NODE = 8
"""Ranks of a node, if no hardware profile has another number."""
MOST = 1.05
"""Rehearsed / planned peak: up to here, they agree (docs/planning.md)."""
_OF_RANK = {"start", "cpu_s", "resident_mib"}
"""Of what a process answers: not of a step."""
LEAST_BYTES = 2**28
"""A difference below it does not decide whether a rank fits: of tiny models, small tensors are planned less exactly."""
Found = Mapping[str, Any]
"""What the process of a rank answers."""


def problems_of(found: Mapping[int, Found], world_size: int, pp: int, device_memory_gib: float) -> list[str]:
    """What is wrong on the rehearsed ranks; [] if nothing."""
    by_line: dict[str, list[int]] = {}
    for rank, each in found.items():
        at = f" (at {each['place']})" if each.get("place") else ""
        ends = [f": the program ends with {each['error']}{at}"] if "error" in each else []
        for line in ends or [f": {line}" for line in _of_rank(each, device_memory_gib)]:
            by_line.setdefault(line, []).append(rank)
    lines = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{line}" for line, ranks in by_line.items()]
    return lines + _waits(found, world_size // pp)


def _of_rank(found: Found, device_memory_gib: float) -> list[str]:
    lines = []
    for each in found["collectives"]:
        real, plan = (each["calls"], each["bytes"]), (each["planned_calls"], each["planned_bytes"])
        if each["axis"] == OWNERS:  # those of the rank that owns the most are planned
            real = real[0], max(real[1], plan[1])
        if found["planned_peak_bytes"] is not None and real != plan:
            lines.append(
                f"{each['axis']} {each['operation']}: {real[0]:,} calls of {real[1]:,} bytes in all, planned "
                f"{plan[0]:,} of {plan[1]:,}: a layer gathers, reduces or exchanges more or less than it should"
            )
    planned, peak = found["planned_peak_bytes"], found["peak_bytes"]
    if planned is not None and peak > MOST * planned and peak - planned > LEAST_BYTES:
        item = max(_kinds(found), key=lambda item: item[1] - item[2])
        lines.append(
            f"keeps {peak / GIB:.2f} GiB at its peak, planned {planned / GIB:.2f}: the largest difference is "
            f"{item[0]}, {item[1] / GIB:.2f} GiB in place of {item[2] / GIB:.2f}"
        )
    if (whole := _peak(found)) > USABLE * device_memory_gib * GIB:
        usable = f"{USABLE * device_memory_gib:.1f} GiB usable of a device of {device_memory_gib:g} GiB"
        lines.append(f"does not fit: {whole / GIB:.1f} GiB at its peak, {usable}; remedies: titanlite plan")
    for place, count in found["host_reads"].items():
        if place not in KNOWN_READS:
            lines.append(
                f"{place} reads values of the device {counted(count, 'time')} in a step, and the host waits for them: "
                "compute on the device, as with torch.where in place of if"
            )
    for place in found["mixed_devices"]:
        lines.append(f"{place} mixes tensors of the host with those of the device: make them with device=x.device")
    return lines


def _waits(found: Mapping[int, Found], stage_size: int) -> list[str]:
    """Collectives that ranks of one pipeline stage do not call alike: there, each waits for the others."""
    lines, by_stage = [], dict[int, int]()
    for rank, each in found.items():
        if "error" in each:
            continue
        first = by_stage.setdefault(rank // stage_size, rank)
        own, other = (_alike(order) for order in (each["order"], found[first]["order"]))
        pairs = zip(own, other, strict=False)
        number = next((n for n, (one, two) in enumerate(pairs) if one != two), min(len(own), len(other)))
        if number < max(len(own), len(other)):
            one, two = (_call(order, number) for order in (other, own))
            lines.append(
                f"ranks {first} and {rank} of one stage call different collectives: number {number + 1} of the step is "
                f"{one} on rank {first}, {two} on rank {rank}; on a cluster, each would wait for the other"
            )
    return lines


def _alike(order: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """The collectives, without the bytes of those in which ranks give different numbers of them."""
    return [(axis, operation, 0 if axis == OWNERS else size) for axis, operation, size in order]


def _call(order: Sequence[Sequence[Any]], number: int) -> str:
    if number >= len(order):
        return "none"
    axis, operation, size = order[number]
    return f"{axis} {operation} of {size:,} bytes"


def describe_rehearsal(
    found: Mapping[int, Mapping[int, Found]],
    world_size: int,
    device_memory_gib: float,
    seconds: float,
    expected_s: float | None,
) -> str:
    """The text, without the problems. found: by training stage, from 0, and rank. expected_s: of a step, planned."""
    ranks = ", ".join(f"{rank:,}" for rank in next(iter(found.values())))
    lines = [
        f"Rehearsed: ranks {ranks} of {world_size:,}, on tensors without data, in {seconds:.0f} s",
        f"Start: {2 * world_size:,} connections to the TCPStore, which are open files of its host, and a key of "
        "heartbeats per node (docs/cluster.md, How large)",
    ]
    lines += [] if expected_s is None else [f"Expected: {expected_s:.3g} s per step, by the plan"]
    for stage, of_stage in found.items():
        lines += ["", f"Training stage {stage + 1}:"] if len(found) > 1 else []
        shown: dict[int, Found] = {}
        for rank, each in of_stage.items():
            if "error" in each:
                continue
            of_step = {key: value for key, value in each.items() if key not in _OF_RANK}
            if (other := next((other for other in shown if shown[other] == of_step), None)) is not None:
                lines += [f"Rank {rank:,}: as rank {other:,}", _start_line(each["start"])]
                continue
            shown[rank] = of_step
            lines += ["", *_rank_lines(rank, each, device_memory_gib)]
    lines += ["", "What a GPU does otherwise:", *(f"  {part}: {how}" for part, how in GAPS.items())]
    return "\n".join(lines) + "\n"


def _rank_lines(rank: int, found: Found, device_memory_gib: float) -> list[str]:
    count, of_job = found["microbatches"], found["microbatches_of_the_job"]
    less = "" if count == of_job else f" (of {of_job:,}: the others repeat them)"
    fits = "fits" if _peak(found) <= USABLE * device_memory_gib * GIB else "does not fit"
    further = f" + {found['further_bytes'] / GIB:.2f} of the others" if found["further_bytes"] else ""
    head = f"Rank {rank:,}: a step of {counted(count, 'microbatch')}{less}"
    lines = [
        f"{head}; peak {found['peak_bytes'] / GIB:.2f} GiB{further}, {fits} into a device of {device_memory_gib:g} GiB"
    ]
    has_plan = found["planned_peak_bytes"] is not None
    rows = [["GiB at the peak", "rehearsed", *(["planned"] if has_plan else [])]]
    for kind, size, planned in _kinds(found):
        rows.append([kind, f"{size / GIB:.3f}", *([f"{planned / GIB:.3f}"] if has_plan else [])])
        if has_plan and kind == "activations":
            rows.append(["of them, the head", f"{found['bytes'].get('head', 0) / GIB:.3f}", ""])
    lines += [f"  {line}" for line in aligned(rows, left=1)]
    rows = [["collectives of a step", "calls", "GiB", *(["planned calls", "GiB"] if has_plan else [])]]
    for each in found["collectives"]:
        cells = [f"{each['axis']} {each['operation']}", f"{each['calls']:,}", f"{each['bytes'] / GIB:.3f}"]
        planned_cells = [f"{each['planned_calls']:,}", f"{each['planned_bytes'] / GIB:.3f}"] if has_plan else []
        rows.append([*cells, *planned_cells])
    lines += [f"  {line}" for line in aligned(rows, left=1)]
    groups = ", ".join(f"{axis} {size:,}" for axis, size in found["groups"].items())
    lines.append(f"  process groups: {groups or 'none of several ranks'}")
    saved = f"{counted(found['saved_tensors'], 'tensor')}, {found['saved_bytes'] / GIB:.2f} GiB"
    return [*lines, _start_line(found["start"]), f"  saves its shards of {saved}, less what other ranks have, too"]


def _start_line(start: Mapping[str, int]) -> str:
    planned = f" (planned {start['planned_requests']:,})" if start["requests"] != start["planned_requests"] else ""
    line = f"  start: {start['requests']:,} requests{planned} to the TCPStore for {counted(start['keys'], 'key')}"
    if not start["data_files"]:
        return f"{line}; no data files here"
    line += f"; {counted(start['data_files'], 'data file')} here"
    if not start["token_files"]:
        return line
    planned = f" (planned {start['planned_opens']:,})" if start["opens"] > start["planned_opens"] else ""
    return f"{line}; {counted(start['token_files'], 'token file')} opened {start['opens']:,} times{planned}"


def _peak(found: Found) -> int:
    """Bytes of the job's step."""
    peak: int = found["peak_bytes"] + found["further_bytes"]
    return peak


def _kinds(found: Found) -> list[tuple[str, int, int]]:
    """(kind, rehearsed bytes, planned bytes). The plan counts the head among the activations."""
    real, planned = dict(found["bytes"]), dict(found["planned_bytes"] or {})
    if planned:
        real["activations"] = real.get("activations", 0) + real.pop("head", 0)
    kinds = dict.fromkeys([*planned, *real])
    return [(kind, real.get(kind, 0), planned.get(kind, 0)) for kind in kinds if real.get(kind) or planned.get(kind)]
