"""The process or thread that gives the heartbeats of a node: which one does, and what it ends."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from titanlite.ranks import collector
from titanlite.ranks.collector import PROCESS, Collector, interval_s, parse_node
from titanlite.ranks.launch import fork_context
from titanlite.ranks.page import RECORDS, Page
from titanlite.ranks.positions import Positions

LIMIT_S = 60.0  # generous, for a busy machine


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connected(server: dist.TCPStore) -> dist.Store:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_rank(port: int, rank: int, holds_lock: bool) -> None:
    """A rank of three on one node, in a step; its first rank starts the process that collects them."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    positions = Positions(store, rank, 3, range(3), None, 1000.0, lambda: None)
    positions.start_process()
    positions.enter(3, "step")
    store.wait(["go"])
    if holds_lock:
        ctypes.PyDLL(None).sleep(1000)
    time.sleep(1000)


@pytest.fixture
def ranks(server: dist.TCPStore) -> Iterator[list[ForkServerProcess]]:
    """Three ranks, of which the second will hold Python's lock."""
    processes = [fork_context().Process(target=is_rank, args=(server.port, rank, rank == 1)) for rank in range(3)]
    for process in processes:
        process.start()
    yield processes
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks collect for themselves")
def test_the_process_of_a_node_outlives_its_ranks_and_kills_those_that_cannot_end(
    ranks: list[ForkServerProcess], server: dist.TCPStore
) -> None:
    """The first rank, which has started it, is killed; the second holds Python's lock; the third ends by itself."""
    wait_until(lambda: server.check(["node/1"]) and len(node(server).ranks) == 3)
    assert [row.state for row in node(server).ranks.values()] == ["running"] * 3
    assert server.add("collectors", 0) == 1  # no rank collects
    ranks[0].kill()
    wait_until(lambda: node(server).ranks[0].state == "ended")
    server.set("go", "")
    wait_until(lambda: node(server).ranks[1].pulse_s > 2)
    assert (node(server).ranks[1].state, node(server).ranks[1].step, node(server).ranks[1].phase) == (
        "running",
        3,
        "step",
    )
    server.set("titanlite/first_failure", "printed")
    ranks[1].join(LIMIT_S)
    assert ranks[1].exitcode == -signal.SIGKILL
    assert ranks[2].is_alive()
    assert node(server).ranks[2].pulse_s < 2
    ranks[2].kill()
    last = node(server).beat
    wait_until(lambda: node(server).beat > last and node(server).ranks[2].state == "ended")


def test_ranks_may_finish_their_work_after_the_loss_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that end by themselves, do so after silence_s."""
    killed: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, _: killed.append(pid))
    monkeypatch.setattr(collector, "KILL_S", 0.0)
    page = Page.create()
    page.pid += 1
    page.write("pulse", [time.monotonic() - 10, False])
    monkeypatch.setattr(page, "state", lambda: "running")
    own = Collector(dist.HashStore(), [], {0: page}, PROCESS, 1, 0)
    own.end_ranks(1000.0)
    own.kill()
    assert killed == []
    own.end_ranks()
    own.kill()
    assert killed == [page.pid]


def looks_for_silent_ranks(port: int) -> None:
    """The first of three ranks of a node, which has the launcher's signal once another one is killed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    positions = Positions(store, 0, 3, range(3), None, 1000.0, lambda: None)
    positions.start_process()
    store.wait(["killed"])
    store.set("silent", json.dumps(positions.silent(2.0)))
    time.sleep(1000)


@pytest.mark.slow
def test_a_killed_rank_is_silent_for_one_that_has_never_read_its_page(server: dist.TCPStore) -> None:
    context = fork_context()
    first = context.Process(target=looks_for_silent_ranks, args=(server.port,))
    others = [context.Process(target=is_rank, args=(server.port, rank, False)) for rank in (1, 2)]
    for process in (first, *others):
        process.start()
    try:
        wait_until(lambda: server.check(["where/0", "where/1", "where/2"]))
        others[1].kill()
        others[1].join()
        server.set("killed", "")
        server.wait(["silent"], timedelta(seconds=LIMIT_S))
        assert json.loads(server.get("silent")) == [2]
    finally:
        for process in (first, *others):
            process.kill()
            process.join()


def node(store: dist.Store) -> Any:
    return parse_node(store.get("node/1"))


def collectors_of(server: dist.TCPStore, count: int) -> tuple[list[Page], list[Collector]]:
    """Pages of ranks of one node, and the collector in each of them."""
    pages = [Page.create() for _ in range(count)]
    for page in pages:
        page.write("pulse", [time.monotonic(), False])
        page.write("position", [1, 0, "start-up", time.monotonic()])
    every = dict(enumerate(pages))
    return pages, [Collector(connected(server), [], every, rank + 1, 1, rank + 1) for rank in range(count)]


def test_the_lowest_rank_that_runs_collects(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "INTERVAL_S", 0.05)
    pages, collectors = collectors_of(server, 3)
    end = time.monotonic() + LIMIT_S
    while pages[0].read("order") is None and time.monotonic() < end:
        collectors[2].beat()
    assert {page.read("order")["by"] for page in pages} == {3}
    collectors[1].beat()  # goes first, and takes the ranks back
    assert {page.read("order")["by"] for page in pages} == {2}
    collectors[2].beat()
    collectors[1].beat()
    assert {page.read("order")["by"] for page in pages} == {2}
    assert server.add("collectors", 0) == 2
    time.sleep(0.2)  # its rank hangs
    collectors[2].beat()
    assert {page.read("order")["by"] for page in pages} == {3}
    Collector(connected(server), [], dict(enumerate(pages)), PROCESS, 1, 0).beat()
    assert {page.read("order")["by"] for page in pages} == {PROCESS}


def test_ranks_that_another_one_has_collected_for_a_while_are_found_again(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a slow store, or a node that was stopped. Else all nodes would take the rank that prints for silent."""
    monkeypatch.setattr(collector, "INTERVAL_S", 0.02)
    pages, deputies = collectors_of(server, 2)
    process = Collector(connected(server), [], dict(enumerate(pages)), PROCESS, 1, 0)
    process.beat()
    time.sleep(0.1)
    deputies[0].beat()
    assert server.get("where/1") == b"2"
    process.beat()
    assert server.get("where/1") == b"1"
    server.set("where/1", "2")  # the deputy waits for the store meanwhile
    server.set("titanlite/first_failure", "1")
    process.beat()
    assert server.get("where/1") == b"1"


def test_many_nodes_give_heartbeats_less_often() -> None:
    assert [interval_s(nodes) for nodes in (1, 256, 512, 2048)] == [0.5, 0.5, 1.0, 2.0]


def test_a_page_is_read_by_its_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)  # as in Python builds for many systems
    page = Page.create()
    assert not os.get_inheritable(int(page.address.split()[1]))
    page.write("position", [1, 2, "saving", 3.5])
    other = Page.open(page.address)
    assert other.read("position") == [1, 2, "saving", 3.5]
    assert other.read("last") is None
    other.write("order", {"by": 0})
    assert page.read("order") == {"by": 0}
    offset, _ = RECORDS["order"]
    other._memory[offset + 8] += 1  # while it is written
    assert page.read("order") == {"by": 0}
    assert Page.open(page.address).read("order") is None
    pid, descriptor, began, token = page.address.split()
    file = os.open("/dev/null", os.O_RDWR)
    wrong = [f"{pid} {file} {began} {token}", f"{pid} {descriptor} 1 {token}", f"{pid} {descriptor} {began} {'0' * 32}"]
    for address in (*wrong, "", "a b c d", "../../x 1 1 1", "999999999 3 1 1"):
        with pytest.raises((OSError, ValueError)):
            Page.open(address)
    os.close(file)


def test_without_shared_memory_a_rank_has_a_page_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.ranks.page._new_memory", lambda: -1)  # a container may forbid the call
    own = Page.create()
    own.write("pulse", [1.0, False])
    assert (own.address, own.read("pulse"), own.state()) == ("", [1.0, False], "running")


def test_the_state_of_a_process_is_known_without_its_help() -> None:
    page = Page.create()
    assert page.state() == "running"
    if (pid := os.fork()) == 0:
        time.sleep(100)
        os._exit(0)
    began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    child = Page(page._memory, "", pid, began)
    for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGCONT, "running"), (signal.SIGKILL, "ended")):
        os.kill(pid, number)
        wait_until(lambda state=state: child.state() == state)  # type: ignore[misc]
    os.waitpid(pid, 0)
    assert child.state() == "ended"
