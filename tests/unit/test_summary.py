"""The next commands that a run suggests at its end."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from titanlite.config.schema import JobConfig
from titanlite.summary import summarize


@pytest.mark.parametrize(("world_size", "suggested"), [("1", True), ("2", False)])
def test_two_processes_are_suggested_to_a_run_on_one(
    world_size: str, suggested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    record: Any = SimpleNamespace(step=1000, tokens_seen=8, loss=1.0, skipped_steps=0)
    with caplog.at_level(logging.INFO, "titanlite"):
        summarize(JobConfig(), record, 1000, 1.0)
    assert ("on two processes" in caplog.text) == suggested
    assert "on your own text" in caplog.text
    assert "titanlite report outputs" in caplog.text
