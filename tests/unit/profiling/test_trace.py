"""The [profiling] section: which steps are in a trace, which files are written, and a full disk."""

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from titanlite.profiling.config import ProfilingConfig, check_profiling
from titanlite.profiling.regions import in_region, region
from titanlite.profiling.trace import MAX_ALLOCATIONS, Profiling
from titanlite.ranks.failure import FailureReport
from titanlite.runtime.logging import log

CPU = torch.device("cpu")


def names(file: Path) -> list[str]:
    """Names of the complete events of a trace, in order of their start."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [event["name"] for event in sorted(events, key=lambda event: event.get("ts", 0)) if event["ph"] == "X"]


def steps_of(names: Sequence[str]) -> list[int]:
    return [int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")]


def take_steps(profiling: Profiling, first: int, last: int) -> None:
    profiling.start(first)
    for step in range(first, last + 1):
        with region("forward"):
            torch.ones(3).add_(step)
        profiling.after_step(step, FailureReport())
    profiling.close()


def traces(folder: Path) -> dict[str, list[int]]:
    """File -> the steps in it."""
    return {str(file.relative_to(folder)): steps_of(names(file)) for file in sorted(folder.rglob("*.json.gz"))}


def test_one_trace_per_interval(tmp_path: Path) -> None:
    section = ProfilingConfig(enable_trace=True, interval=6, wait=1, warmup=2, active=2, ranks=(3,))
    take_steps(Profiling(section, str(tmp_path), 3, CPU), 1, 15)
    assert traces(tmp_path) == {"traces/step-11/rank-3.json.gz": [10, 11], "traces/step-5/rank-3.json.gz": [4, 5]}
    found = names(tmp_path / "traces/step-5/rank-3.json.gz")
    assert found.count("forward") == 2  # not those of the warm-up
    assert found.count("aten::add_") == 2


@pytest.mark.parametrize(
    ("first", "expected"),
    # a resume in the warm-up or later: the next interval
    [(2, [[10, 11], [4, 5]]), (3, [[10, 11]]), (4, [[10, 11]]), (5, [[10, 11]])],
)
def test_a_resumed_run_begins_with_a_complete_trace(first: int, expected: list[list[int]], tmp_path: Path) -> None:
    section = ProfilingConfig(enable_trace=True, interval=6, wait=1, warmup=2, active=2)
    take_steps(Profiling(section, str(tmp_path), 0, CPU), first, 11)
    assert list(traces(tmp_path).values()) == expected


def test_every_step(tmp_path: Path) -> None:
    section = ProfilingConfig(enable_trace=True, interval=1, wait=0, warmup=0, active=1)
    take_steps(Profiling(section, str(tmp_path), 0, CPU), 1, 3)
    assert traces(tmp_path) == {f"traces/step-{step}/rank-0.json.gz": [step] for step in (1, 2, 3)}


@pytest.mark.parametrize("last", [3, 4])
def test_a_trace_that_is_not_complete_is_dropped(last: int, tmp_path: Path) -> None:
    """Closed in the warm-up, and in an active step."""
    section = ProfilingConfig(enable_trace=True, wait=1, warmup=2, active=2)
    take_steps(Profiling(section, str(tmp_path), 0, CPU), 1, last)
    assert not list(tmp_path.iterdir())
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("section", [ProfilingConfig(), ProfilingConfig(enable_trace=True, ranks=(1,))])
def test_nothing_is_traced_if_disabled_or_on_another_rank(section: ProfilingConfig, tmp_path: Path) -> None:
    take_steps(Profiling(section, str(tmp_path), 0, CPU), 1, 12)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_costs_the_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    (tmp_path / "traces").write_text("a file")
    with caplog.at_level(logging.WARNING):
        section = ProfilingConfig(enable_trace=True, wait=0, warmup=0, active=1)
        take_steps(Profiling(section, str(tmp_path), 0, CPU), 1, 2)
    assert "traces/step-1/rank-0.json.gz: " in caplog.text
    assert "training continues" in caplog.text
    assert not torch.autograd._profiler_enabled()


def test_memory_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of torch's recorder, which needs CUDA."""
    record, dump = Mock(), Mock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    section = ProfilingConfig(enable_memory_snapshot=True, interval=6, wait=1, warmup=1, active=1, ranks=(2,))
    profiling = Profiling(section, str(tmp_path), 2, CPU)
    record.assert_called_once_with(max_entries=MAX_ALLOCATIONS)  # before the model is built
    take_steps(profiling, 1, 10)  # and closes it
    files = [tmp_path / f"memory_snapshots/step-{step}/rank-2.pickle" for step in (3, 9)]
    assert [call.args for call in dump.call_args_list] == [(str(file),) for file in files]
    assert all(file.parent.is_dir() for file in files)
    Profiling(section, str(tmp_path), 0, CPU)  # another rank
    assert record.call_count == 1  # not stopped: a failed allocation is explained after close()


def test_a_region_without_a_profiler_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`record_function` costs 10 to 20 microseconds also if it records nothing; a step has 8 regions or more."""
    recorded: list[Any] = []
    monkeypatch.setattr("titanlite.profiling.regions.record_function", recorded.append)
    with region("forward"), region("data"):
        pass
    assert in_region("clip", max)(3, 4) == 4
    assert recorded == []


def keys(section: ProfilingConfig, *, world_size: int = 4, device_type: str = "cuda", steps: int = 100) -> list[str]:
    found = check_profiling(section, world_size=world_size, device_type=device_type, steps=steps)
    return [problem.key.removeprefix("profiling.") for problem in found]


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        (ProfilingConfig(enable_trace=True, enable_memory_snapshot=True, ranks=(0, 3)), []),
        (ProfilingConfig(enable_trace=True, interval=10), []),
        (ProfilingConfig(enable_trace=True, interval=9), ["interval"]),
        (ProfilingConfig(enable_trace=True, wait=95), []),
        (ProfilingConfig(enable_trace=True, wait=96), ["wait"]),
        (ProfilingConfig(enable_trace=True, wait=0, warmup=0, active=1, interval=1), []),
        (ProfilingConfig(enable_trace=True, ranks=()), ["ranks"]),
        (ProfilingConfig(enable_trace=True, ranks=(1, 1)), ["ranks"]),
        (ProfilingConfig(enable_memory_snapshot=True, ranks=(4,)), ["ranks"]),
        (ProfilingConfig(enable_trace=True, ranks=(-1,)), ["ranks"]),
        (ProfilingConfig(ranks=(4,), interval=9, wait=1000), []),  # not enabled
    ],
)
def test_problems(section: ProfilingConfig, problems: list[str]) -> None:
    assert keys(section) == problems


def test_memory_snapshots_are_refused_on_a_cpu() -> None:
    (problem,) = check_profiling(
        ProfilingConfig(enable_memory_snapshot=True), world_size=1, device_type="cpu", steps=100
    )
    assert (problem.key, problem.value) == ("profiling.enable_memory_snapshot", True)
    assert "only on CUDA" in problem.rule
    assert "titanlite plan" in problem.remedy
    assert keys(ProfilingConfig(enable_trace=True), device_type="cpu") == []
