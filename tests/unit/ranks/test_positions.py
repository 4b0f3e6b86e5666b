"""Which rank a message names: one without heartbeats, else that with the oldest position; the flight recorder."""

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import run_ranks
from titanlite.ranks import collector, election, positions, signals
from titanlite.ranks.distributed import enable_flight_recorder, keep_nccl_records
from titanlite.ranks.message import last_numbers, ranks_behind
from titanlite.ranks.positions import Positions, late_error
from titanlite.runtime.errors import LateRanksError
from titanlite.runtime.torch_internals import recorded_collectives
from titanlite.runtime.waiting import SETTLE_S


def fail() -> None:
    raise AssertionError("no rank is silent")


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((collector, "INTERVAL_S"), (positions, "POLL_S"), (positions, "TICK_S"), (signals, "TICK_S")):
        monkeypatch.setattr(module, name, 0.02)


def connected(server: dist.TCPStore) -> dist.Store:
    """A connection that does not keep the server alive: the threads of a test end with it."""
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def beats_of(store: dist.Store, rank: int) -> Callable[..., None]:
    """give(beat, step, pulse_s): a heartbeat of a node that has this rank only."""
    number = store.add("collectors", 1)
    store.set(f"page/{rank}", json.dumps(["node1", ""]))
    store.set(f"collectives/{number}", "{}")

    def give(beat: int, step: int, pulse_s: float = 0.0) -> None:
        row = ["running", pulse_s, beat + 1, step, "saving", 0.0, False]
        store.set(f"node/{number}", json.dumps({"beat": beat, "host": "node1", "ranks": {rank: row}}))

    return give


@pytest.mark.slow
def test_ranks_see_each_other_and_write_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process, of which only rank 1 enters the second phase."""
    monkeypatch.setattr(collector, "INTERVAL_S", 0.05)
    monkeypatch.setattr(positions, "SETTLE_S", 1.5)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        Positions(dist.PrefixStore("p", connected(store)), rank, 2, range(2), str(tmp_path), 1000.0, fail)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.enter(3, "waiting for data")
    ranks[1].enter(3, "saving")
    time.sleep(0.3)
    assert election.register(ranks[1].background, "1")
    text = ranks[1].explain()
    assert "rank 0 on " in text
    assert "hangs or lags: in step 3 (waiting for data)" in text
    (folder,) = (tmp_path / "faults").iterdir()
    assert text.endswith(f"stacks and last collectives of all running ranks: {folder}")
    assert "test_ranks_see_each_other" in (folder / "rank-0.txt").read_text()


def test_one_process_needs_no_store(tmp_path: Path) -> None:
    Positions(dist.HashStore(), 0, 1, range(1), str(tmp_path), 1000.0, fail).enter(1, "saving")


def test_ranks_see_each_other_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be lost soon: the message then has the position of rank 0."""
    quick(monkeypatch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = Positions(connected(store), 1, 2, range(2), None, 1000.0, fail)
    time.sleep(0.1)
    begin = time.monotonic()
    Positions(connected(store), 0, 2, range(2), None, 1000.0, fail)
    while first._view.seen[0].host != socket.gethostname() or first._order["zero"] is None:
        assert time.monotonic() - begin < 10
        time.sleep(0.01)
    assert first._order["zero"][:4] == [1, 0, "start-up", socket.gethostname()]


def test_rank_0_logs_for_which_rank_the_others_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing, however long a phase takes, while all ranks are in it."""
    quick(monkeypatch)
    monkeypatch.setattr(positions, "FIRST_S", 1.5)  # a heartbeat may come late on a busy machine
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Positions(connected(store), rank, 2, range(2), None, 1000.0, fail) for rank in range(2)]
    for rank in ranks:
        rank.enter(3, "waiting for data")
    time.sleep(2)
    assert caplog.messages == []
    ranks[0].enter(3, "saving")
    end = time.monotonic() + 20
    while not caplog.messages:
        assert time.monotonic() < end
        time.sleep(0.01)
    (line,) = caplog.messages
    assert re.fullmatch(
        r"waiting for \d s: rank 1 on .* hangs or lags: in step 3 \(waiting for data\) for \d s; .*", line
    )


@pytest.mark.slow
def test_a_silent_rank_is_noticed_once_in_any_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is a node of its own, whose heartbeats the test gives, and then stops."""
    quick(monkeypatch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    calls = []
    called = threading.Event()

    def on_silence() -> None:
        calls.append(threading.current_thread().name)
        called.set()

    Positions(connected(store), 0, 2, range(1), None, 0.5, on_silence)
    give = beats_of(store, 1)
    for beat in range(50):  # twice as long as the limit
        give(beat, beat // 10)
        time.sleep(0.02)
    assert not calls
    assert called.wait(60)
    time.sleep(0.2)
    assert calls == ["titanlite-end"]


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_python_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node gives heartbeats, its watch thread no pulse."""
    quick(monkeypatch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    called = threading.Event()
    Positions(connected(store), 0, 2, range(1), None, 0.5, called.set)
    give, begin = beats_of(store, 1), time.monotonic()
    while not called.wait(0.02):
        assert time.monotonic() - begin < 60
        give(round(50 * (time.monotonic() - begin)), 3, pulse_s=time.monotonic() - begin)


def test_silence_does_not_count_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index may be built for hours, by code that holds the interpreter's lock."""
    quick(monkeypatch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    beats_of(store, 1)(1, 0)
    silent = threading.Event()
    Positions(connected(store), 0, 2, range(1), None, 0.1, silent.set)
    assert not silent.wait(0.5)


def entry_of(number: int, state: str = "completed", **changed: Any) -> dict[str, Any]:
    """An entry of NCCL's records."""
    group = {"process_group": ["0", "default_pg"], "collective_seq_id": number, "state": state}
    about = {"is_p2p": False, "profiling_name": "nccl:all_reduce", "timeout_ms": 60_200}
    return {**group, **about, "time_discovered_started_ns": 0, **changed}


SENT = {"is_p2p": True, "profiling_name": "nccl:send 0->1"}
BATCH = {"is_p2p": True, "profiling_name": "nccl:coalesced"}


@pytest.mark.parametrize(
    ("entries", "waits"),
    [
        ([entry_of(8), entry_of(9, "scheduled")], True),
        ([entry_of(8), entry_of(9, "started")], True),
        ([entry_of(9), entry_of(1, "scheduled", **SENT), entry_of(1, "scheduled", **BATCH)], True),
        ([entry_of(8), entry_of(9)], False),
        # Of a batch of sends, only the batch is ever noted as ended.
        ([entry_of(9), entry_of(1, "scheduled", **SENT), entry_of(1, **BATCH)], False),
        ([entry_of(9, "scheduled", timeout_ms=600_000)], False),
        ([], False),
        ([{}], False),
        (None, False),
    ],
)
def test_a_rank_that_waits_for_the_timeout_on_its_device_ends(
    entries: list[Any] | None, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL, which ends the ranks that wait and blames them, has its timeout 60 s later."""
    quick(monkeypatch)
    monkeypatch.setattr(positions, "LOOK_S", 0.02)
    monkeypatch.setattr(positions, "TICK_S", 1e-4)  # silence of the store: 1,000 times as late
    monkeypatch.setattr(positions, "numbers_of_collectives", lambda: "" if entries is None else "numbers")
    monkeypatch.setattr(positions, "recorded_collectives", lambda: {"nccl": json.dumps({"entries": entries})})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = threading.Event()
    Positions(connected(store), 0, 2, range(2), None, 0.1, ended.set)
    assert ended.wait(30.0 if waits else 0.5) is waits


def test_collectives_that_begin_or_end_are_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the device is not asked, which may block the process."""
    quick(monkeypatch)
    monkeypatch.setattr(positions, "LOOK_S", 0.02)
    monkeypatch.setattr(positions, "TICK_S", 1e-4)
    monkeypatch.setattr(positions, "numbers_of_collectives", lambda: f"{int(20 * time.monotonic())}")
    questions = list[float]()
    monkeypatch.setattr(positions, "recorded_collectives", lambda: questions.append(0) or {"nccl": ""})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ended = threading.Event()
    Positions(connected(store), 0, 2, range(2), None, 0.1, ended.set)
    assert not ended.wait(0.5)
    assert not questions


def test_any_rank_of_a_node_notices_one_whose_threads_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first nor the last one of the job: those may hold Python's lock as well, in launches that wait."""
    quick(monkeypatch)
    monkeypatch.setattr(collector, "PULSE_S", 0.1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    noticed = [threading.Event() for _ in range(2)]
    ranks = [
        Positions(connected(store), rank, 4, range(1, 3), None, 0.5, event.set)
        for rank, event in zip((1, 2), noticed, strict=True)
    ]
    signals.watch().checks.remove(ranks[1]._tick)
    assert not noticed[0].wait(1.5)  # it has not begun training
    for rank in ranks:
        rank.enter(3, "step")
    assert noticed[0].wait(30)
    assert not noticed[1].is_set()


@pytest.mark.parametrize(("nodes", "timeout_s", "warns"), [(2000, 7, True), (2000, 8, False), (256, 1, False)])
def test_a_timeout_that_is_shorter_than_heartbeats_allow_is_a_warning(
    nodes: int, timeout_s: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Positions(connected(store), 0, 8 * nodes, range(8), None, timeout_s, lambda: None)
    expected = "comm.train_timeout_s = 7 is short for 2000 nodes, which give heartbeats every 2.0 s: "
    assert (expected in caplog.text) == ("is short for" in caplog.text) == warns


def test_a_rank_that_has_left_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watch thread may write a pulse at the same time, and its process end before the next one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = Positions(connected(store), 1, 2, range(2), None, 1000.0, fail)
    signals.watch().checks.remove(rank._tick)
    write, writes = rank._page.write, threading.Event()

    def slow(record: str, value: Any) -> None:
        if record == "pulse" and value[1] is False:
            writes.set()
            time.sleep(0.2)
        write(record, value)

    monkeypatch.setattr(rank._page, "write", slow)
    ticks = threading.Thread(target=rank._tick)
    ticks.start()
    assert writes.wait(30)
    rank.leave()
    ticks.join()
    assert rank._page.read("pulse")[1] is True


class StoppedStore:
    """Simulates a store whose process is stopped: what needs no answer returns, all else blocks."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def set(self, key: str, value: str) -> None:
        pass

    def clone(self) -> "StoppedStore":
        return self

    def check(self, *args: Any) -> bool:
        del args
        self.ended.wait(60)
        raise RuntimeError("ended")

    compare_set = check


def test_a_store_that_does_not_answer_is_noticed_and_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even before the first step."""
    quick(monkeypatch)
    monkeypatch.setattr(positions, "ANSWER_S", 0.1)
    store, called = StoppedStore(), threading.Event()
    rank = Positions(store, 1, 2, range(2), str(tmp_path), 0.2, called.set)  # type: ignore[arg-type]
    assert called.wait(30)
    begin = time.monotonic()
    text = rank.explain()
    assert time.monotonic() - begin < SETTLE_S
    store.ended.set()
    assert text.startswith("the launcher or rank 0 has ended, is stopped, or its node is lost")
    assert "test_a_store_that_does_not_answer" in next((tmp_path / "faults").glob("*/rank-1.txt")).read_text()


@pytest.mark.slow
def test_ranks_finish_together_or_name_the_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 has failed, and printed its error: the others do not wait for it."""
    monkeypatch.setattr(positions, "SETTLE_S", 0.6)
    quick(monkeypatch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Positions(connected(store), rank, 3, range(3), None, 1.0, lambda: None) for rank in range(3)]
    for rank in ranks:
        rank.enter(6, "ending")
    ranks[2].enter(6, "finished")
    ranks[2].leave()
    with pytest.raises(LateRanksError, match=r"^no message within 1 s from rank 1$"):
        ranks[0].finish(6)
    assert ranks[0].explain().startswith("rank 1 on ")
    assert "hangs or lags: in step 6 (ending)" in ranks[0].explain()
    assert ranks[0].silent(10.0) == []
    ranks[1].finish(6)
    ranks[0].finish(6)


def _collectives_of_a_rank() -> tuple[dict[str, int], list[str]]:
    pairs = [dist.new_group([0, 1]), dist.new_group([0])]
    for _ in range(3):
        dist.all_reduce(torch.ones(4), group=pairs[0])
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=pairs[1])
    recorded = recorded_collectives()
    operations = [entry["profiling_name"] for entry in json.loads(recorded["gloo"])["entries"]]
    return last_numbers(recorded), operations


@pytest.mark.skipif(not recorded_collectives(), reason="this torch has no JSON dump")
def test_collectives_are_recorded_on_gloo() -> None:
    (first, operations), (second, _) = run_ranks(_collectives_of_a_rank, 2)
    assert "gloo:all_reduce" in operations
    assert set(second) < set(first)  # groups have the same name on all of their ranks
    assert ranks_behind({0: first, 1: second}) == []


def test_the_environment_decides_on_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    enable_flight_recorder()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    enable_flight_recorder()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "0"


def test_nccl_writes_its_records_beside_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    keep_nccl_records(tmp_path / "run" / "faults")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/run/faults/nccl-rank-"
    assert (tmp_path / "run" / "faults").is_dir()
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "elsewhere")
    keep_nccl_records(tmp_path / "run" / "faults")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == "elsewhere"


def test_without_a_recorder_there_are_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on older versions of torch."""
    monkeypatch.setattr(torch._C, "_distributed_c10d", object())
    assert recorded_collectives() == {}
    assert last_numbers({"gloo": '{"pg_config": {}}'}) == {"gloo 0 default_pg": 0}


def test_one_rank_looks_for_those_that_are_late() -> None:
    """A look takes a request per rank, and all ranks end their wait at the same time."""
    store, looks = dist.HashStore(), list[int]()

    def error_of(rank: int) -> LateRanksError:
        return late_error(store, rank, 1000, 5.0, lambda: [*range(looks.append(rank) or 400, 700)])

    found = [error_of(rank) for rank in (3, 4, 5)]
    assert looks == [3]
    assert {error.ranks for error in found} == {tuple(range(400, 464))}
    assert {str(error) for error in found} == {"no message within 5 s from rank 400 and 299 more"}
    assert late_error(dist.HashStore(), 3, 1000, 5.0, list).ranks == (0,)
