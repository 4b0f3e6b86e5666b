"""torchrun for the training: it checks the configuration before it starts a rank, and reports errors in one line.

python -m titanlite.torchrun [options of torchrun] -m titanlite.train [CONFIG] [--section.key VALUE ...]
"""

from titanlite.ranks.failure import (
    REFUSED,
    FailureReport,
    end_process,
    prepare_process,
    raise_on_interrupt,
    write_error_file,
)
from titanlite.torchrun.launcher import forget_rank

if __name__ == "__main__":  # before the imports that take seconds
    forget_rank()
    prepare_process()

import logging
import os
import signal
import sys
import tempfile
import uuid
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.api import logger as agent_logger
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import logger as rendezvous_logger
from torch.distributed.launcher import api
from torch.distributed.run import determine_local_world_size, get_rdzv_endpoint, parse_args, parse_min_max_nnodes, run

from titanlite.assembly.facts import program_facts
from titanlite.config.load import most_ranks, read_command_line, resolve
from titanlite.ranks.distributed import ELASTIC, World
from titanlite.ranks.signals import stop_signals
from titanlite.runtime.environment import raise_open_file_limit, safe_imports
from titanlite.runtime.errors import ConfigError, Rules, UsageError, UserError
from titanlite.runtime.gpus import set_allocator
from titanlite.runtime.torch_internals import hosts_of_nodes, set_join_timeout
from titanlite.runtime.waiting import waiting
from titanlite.tools.plan.preview import preview
from titanlite.torchrun.nodes import RESTART_S, Meeting, has_meeting
from titanlite.torchrun.one_node import stay_on_node

TRAIN = "titanlite.train"
RENDEZVOUS = {"last_call_timeout": 5, "keep_alive_interval": 3, "keep_alive_max_attempt": 5}
"""Of an elastic launch, in seconds. last_call_timeout: how long the fewest nodes wait for further ones. A node without
a heartbeat for keep_alive_interval x keep_alive_max_attempt is lost, and a restart continues without it."""
USAGE_ERROR = 2
"""Exit code of a rank that refuses its configuration."""
EXIT_BARRIER_S = 30
"""After its ranks have ended, a launcher waits for those of the other nodes, which may have left already. titanlite's
ranks end together; torch's limit is 300 s."""


class Agent(LocalElasticAgent):
    """torchrun's agent, whose first node publishes the address of the ranks' store in each round of the rendezvous.

    It does not restart ranks of which one refuses to start: it would refuse again. At a restart, a fixed number of
    nodes wait for each other for RESTART_S. Of an elastic launch, it also
    - leaves the run to the other nodes if a rank refuses to start;
    - restarts its ranks if a node is lost before they are connected; later, they notice.

    meeting: of several nodes.
    """

    has_met = False
    """Whether the nodes of this launch were connected."""

    def __init__(self, *arguments: Any, meeting: Meeting | None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._meeting = meeting
        self._hosts: Counter[str] = Counter()  # of the nodes that were connected last

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = worker_group.spec.rdzv_handler
        if isinstance(handler, DynamicRendezvousHandler):
            # torch 2.13 publishes it in the first round only: a node that joins later would wait for it.
            handler._bootstrap_store_info = None
        if ELASTIC in os.environ:
            Path(os.environ[ELASTIC]).unlink(missing_ok=True)
        if self._meeting is not None and not Agent.has_met:
            self._meeting.watch(lambda: not Agent.has_met or self._have_ranks_ended(), self._end)
        if self._meeting is not None and isinstance(handler, DynamicRendezvousHandler):
            self._meet(worker_group, handler, self._meeting)
        else:
            with waiting(lambda: "the other nodes: start all of them, with equal options"):
                super()._rendezvous(worker_group)
        Agent.has_met = True

    def _meet(self, worker_group: WorkerGroup, handler: DynamicRendezvousHandler, meeting: Meeting) -> None:
        limit_s = meeting.patience_s
        if self._hosts and ELASTIC not in os.environ:
            limit_s = min(RESTART_S, limit_s)
            set_join_timeout(handler, limit_s)

        def describe() -> str:
            present = hosts_of_nodes(handler, is_restart=bool(self._hosts))
            return meeting.describe(present.elements(), lost=(self._hosts - present).elements())

        try:
            with waiting(lambda: f"the other nodes at {meeting.endpoint}: {describe()}"):
                super()._rendezvous(worker_group)
        except RendezvousTimeoutError:
            raise meeting.failed(describe(), limit_s) from None
        except RendezvousClosedError:
            raise meeting.closed(has_met=Agent.has_met) from None
        except RendezvousConnectionError:
            if Agent.has_met:
                raise
            raise meeting.lost(describe()) from None
        self._hosts = hosts_of_nodes(handler)

    def _have_ranks_ended(self) -> bool:
        """Whether all processes of this node's ranks have ended, also if this launcher is blocked. For a thread."""
        pids = list(self._pcontext.pids().values()) if self._pcontext is not None else []
        return bool(pids) and all(map(has_ended, pids))

    def _end(self, message: str) -> NoReturn:
        """End this process, whose main thread may be blocked. For a thread."""
        print(f"titanlite: {message}", file=sys.stderr)
        end_process(1)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        found: RunResult = super()._monitor_workers(worker_group)
        is_refused = any(failure.exitcode in (USAGE_ERROR, REFUSED) for failure in found.failures.values())
        if is_refused:
            self._remaining_restarts = 0
        if ELASTIC not in os.environ:
            return found
        if is_refused:
            self._leave()
        is_starting = not os.path.exists(os.environ[ELASTIC])
        if is_starting and found.state == WorkerState.HEALTHY and self._remaining_restarts > 0:
            handler: Any = worker_group.spec.rdzv_handler
            nodes = int(worker_group.group_world_size or 0)
            if handler.num_nodes_waiting() == 0 and hosts_of_nodes(handler).total() < nodes:
                print("titanlite: a node was lost during the start; the others restart", file=sys.stderr, flush=True)
                return RunResult(state=WorkerState.UNHEALTHY)
        return found

    def _leave(self) -> None:
        """Let the other nodes continue when this launcher ends, for which torchrun would close the rendezvous."""
        handler: Any = self._worker_group.spec.rdzv_handler
        handler.shutdown = lambda: True

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            found: RunResult = super().run(role)
            return found
        finally:
            if ELASTIC in os.environ:
                Path(os.environ[ELASTIC]).unlink(missing_ok=True)


def main() -> None:
    """Check the configuration of a training, then run torchrun in this process."""
    with FailureReport():
        # The ranks save on these signals and exit. By default, torchrun lacks SIGUSR1, and has SIGHUP under nohup.
        forwarded = ",".join(number.name for number in stop_signals())
        arguments = parse_args([f"--signals-to-handle={forwarded}", *sys.argv[1:]])
        facts = check(arguments)
        if arguments.module and arguments.training_script.partition(".")[0] == "titanlite":
            os.environ.update(safe_imports())  # for the ranks; a program of the user may import files beside it
        raise_open_file_limit()
        set_allocator()
        raise_on_interrupt()
        launch(arguments, facts)


def check(arguments: Namespace) -> dict[str, str]:
    """Check torchrun's options, and the configuration if the ranks run titanlite.train: for all nodes, or if their
    number may change, for as many ranks as fit on the fewest and on the most nodes. Raises ConfigError.

    Returns the facts in which the nodes of an elastic launch must agree, so that their ranks will.
    """
    fewest, nodes, processes = check_ranks(arguments)
    facts: dict[str, str] = {}
    os.environ.pop(ELASTIC, None)
    if arguments.module and arguments.training_script == TRAIN:
        parsed, device_type = (
            read_command_line(arguments.training_script_args),
            "cuda" if torch.cuda.is_available() else "cpu",
        )
        sizes = [number * processes for number in ((fewest, nodes) if fewest < nodes else (nodes,))]
        if fewest < nodes:
            sizes = [most_ranks(parsed, ranks, device_type=device_type) for ranks in sizes]
        preview(parsed, sizes, processes)
        for used in sizes:
            config = resolve(parsed, world_size=used, device_type=device_type)
            if fewest < nodes:
                facts = program_facts(config, World(0, 0, used, device_type), os.environ)
    if fewest < nodes:
        set_up_elastic(arguments)
    stay_on_node(arguments)
    return facts


def set_up_elastic(arguments: Namespace) -> None:
    """Tell the ranks that their number may change, and complete the settings of the rendezvous."""
    os.environ[ELASTIC] = os.path.join(tempfile.gettempdir(), f"titanlite-{uuid.uuid4().hex}")
    given = [setting.partition("=")[0] for setting in arguments.rdzv_conf.split(",")]
    chosen = [f"{name}={value}" for name, value in RENDEZVOUS.items() if name not in given]
    arguments.rdzv_conf = ",".join([*filter(None, [arguments.rdzv_conf]), *chosen])
    print(
        f"titanlite: {arguments.nnodes} nodes; rendezvous at {get_rdzv_endpoint(arguments)}, {arguments.rdzv_conf}; "
        f"at most {arguments.max_restarts} restarts after failures",
        flush=True,
    )


def check_ranks(arguments: Namespace) -> tuple[int, int, int]:
    """(fewest nodes, most nodes, processes per node), by torchrun's options. Raises ConfigError."""
    fewest = nodes = processes = 0
    with suppress(ValueError, RuntimeError):
        fewest, nodes = parse_min_max_nnodes(arguments.nnodes)
    with suppress(ValueError):
        processes = determine_local_world_size(arguments.nproc_per_node)
    uses_node_rank = arguments.rdzv_backend == "static" and not arguments.standalone
    rules = Rules("--", arguments)
    rule, remedy = "a number of nodes from 1, or FEWEST:MOST", "leave it out for one node"
    rules.require("nnodes", 1 <= fewest <= nodes, rule, remedy)
    rule = 'a number of processes from 1, or "gpu" on a node with GPUs, "cpu" or "auto"'
    rules.require("nproc_per_node", processes >= 1, rule, "leave it out for one process")
    is_below = not uses_node_rank or nodes < 1 or 0 <= arguments.node_rank < nodes
    rules.require("node_rank", is_below, f"from 0, and below --nnodes = {nodes}", "number the nodes from 0")
    can_change = not 1 <= fewest < nodes or arguments.rdzv_backend != "static"
    rule = f"c10d for a number of nodes that may change (--nnodes = {arguments.nnodes})"
    remedy = "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME, the same on all nodes"
    rules.require("rdzv_backend", can_change, rule, remedy)
    has_port = nodes < 2 or not arguments.rdzv_endpoint.endswith(":0") or arguments.standalone
    rule = f"a port that all nodes know (--nnodes = {arguments.nnodes})"
    rules.require("rdzv_endpoint", has_port, rule, "choose one from 1024 to 65535, the same on all nodes")
    if rules.problems:
        raise ConfigError(rules.problems)
    return fewest, nodes, processes


def has_ended(pid: int) -> bool:
    """Whether a child process has ended. Its exit code remains for torchrun."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def launch(arguments: Namespace, facts: Mapping[str, str]) -> None:
    """Run torchrun until all ranks have ended. Raises UserError if it cannot connect the nodes or refuses its options.

    Exits as the first rank that failed, or with 128 + its number after a signal, of which torchrun has informed the
    ranks.
    """
    # Not an error: the launcher of another node has left first. The traceback would hide how training has ended.
    agent_logger.addFilter(lambda record: not record.getMessage().startswith("Error waiting on exit barrier"))
    rendezvous_logger.setLevel(logging.ERROR)  # it warns that the store is lost, as the last line says
    try:
        meeting = Meeting(arguments, {**facts, "--nnodes": arguments.nnodes}) if has_meeting(arguments) else None
        agent = partial(Agent, exit_barrier_timeout=EXIT_BARRIER_S, meeting=meeting)
        api.LocalElasticAgent = agent  # type: ignore[misc, assignment]
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code, killed = failure.exitcode, f"was killed by {failure.signal_name()}"
        log = "its log" if arguments.nnodes == "1" else "the log of a rank of any node"
        end = killed if code < 0 else f"failed: its error is above, or in {log}"
        print(f"titanlite: rank {rank} {end}", file=sys.stderr)
        found: Any = failure.message  # of the error file of the rank, if it has written one
        write_error_file(found["message"] if isinstance(found, dict) else f"titanlite: rank {rank} {end}")
        end_process(1 if code < 0 or code == REFUSED else code)
    except (SignalException, KeyboardInterrupt) as error:
        end_process(128 + (error.sigval if isinstance(error, SignalException) else signal.SIGINT))
    except (RendezvousError, DistNetworkError, DistStoreError) as error:
        endpoint, cause = get_rdzv_endpoint(arguments), f"{error.__cause__ or error}".partition("\n")[0]
        if "EADDRINUSE" in cause:
            remedy = "end the program that uses it, or choose another port, the same on all nodes"
            raise UserError(f"the port of {endpoint}, where the nodes connect, is in use: {remedy}") from None
        if Agent.has_met:
            raise UserError(
                f"the launcher of node 0, which hosts the store of the nodes at {endpoint}, has ended, or its node is "
                "lost: the cause is in its log"
            ) from None
        raise UserError(f"the nodes cannot connect at {endpoint}: {cause or type(error).__name__}") from None
    except ValueError as error:
        raise UsageError(f"torchrun refuses its options: {error}") from None


if __name__ == "__main__":
    main()
    end_process(0)
