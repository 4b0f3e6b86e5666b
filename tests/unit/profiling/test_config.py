"""The [profiling] section."""

import pytest

from titanlite.profiling.config import ProfilingConfig, check_profiling


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
