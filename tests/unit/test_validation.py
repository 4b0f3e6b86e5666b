"""Progress of a validation, in the log."""

import logging

import pytest

from titanlite.runtime.logging import log
from titanlite.validation import Progress


def test_progress_is_logged_every_30_s(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "handlers", [])  # of other tests, which may add caplog's
    caplog.set_level(logging.INFO, log.name)
    now = 100.0
    progress = Progress(["code", "text"], 5000, clock=lambda: now)
    for name, batches in (("code", 45), ("text", 46)):
        for number in range(1, batches + 1):
            now += 1.0
            progress.after_batch(name, number)
    assert [record.getMessage() for record in caplog.records] == [
        "validation: source 1 of 2, code: batch 30 of at most 5,000, after 30 s",
        "validation: source 2 of 2, text: batch 15 of at most 5,000, after 60 s",
        "validation: source 2 of 2, text: batch 45 of at most 5,000, after 90 s",
    ]
    now += 30.0
    Progress(["code"], -1, clock=lambda: now).after_batch("code", 1)
    assert len(caplog.records) == 3
