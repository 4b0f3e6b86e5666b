"""Launchers on two hosts that do not meet, or lose each other: every wait has a line with its cause, and an end."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.namespaces import ADDRESSES, HOSTS, Hosts, Launcher, missing

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(missing()), reason=f"network namespaces: {missing()}")]

START_S = 60
"""Time until a launcher has checked its configuration, on a busy machine."""
FIRST_LINE_S = 15
PATIENCE_S = 14
"""In place of 600 s."""
RESTART_S = 60
NOT_ALL = r"1 of 2 nodes have come \(w\d\); here --nnodes 2 --rdzv-id"
SILENT = f"{ADDRESSES[0]} does not answer: a wrong address, a host that is down, or a firewall"
DIFFERS = r"does not join; make them equal on all nodes:\n    --nnodes: 3; on the first node: 2"


def c10d(endpoint: str = f"{ADDRESSES[0]}:29500", nodes: str = "2", run: str = "a") -> list[str]:
    names = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run]
    return [*names, "--rdzv-conf", f"join_timeout={PATIENCE_S}"]


def static(rank: int, address: str = ADDRESSES[0], nodes: str = "2", port: str = "29500") -> list[str]:
    names = ["--nnodes", nodes, "--node-rank", str(rank), "--master-addr", address, "--master-port", port]
    return [*names, "--rdzv-conf", f"timeout={PATIENCE_S}"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    made = Hosts(tmp_path)
    yield made
    made.close()


CASES = {
    "wrong address": [(1, c10d("10.9.0.77:29500"), SILENT.replace(ADDRESSES[0], "10.9.0.77"), 1)],
    "no store": [(1, c10d(), f"no program listens on port 29500 of {ADDRESSES[0]}", 1)],
    "unknown name": [(1, c10d("nowhere:29500"), "cannot resolve nowhere", 1)],
    "one node": [(0, c10d(), NOT_ALL, 1)],
    "a third node": [(host, c10d(nodes="3"), r"[12] of 3 nodes have come \(w\d", 1) for host in (0, 1)],
    "another id": [(0, c10d(), NOT_ALL + " a: equal", 1), (1, c10d(run="b"), "is that of --rdzv-id a, here b", 2)],
    "another number": [(0, c10d(), NOT_ALL, 1), (1, c10d(nodes="3"), DIFFERS, 2)],
    "localhost": [(host, c10d("localhost:29500"), "localhost is another host on each node", 1) for host in (0, 1)],
    "static, wrong address": [(1, static(1, "10.9.0.77"), SILENT.replace(ADDRESSES[0], "10.9.0.77"), 1)],
    "static, no store": [(1, static(1), f"no program listens on port 29500 of {ADDRESSES[0]}", 1)],
    "static, unknown name": [(1, static(1, "nowhere"), "cannot resolve nowhere", 1)],
    "static, another port": [
        (0, static(0), NOT_ALL + r".* --node-rank 1 has not come", 1),
        (1, static(1, port="29501"), f"no program listens on port 29501 of {ADDRESSES[0]}", 1),
    ],
    "static, another number": [(0, static(0), NOT_ALL, 1), (1, static(1, nodes="3"), DIFFERS, 2)],
    "static, one rank twice": [
        (0, static(0), NOT_ALL, 1),
        (1, static(0), "two nodes have --node-rank 0: w0 and w1", 2),
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_nodes_that_do_not_meet(case: str, hosts: Hosts) -> None:
    """A line after 8 s and the last line name the cause. What another node refuses is said at once."""
    started: list[tuple[Launcher, str, int]] = []
    for host, options, cause, code in CASES[case]:
        if started:
            time.sleep(1)  # the first one begins; it waits for PATIENCE_S, which the start of a launcher may take
        started.append((hosts.launch(host, *options), cause, code))
    for launcher, cause, code in started:
        assert launcher.wait(START_S + PATIENCE_S + FIRST_LINE_S) == code, launcher.log
        last = launcher.log[launcher.log.index("titanlite: ") :]
        assert re.search(cause, last), launcher.log
        assert code == 2 or re.search(rf"^waiting for \d+ s for .*{cause}", launcher.log, re.MULTILINE), launcher.log
        assert "frame #" not in launcher.log
        assert last.startswith("titanlite: the nodes cannot connect at ") == (code == 1)


@pytest.mark.parametrize("is_static", [False, True])
def test_a_link_that_is_cut_while_nodes_are_awaited(hosts: Hosts, *, is_static: bool) -> None:
    """torch waits for the store without a limit."""
    patience = "timeout=600" if is_static else "join_timeout=600"
    rendezvous = [static(host, nodes="3") if is_static else c10d(nodes="3") for host in (0, 1)]
    _, second = [hosts.launch(host, *options[:-1], patience) for host, options in enumerate(rendezvous)]
    second.wait_for(lambda: "2 of 3 nodes have come (w0, w1)" in second.log, 2 * START_S)
    hosts.set_link("down")
    assert second.wait(RESTART_S + 20) == 1
    cause = (
        "launcher that has the store has ended, or its node is lost" if is_static else "node 0 or the network is lost"
    )
    assert re.search(rf"^titanlite: the .* {cause}", second.log, re.MULTILINE), second.log


def train(hosts: Hosts, *options: str, keys: tuple[str, ...] = ()) -> list[Launcher]:
    """Start a training on both hosts; return its launchers after 20 steps."""
    rendezvous = c10d()[:-1]
    launchers = [hosts.launch(host, *rendezvous, "join_timeout=600", *options, keys=keys) for host in (0, 1)]
    wait_for_step(launchers, 20)
    return launchers


def wait_for_step(launchers: list[Launcher], step: int) -> None:
    first, second = launchers
    first.wait_for(lambda: f" {step}/100000 " in first.log + second.log, 2 * START_S)


def test_a_killed_launcher(hosts: Hosts) -> None:
    """The other one has the store, restarts its ranks, and waits at most 60 s, with a line."""
    first, second = train(hosts, "--max-restarts", "3")
    os.kill(second.process.pid, signal.SIGKILL)
    killed = time.monotonic()
    lost = "w1 has not come back to restart the ranks: see the log of its launcher"
    line = re.compile(rf"^waiting for \d+ s for the other nodes .*{lost}", re.MULTILINE)
    first.wait_for(lambda: line.search(first.log) is not None, 25)
    assert first.wait(RESTART_S + 10) == 1
    assert time.monotonic() - killed < RESTART_S + 10
    assert f"titanlite: the nodes cannot connect at {ADDRESSES[0]}:29500 within 50 s: {lost}\n" in first.log


def test_a_killed_launcher_that_has_the_store(hosts: Hosts) -> None:
    first, second = train(hosts, "--max-restarts", "3")
    os.kill(first.process.pid, signal.SIGKILL)
    assert second.wait(15) == 1
    assert "the launcher of node 0, which hosts the store of the nodes at" in second.log


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_link_that_is_cut_for_good(restarts: int, hosts: Hosts) -> None:
    timeout_s = 5
    first, second = train(hosts, "--max-restarts", str(restarts), keys=("--comm.train_timeout_s", str(timeout_s)))
    hosts.set_link("down")
    assert first.wait(timeout_s + RESTART_S + 20) == 1
    assert second.wait(timeout_s + RESTART_S + 20) == 1
    assert ("within 50 s: w1 has not come back" in first.log) == (restarts > 0)
    lost = "does not answer: node 0 or the network is lost"
    assert f"titanlite: the store of the nodes at {ADDRESSES[0]}:29500 {lost}\n" in second.log


def test_a_link_that_is_cut_for_5_seconds(hosts: Hosts) -> None:
    launchers = train(hosts)
    hosts.set_link("down")
    time.sleep(5)
    hosts.set_link("up")
    step = max(int(found) for found in re.findall(r" (\d+)/100000 ", "".join(each.log for each in launchers)))
    wait_for_step(launchers, step + 100)


OWN_NAMES = [re.sub(rf"^\S+ w{host}$", f"127.0.1.1 w{host}", HOSTS, flags=re.MULTILINE) for host in (0, 1)]
RENDEZVOUS = {"address": lambda _: c10d(), "name": lambda _: c10d("w0:29500"), "static": static}


@pytest.mark.parametrize("options", RENDEZVOUS.values(), ids=RENDEZVOUS)
@pytest.mark.parametrize("interface", ["", "eth0"])
def test_a_host_whose_own_name_is_at_127_0_1_1(
    options: Callable[[int], list[str]], interface: str, hosts: Hosts
) -> None:
    """Node 0 has the store, and gloo needs the name of an interface."""
    variables = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    launchers = [
        hosts.launch(host, *options(host), "--max-restarts", "3", hosts=OWN_NAMES[host], variables=variables)
        for host in (0, 1)
    ]
    if interface:
        wait_for_step(launchers, 20)
        return
    assert 2 in {launcher.wait(2 * START_S) for launcher in launchers}  # the other one may only lose the store
    refused = r"^titanlite: rank \d on w\d: ranks of other hosts cannot reach 127\.0\.1\.1, .* GLOO_SOCKET_IFNAME=eth0 "
    assert re.search(refused, "".join(each.log for each in launchers), re.MULTILINE)
