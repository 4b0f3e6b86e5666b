"""Print the duration of each test file, and the total against a budget. Exceeding the budget warns; it never fails."""

import time
from collections import Counter

import pytest
from _pytest.terminal import TerminalReporter

BUDGETS_S = {"not soak": 12 * 60, "not slow": 2 * 60}
"""Budget per `-m` expression, on 2 cores."""
SHOWN_S = 2.0

_STARTED = time.monotonic()
_seconds: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.partition("::")[0]] += report.duration  # setup, call and teardown


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    for line in duration_lines(_seconds):
        terminalreporter.write_line(line)
    total = time.monotonic() - _STARTED
    budget = BUDGETS_S.get(config.option.markexpr) if runs_all(config) else None
    if budget is None:
        terminalreporter.write_line(f"{total:7.1f} s in all")
    elif total <= budget:
        terminalreporter.write_line(f"{total:7.1f} s in all, within the budget of {budget} s")
    else:
        text = f"{total:7.1f} s in all: over the budget of {budget} s (see CONTRIBUTING.md)"
        terminalreporter.write_line(text, yellow=True, bold=True)


def runs_all(config: pytest.Config) -> bool:
    """Whether `-m` is the only selection of tests."""
    return config.args == config.getini("testpaths") and not config.option.keyword


def duration_lines(seconds: Counter[str]) -> list[str]:
    """A line per file of at least SHOWN_S, longest first, and one line for all other files."""
    shown = [(name, spent) for name, spent in seconds.most_common() if spent >= SHOWN_S]
    others = sum(seconds.values()) - sum(spent for _, spent in shown)
    lines = [f"{spent:7.1f} s  {name}" for name, spent in shown]
    return [*lines, f"{others:7.1f} s  {len(seconds) - len(shown)} other files"]
