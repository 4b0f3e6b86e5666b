"""The duration summary after the tests: per file, and the total against the budget of the selected size."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests import durations


class Terminal:
    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []

    def write_line(self, text: str, **markup: bool) -> None:
        self.lines.append((text, markup.get("yellow", False)))


def summary(monkeypatch: pytest.MonkeyPatch, total_s: float, marks: str = "not soak", **options: Any) -> Terminal:
    """Print the summary of a run of `total_s`. options: `args` (paths) and `keyword` of the command line."""
    config = SimpleNamespace(
        option=SimpleNamespace(markexpr=marks, keyword=options.get("keyword", "")),
        args=options.get("args", ["tests"]),
        getini=lambda name: {"testpaths": ["tests"]}[name],
    )
    monkeypatch.setattr(durations.time, "monotonic", lambda: durations._STARTED + total_s)
    monkeypatch.setattr(durations, "_seconds", Counter({"a.py": 3.0, "b.py": 50.0, "c.py": 1.0, "d.py": 0.5}))
    terminal = Terminal()
    durations.pytest_terminal_summary(terminal, config)  # type: ignore[arg-type]
    return terminal


def test_files_are_sorted_by_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [text.split() for text, _ in summary(monkeypatch, 60.0).lines]
    assert lines[:3] == [["50.0", "s", "b.py"], ["3.0", "s", "a.py"], ["1.5", "s", "2", "other", "files"]]


@pytest.mark.parametrize(("marks", "budget"), [("not soak", 720), ("not slow", 120)])
def test_exceeding_the_budget_is_a_warning(marks: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    within, over = (summary(monkeypatch, budget + more, marks).lines[-1] for more in (-1.0, 1.0))
    assert within == (f"{budget - 1:7.1f} s in all, within the budget of {budget} s", False)
    assert f"{budget + 1:.1f} s in all: over the budget of {budget} s" in over[0]
    assert over[1]


@pytest.mark.parametrize("part", [{"marks": "soak"}, {"args": ["tests/unit"]}, {"keyword": "loss"}])
def test_a_subset_of_the_tests_has_no_budget(part: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert summary(monkeypatch, 9999.0, **part).lines[-1] == (" 9999.0 s in all", False)


def test_all_phases_of_a_test_count(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    monkeypatch.setattr(durations, "_seconds", counted)
    for seconds in (1.0, 2.0, 4.0):
        durations.pytest_runtest_logreport(SimpleNamespace(nodeid="a.py::test_b[c]", duration=seconds))  # type: ignore[arg-type]
    assert counted == {"a.py": 7.0}
