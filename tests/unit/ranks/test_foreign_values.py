"""Values that another program has written into the store of the ranks: each counts as no answer."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.hf.source import _share
from titanlite.ranks import collector, positions
from titanlite.ranks.agreement import require_equal, share_from_rank_0
from titanlite.ranks.distributed import World
from titanlite.ranks.election import FIRST_FAILURE
from titanlite.ranks.failure import FailureReport
from titanlite.ranks.network import agree_on_attempt, require_gloo_address
from titanlite.ranks.positions import Positions
from titanlite.runtime.errors import LateRanksError, UserError
from titanlite.runtime.waiting import parse_value
from titanlite.torchrun.nodes import NO_LAUNCHER, Meeting

FOREIGN = [
    *(b"", b"x", b"\xff\xfe\x00", b"null", b"[]", b"{}", b"[1]", b'"text"', b"NaN", b"1e999", b"[1, 2, 3, 4, 5]"),
    *(b'{"a": "b"}', b'["a", 1, 2, 3]', b'[[], {}, 1, "a"]', b"9" * 5000, b"[" * 100_000, b"../../elsewhere"),
    *(b'{"result": 1', b'{"error": 1}', b'{"host": 1, "facts": [1]}'),
]
RANK_1_OF_2 = World(1, 1, 2, "cpu", 2)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The positions of two ranks, their store, and the errors that have ended threads."""
    monkeypatch.setattr(collector, "INTERVAL_S", 0.01)
    for name in ("POLL_S", "SETTLE_S"):
        monkeypatch.setattr(positions, name, 0.01)
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ranks = [
        Positions(dist.TCPStore("127.0.0.1", server.port), rank, 2, range(2), str(tmp_path / "out"), 1e9, lambda: None)
        for rank in range(2)
    ]
    return SimpleNamespace(store=server, ranks=ranks, errors=errors)


STORED = ["page/1", "where/0", "where/1", "collectives/1", "zero", "stacks", FIRST_FAILURE]


@pytest.mark.parametrize("key", [*STORED, "node/2"])
def test_threads_that_read_the_store_go_on(key: str, pair: Any, tmp_path: Path) -> None:
    report = FailureReport()
    report.positions, report.store = pair.ranks[0], pair.ranks[0].background
    pair.ranks[0].on_beat = report._follow
    pair.store.add("collectors", 2)
    for value in FOREIGN:
        pair.store.set(key, value)
        if parse_value(value, int) is None:
            pair.store.set(FIRST_FAILURE, "1")  # a rank that is about to print: the others look for its heartbeat
        pair.ranks[0].explain()
        report._first_failure()
    beats = pair.ranks[0]._order["answered"]
    end = time.monotonic() + 20
    while pair.ranks[0]._order["answered"] == beats:
        assert time.monotonic() < end, "the heartbeat of rank 0 has ended"
        time.sleep(0.01)
    assert pair.errors == []
    assert [path.name for path in tmp_path.iterdir()] in ([], ["out"])
    pair.ranks[1].enter(7, "saving")
    while pair.ranks[0]._view.seen[1].step != 7:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_numbers_and_texts_without_limit(pair: Any) -> None:
    """Ranks that do not exist are none; what has no place in a page does not stop the heartbeats."""
    pair.store.set("collectives/1", '{"0": {"group": 9}, "7": {"group": 1}, "-1": {"group": 1}}')
    assert pair.ranks[0].explain().startswith("all ranks are in step 0")
    pair.store.set("late/by", "1")
    pair.store.set("late", "[2, 7, -1]")
    assert pair.ranks[0]._late().ranks == (0,)
    places = [[1, 2, "x" * 3000, "host"], [10**4000, 2, "saving", "host"]]
    for key, value in [(FIRST_FAILURE, "9" * 4000), *(("zero", json.dumps(place)) for place in places)]:
        pair.store.set(key, value)
        order = pair.ranks[1]._page.read("order")
        end = time.monotonic() + 20
        while pair.ranks[1]._page.read("order")["answered"] < order["answered"] + 2:
            assert time.monotonic() < end, key
            time.sleep(0.01)
        pair.store.set(FIRST_FAILURE, "x")


def test_stacks_are_written_in_the_folder_of_the_run_only(pair: Any, tmp_path: Path) -> None:
    pair.store.set("stacks", str(tmp_path / "elsewhere"))
    pair.ranks[0].explain()
    time.sleep(0.1)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("value", FOREIGN)
def test_results_of_other_ranks(value: bytes) -> None:
    store = dist.HashStore()
    for key in ("name", "name/0"):
        store.set(key, value)
    with pytest.raises(LateRanksError, match="from rank 0"):
        share_from_rank_0("name", lambda: None, RANK_1_OF_2, store, 1)
    with pytest.raises(LateRanksError, match="from rank 0"):
        _share(0, "name", lambda: None, RANK_1_OF_2, store, 1)


@pytest.mark.parametrize("value", FOREIGN)
def test_facts_of_other_ranks(value: bytes) -> None:
    store = dist.HashStore()
    facts = dist.PrefixStore("equal/all", store)
    facts.set("decision", json.dumps({"result": [[0, 1], [1, 1]]}))
    facts.set("facts/0", value)
    with pytest.raises(LateRanksError, match="from rank 0"):
        require_equal("all", {"lr": "1"}, RANK_1_OF_2, store, 1)


def test_names_of_an_attempt() -> None:
    """Rank 0 waits for the name that rank 1 draws."""
    for value in FOREIGN:
        store = dist.HashStore()
        store.set("asks/1", value)
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(agree_on_attempt, store, 0, 2, 20)
            time.sleep(0.02)
            assert agree_on_attempt(store, 1, 2, 20) == first.result()
        require_gloo_address(RANK_1_OF_2, store)


@pytest.mark.parametrize("value", [value for value in FOREIGN if not isinstance(parse_value(value, json.loads), dict)])
def test_the_store_of_the_launchers(value: bytes) -> None:
    meeting = Meeting.__new__(Meeting)
    meeting.endpoint, meeting._nodes, meeting._id, meeting._host = "node0:29500", "2", "a", "node0"
    meeting.patience_s = 0
    store = dist.HashStore()
    for key in ("facts", "node/1"):
        store.set(key, value or b"x")
    with pytest.raises(UserError, match=NO_LAUNCHER):
        meeting._require_equal(store, {})
    with pytest.raises(UserError, match="--node-rank 1 has not come"):
        meeting._wait_for_ranks(store, 0, 0.0)
