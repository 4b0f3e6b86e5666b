"""What a rank sees of the others."""

import json
import random
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titanlite.ranks import view
from titanlite.ranks.view import View


def test_a_rank_whose_threads_stand_still_is_seen_in_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the heartbeats of its node are read, which differs from read to read."""
    now = 1000.0
    monkeypatch.setattr(view, "time", SimpleNamespace(monotonic=lambda: now))
    store, late = dist.HashStore(), random.Random(0)
    store.add("collectors", 1)
    seen = View(store, 2)
    for beat in range(1, 400):
        now = 1000 + beat
        pulse_s = max(0.0, now - 1100)
        row = ["running", pulse_s, 3, 3, "step", 1.0, False]
        store.set("node/1", json.dumps({"beat": beat, "host": "a", "ranks": {"1": row}}))
        now += late.random()
        seen.read(beat)
    assert 100 <= seen.seen[1].alive_tick <= 103
