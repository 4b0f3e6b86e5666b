"""Where the launchers of several nodes meet: which of them has the store, who has come, and why one does not come."""

import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import get_rdzv_endpoint, parse_min_max_nnodes

from titanlite.ranks.agreement import describe_differences
from titanlite.ranks.network import is_loopback, network_name, own_address, unreachable
from titanlite.runtime.errors import UsageError, UserError
from titanlite.runtime.waiting import NoAnswerError, call_within, parse_value, waiting

POLL_S = 0.5
PATIENCE_S = 600
"""How long the nodes wait for each other at the start: torch's default."""
RESTART_S = 50
"""How long a fixed number of nodes wait for each other at a restart. srun ends a job 60 s after its first task."""
STORE_S = 60.0
"""A program that has accepted a connection, and does not answer for so long, is no launcher."""
TRUE = ("1", "true", "t", "yes", "y")
"""torch's values of is_host."""
NO_LAUNCHER = "a program listens there that does not answer as a launcher: choose another port on all nodes"
PORT, STATIC_PORT = 29400, 29500
"""torch's default ports of rdzv-backend c10d, and with --master-addr."""


def has_meeting(arguments: Namespace) -> bool:
    """Whether other nodes may connect to this launch, by torch's store."""
    if arguments.standalone or arguments.rdzv_backend == "static":
        return not arguments.standalone and parse_min_max_nnodes(arguments.nnodes)[1] > 1
    is_file = "store_type=file" in arguments.rdzv_conf
    return arguments.rdzv_backend == "c10d" and not is_file and not arguments.rdzv_endpoint.endswith(":0")


def _parse_facts(value: bytes) -> dict[str, str]:
    return {str(key): str(fact) for key, fact in json.loads(value).items()}


def _parse_host(value: bytes) -> str:
    host, _ = json.loads(value)
    return str(host)


class Meeting:
    """The store of the nodes, for as long as their launchers run. torch's own connections to it come afterwards."""

    def __init__(self, arguments: Namespace, facts: Mapping[str, str]) -> None:
        """Wait for the store, and with the static backend for all nodes.

        arguments: torchrun's. For c10d, sets is_host in rdzv_conf, which torch infers wrongly where the host's name has
        another address than the endpoint. facts: in which the nodes must agree. Raises UserError if the nodes do not
        meet, UsageError if this one differs from the first.
        """
        is_static = arguments.rdzv_backend == "static"
        if is_static and arguments.master_port is None:
            arguments.master_port = STATIC_PORT
        self.endpoint, self._nodes, self._id = get_rdzv_endpoint(arguments), arguments.nnodes, arguments.rdzv_id
        self._host, port = parse_rendezvous_endpoint(self.endpoint, PORT)
        self.endpoint = self.endpoint or f"{self._host}:{port}"
        settings = dict(setting.partition("=")[::2] for setting in arguments.rdzv_conf.split(","))
        name = "timeout" if is_static else "join_timeout"
        if not settings.get(name, "0").isdecimal():
            raise UsageError(f"--rdzv-conf {name}={settings[name]}: give a number of seconds")
        self.patience_s = int(settings.get(name, PATIENCE_S))
        end = time.monotonic() + self.patience_s
        self._server: dist.Store | None = None
        if is_static:
            is_host = arguments.node_rank == 0
        elif "is_host" in settings:
            is_host = settings["is_host"].lower() in TRUE
        else:
            is_host = own_address(self._host) != "" or self._host == socket.gethostname()
        if is_host:
            try:  # torch's later servers of this port join it. "localhost": the address of the endpoint may be wrong
                self._server = dist.TCPStore("localhost", port, None, True, wait_for_workers=False, multi_tenant=True)
            except dist.DistNetworkError as error:
                if is_static or "EADDRINUSE" not in str(error):  # else another launcher of this host has it
                    raise
        if not is_static and "is_host" not in settings:
            arguments.rdzv_conf = f"{arguments.rdzv_conf},is_host={self._server is not None}".lstrip(",")
        self._store = self._reach(port, end)
        self._require_one_run()
        nodes = dist.PrefixStore(f"titanlite/{self._id}", self._store)
        self._require_equal(nodes, facts)
        if is_static:
            self._wait_for_ranks(nodes, arguments.node_rank, end)

    def failed(self, cause: str, within_s: float) -> UserError:
        return UserError(f"the nodes cannot connect at {self.endpoint} within {within_s:.0f} s: {cause}")

    def lost(self, cause: str) -> UserError:
        """The error if the connection to the store breaks. cause: found last, while nodes are awaited."""
        ended = "the launcher that has the store has ended, or its node is lost: see its log"
        return UserError(f"the nodes cannot connect at {self.endpoint}: {ended}; before that, {cause}")

    def closed(self, *, has_met: bool) -> UserError:
        """The error if another launcher has closed the rendezvous. has_met: after the nodes were connected."""
        if has_met:
            return UserError("the launcher of another node has ended, so the ranks are not restarted: see its log")
        ended = "another launcher has stopped waiting, or has ended: see its log;"
        again = f"or the run of --rdzv-id {self._id} has ended before: choose another name for a new run"
        return UserError(f"the nodes cannot connect at {self.endpoint}: {ended} {again}")

    def describe(self, come: Iterable[str], lost: Iterable[str] = ()) -> str:
        """Which nodes have come, and what to check. come: names of their hosts. lost: that were connected before."""
        if names := sorted(lost):
            return f"{', '.join(names)} has not come back to restart the ranks: see the log of its launcher"
        names = sorted(come)
        if len(names) > int(self._nodes.rpartition(":")[2]):
            return (
                f"the run of --rdzv-id {self._id} has all of its nodes; this one waits until one is lost: for another "
                "run, choose another port and another name"
            )
        text = f"{len(names)} of {self._nodes} nodes have come ({', '.join(names)}); "
        if is_loopback(self._host):
            text += f"{self._host} is another host on each node, so name node 0; "
        return f"{text}here --nnodes {self._nodes} --rdzv-id {self._id}: equal on all nodes?"

    def _reach(self, port: int, end: float) -> dist.Store:
        cause = "looking up its address"
        with waiting(lambda: f"the store of the nodes at {self.endpoint}: {cause}"):
            while cause := unreachable(self._host, port):
                if time.monotonic() > end:
                    raise self.failed(cause, self.patience_s)
                time.sleep(POLL_S)
            cause = NO_LAUNCHER
            limit = timedelta(seconds=STORE_S)
            try:
                return call_within(
                    STORE_S, lambda: dist.TCPStore(self._host, port, timeout=limit, wait_for_workers=False)
                )
            except (NoAnswerError, dist.DistNetworkError):
                raise self.failed(cause, STORE_S) from None

    def _require_one_run(self) -> None:
        """Raise UsageError if the store is that of another run, with which it would end."""
        key, store = "titanlite/run", self._store

        def read() -> bytes:
            if self._server is not None:
                return store.compare_set(key, "", self._id)
            return store.get(key) if store.check([key]) else b""  # a store without a launcher

        with self._connected(lambda: "this node was about to join"):
            run = call_within(STORE_S, read).decode(errors="replace") or self._id
        if run != self._id:
            remedy = "give all nodes of a run one name, and another run another port"
            raise UsageError(f"the store at {self.endpoint} is that of --rdzv-id {run}, here {self._id}: {remedy}")

    def _require_equal(self, store: dist.Store, facts: Mapping[str, str]) -> None:
        with self._connected(lambda: "this node was about to join"):
            value = call_within(STORE_S, lambda: store.compare_set("facts", "", json.dumps(facts)))
        first = parse_value(value, _parse_facts)
        if first is None:
            raise self.failed(NO_LAUNCHER, STORE_S)
        if lines := describe_differences(facts, first, "on the first node"):
            head = "this node differs from the first one, so it does not join; make them equal on all nodes:"
            raise UsageError(head, *lines)

    def _wait_for_ranks(self, store: dist.Store, rank: int, end: float) -> None:
        """Wait for a node of each --node-rank. Raises UsageError if another one has that of this node; UserError."""
        own = json.dumps([socket.gethostname(), network_name()])
        come: list[str] = []
        missing = list(range(int(self._nodes.partition(":")[0])))

        def describe() -> str:
            return f"{self.describe(come)} --node-rank {', '.join(map(str, missing[:5]))} has not come"

        def look() -> None:
            for number in [each for each in missing if store.check([f"node/{each}"])]:
                if (host := parse_value(store.get(f"node/{number}"), _parse_host)) is not None:
                    come.append(host)
                    missing.remove(number)

        with self._connected(describe):
            first = call_within(STORE_S, lambda: store.compare_set(f"node/{rank}", "", own))
            if first != own.encode():
                hosts = f"{parse_value(first, _parse_host) or 'an unknown host'} and {socket.gethostname()}"
                raise UsageError(f"two nodes have --node-rank {rank}: {hosts}; number the nodes from 0")
            with waiting(lambda: f"the other nodes at {self.endpoint}: {describe()}"):
                while missing:
                    call_within(STORE_S, look)
                    if missing and time.monotonic() > end:
                        raise self.failed(describe(), self.patience_s)
                    time.sleep(POLL_S if missing else 0)

    @contextmanager
    def _connected(self, describe: Callable[[], str]) -> Iterator[None]:
        """Context of requests to the store. describe: what is found so far, for the error if the connection breaks."""
        try:
            yield
        except RuntimeError:  # of torch; NoAnswerError
            raise self.lost(describe()) from None

    def watch(self, is_needed: Callable[[], bool], end: Callable[[str], None]) -> None:
        """Call `end`, in a thread, if the store is needed and does not answer: torch waits for it without a limit.

        is_needed: whether this node waits for others, or its ranks have ended. While ranks run, they decide.
        """
        message = f"the store of the nodes at {self.endpoint} does not answer: node 0 or the network is lost"

        def watch() -> None:
            while True:
                time.sleep(POLL_S)
                if is_needed():
                    try:
                        call_within(RESTART_S, lambda: self._store.check(["facts"]))
                    except NoAnswerError:
                        return end(message)
                    except RuntimeError:
                        return None  # its launcher has ended, as torch will notice

        threading.Thread(target=watch, name="titanlite-store", daemon=True).start()
