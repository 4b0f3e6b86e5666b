"""Waits are logged with their reason, while they last."""

import re
import time

import pytest

from titanlite.runtime import waiting


@pytest.mark.parametrize(
    ("variables", "logs"),
    [({}, True), ({"RANK": "3", "LOCAL_RANK": "3"}, True), ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_RANK": "3"}, False)],
    ids=["one process", "without torchrun", "not the first rank of its node"],
)
def test_a_wait_is_logged_again_and_again_until_it_ends(
    variables: dict[str, str], logs: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(waiting, "FIRST_S", 0.01)
    monkeypatch.setattr(waiting, "AGAIN_S", 0.02)
    end = time.monotonic() + (20 if logs else 0.2)
    with waiting.waiting(lambda: "a door: open it"):
        while len(caplog.messages) < 2 and time.monotonic() < end:
            time.sleep(0.01)
    count = len(caplog.messages)
    assert count >= 2 if logs else count == 0
    assert all(re.fullmatch("waiting for 0 s for a door: open it", message) for message in caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) <= count + 1  # one may be under way


def test_a_short_wait_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with waiting.waiting(lambda: "a door"):
        pass
    assert caplog.messages == []
