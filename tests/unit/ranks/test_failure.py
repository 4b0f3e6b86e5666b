"""Failure reports: which rank prints an error, the message and the exit code. Each case runs in its own process."""

import errno
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.program import free_port
from titanlite.ranks import collector, election, failure, positions
from titanlite.ranks.agreement import RanksError
from titanlite.ranks.distributed import ConnectError
from titanlite.ranks.failure import EmbeddedReport, FailureReport
from titanlite.ranks.launch import fork_context
from titanlite.ranks.positions import Positions
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.logging import append_errors_to

WAITS = {"SILENT_WAIT_S": 0.5}
TIMEOUT_S = 200.0  # generous, for a busy machine

ERRORS: dict[str, BaseException] = {
    "user": UserError("no such corpus"),
    "config": ConfigError([Problem("training.steps", 0, "at least 1", "give a positive number")]),
    "bug": ValueError("planted"),
    "lost": RuntimeError("Connection closed by peer"),
    "exit": SystemExit(3),
    "shared": RanksError("rank 1: no space left"),
}

C10D_WARNING = re.compile(r"(?m)^(\[rank\d+\]:)?\[W.*\[c10d\].*\n(^(Exception raised|frame #|<omitting).*\n)*\n?")


@dataclass
class Program:
    """A process that runs a function of this file, with its output in a file."""

    process: ForkServerProcess
    output: Path

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while text not in self.text:
            assert time.monotonic() < end
            assert self.process.is_alive(), self.text
            time.sleep(0.01)

    @property
    def text(self) -> str:
        """The output without c10d's warnings."""
        return C10D_WARNING.sub("", self.output.read_text()) if self.output.exists() else ""

    @property
    def exit_code(self) -> int | None:
        self.process.join(TIMEOUT_S)
        return self.process.exitcode


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """start(function, *args, rank=0, local_rank=rank, **constants of the module) -> Program"""
    context = fork_context()
    programs: list[Program] = []

    def start_program(
        function: Callable[..., None], *args: Any, rank: int = 0, local_rank: int | None = None, **constants: float
    ) -> Program:
        output = tmp_path / f"output{len(programs)}"
        environment = {
            "WORLD_SIZE": "9",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        }
        process = context.Process(target=run, args=(output, environment, WAITS | constants, function, args))
        process.start()
        programs.append(Program(process, output))
        return programs[-1]

    yield start_program
    for program in programs:
        program.process.kill()
        program.process.join()


def run(
    output: Path,
    environment: dict[str, str],
    constants: dict[str, float],
    function: Callable[..., None],
    args: Sequence[Any],
) -> None:
    os.environ.update(environment)
    for name, value in constants.items():
        assert hasattr(failure, name)
        setattr(failure, name, value)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    print("running", flush=True)
    function(*args)


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))


def fails(error: str, port: int = 0, key: str = "") -> None:
    """Raise ERRORS[error]; before the ranks are connected, or with the store at `port` (one per `key`)."""
    with FailureReport() as report:
        if port:
            report.store = dist.PrefixStore(key, connect(port))
        raise ERRORS[error]


def printed(program: Program) -> str:
    """Return the output; checks that it is empty or one message with at most one traceback."""
    program.process.join(TIMEOUT_S)
    text = program.text.removeprefix("running\n")
    assert text.count("titanlite: ") == (text != "")
    assert text.count("Traceback") <= 1
    return text


@pytest.mark.slow
def test_exit_code_and_message_of_each_kind_of_error(start: Start) -> None:
    programs = {error: start(fails, error) for error in ERRORS}
    codes = {error: program.exit_code for error, program in programs.items()}
    assert codes == {"user": 1, "config": 2, "bug": 1, "lost": 1, "exit": 3, "shared": 1}
    texts = {error: printed(program) for error, program in programs.items()}
    assert texts["user"] == "titanlite: no such corpus\n"
    assert re.fullmatch(
        r"titanlite: the configuration has 1 problem:\n\n  training.steps = 0\n.*\n.*\n", texts["config"]
    )
    assert texts["exit"] == ""
    for error in ("bug", "lost"):
        text = f"{type(ERRORS[error]).__name__}: {ERRORS[error]}\n"
        assert texts[error].startswith("Traceback (most recent call last):\n")
        assert texts[error].endswith(f"\n{text}\ntitanlite: rank 0 failed: {text}")


def caused_by(cause: BaseException) -> UserError:
    """A UserError that is raised while `cause` is handled."""
    try:
        try:
            raise cause
        except type(cause):
            raise UserError("cannot write out") from None
    except UserError as error:
        return error


FULL_DISK, STALE = (OSError(number, os.strerror(number)) for number in (errno.ENOSPC, errno.ESTALE))
STARTS = [
    (ERRORS["user"], failure.REFUSED),
    (ERRORS["shared"], failure.REFUSED),
    (FULL_DISK, failure.REFUSED),
    (caused_by(FULL_DISK), failure.REFUSED),
    (caused_by(STALE), 1),
    (ConnectError("a rank is late"), 1),
    (ERRORS["bug"], 1),
    (ERRORS["config"], 2),
]


@pytest.mark.parametrize(("error", "code"), STARTS, ids=repr)
def test_a_launcher_learns_of_an_error_that_the_next_start_would_meet(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only before the first step: later, another start may go further."""
    monkeypatch.setattr(signal, "alarm", lambda _: None)
    codes: list[int] = []
    monkeypatch.setattr(failure, "end_process", codes.append)
    for is_launched in (False, True):
        for has_begun in (False, True):
            if is_launched:
                monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
            report = FailureReport()
            if has_begun:
                report.enter(1, "waiting for data")
            report.__exit__(type(error), error, None)
    unlike_refused = 1 if code == failure.REFUSED else code
    assert codes == [unlike_refused, unlike_refused, code, unlike_refused]


def succeeds() -> None:
    with FailureReport():
        print("done", flush=True)


def test_without_an_error_nothing_is_printed(start: Start) -> None:
    program = start(succeeds)
    assert (program.exit_code, program.text) == (0, "running\ndone\n")


@pytest.mark.slow
def test_silent_ranks_exit_after_the_rank_that_prints(start: Start) -> None:
    """The launcher terminates all ranks once one exits: a silent rank must not exit before the message is printed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    programs = [start(fails, "user", server.port, "same", rank=rank, SILENT_WAIT_S=30.0) for rank in range(3)]
    end = time.monotonic() + TIMEOUT_S
    while all(program.process.is_alive() for program in programs) and time.monotonic() < end:
        time.sleep(0.01)
    time.sleep(0.5)
    ended = [program for program in programs if not program.process.is_alive()]
    assert [printed(program) for program in ended] == ["titanlite: no such corpus\n"]
    for program in programs:
        program.process.terminate()  # as the launcher does
    assert sorted(printed(program) for program in programs) == ["", "", "titanlite: no such corpus\n"]


LONG_S = 300.0
# Rank, rank on its node, and the two waits: for rank 0, then for the first rank of the node.
PRINTS_AFTER_ITS_WAITS = [(0, 0, LONG_S, LONG_S), (8, 0, 0.0, LONG_S), (1, 1, 0.0, 0.0)]
STILL_WAITS = [(8, 0, LONG_S, 0.0), (1, 1, LONG_S, 0.0), (1, 1, 0.0, LONG_S)]


def start_unconnected(start: Start, rank: int, local_rank: int, unconnected_s: float, node_order_s: float) -> Program:
    waits = {"UNCONNECTED_WAIT_S": unconnected_s, "NODE_ORDER_WAIT_S": node_order_s}
    return start(fails, "config", rank=rank, local_rank=local_rank, **waits)


def test_before_ranks_are_connected_rank_0_prints_at_once_and_others_after_a_wait(start: Start) -> None:
    programs = [start_unconnected(start, *place) for place in PRINTS_AFTER_ITS_WAITS]
    assert [printed(program) for program in programs] == [f"titanlite: {ERRORS['config']}\n"] * 3
    assert [program.exit_code for program in programs] == [2, 2, 2]


@pytest.mark.slow
def test_a_rank_terminated_while_it_waits_prints_nothing(start: Start) -> None:
    programs = [start_unconnected(start, *place) for place in STILL_WAITS]
    for program in programs:
        program.wait_for("running")
    time.sleep(0.5)
    for program in programs:
        program.process.terminate()
    assert [(program.exit_code, printed(program)) for program in programs] == [(-signal.SIGTERM, "")] * 3


class BlockedStore:
    """Simulates the store of a stopped process or an unreachable host."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        del key, expected, desired
        time.sleep(100)
        return b""


def fails_with_a_blocked_store() -> None:
    with FailureReport() as report:
        report.store = BlockedStore()  # type: ignore[assignment]
        raise ERRORS["bug"]


def test_an_error_is_printed_even_if_the_store_does_not_answer(start: Start) -> None:
    program = start(fails_with_a_blocked_store, ANSWER_S=0.2)
    assert printed(program).endswith("titanlite: rank 0 failed: ValueError: planted\n")
    assert program.exit_code == 1


def block_stderr() -> None:
    """Make stderr a full pipe that is not read."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    sys.stderr = os.fdopen(writer, "w")


def fails_with_a_full_pipe() -> None:
    block_stderr()
    with FailureReport():
        raise ERRORS["bug"]


@pytest.mark.slow
def test_a_failed_process_exits_even_if_printing_blocks(start: Start) -> None:
    program = start(fails_with_a_full_pipe, LAST_RESORT_S=1)
    begin = time.monotonic()
    assert program.exit_code == -signal.SIGALRM
    assert time.monotonic() - begin < 30


def fails_on_a_full_disk(log_file: Path) -> None:
    append_errors_to(log_file)
    with FailureReport():
        log_file.write_text("x" * 100_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_hide_the_message(start: Start, tmp_path: Path) -> None:
    program = start(fails_on_a_full_disk, tmp_path / "train.log")
    assert program.exit_code == 1
    assert printed(program).endswith("titanlite: rank 0 failed: OSError: [Errno 28] No space left on device\n")


def fails_with_broken_streams(what: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    sys.stdout = os.fdopen(writer, "w")
    if what == "closed":
        sys.stderr.close()
    with FailureReport():
        print("unread", end="")
        raise ERRORS["user"]


def test_broken_streams_do_not_change_the_exit_code(start: Start) -> None:
    piped, closed = (start(fails_with_broken_streams, what) for what in ("piped", "closed"))
    assert [piped.exit_code, closed.exit_code] == [1, 1]
    assert [printed(piped), printed(closed)] == ["titanlite: no such corpus\n", ""]


def runs_without_streams(folder: Path, error: str) -> None:
    """Close the standard streams, as a daemon does, then end with ERRORS[error], or with success."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        os.close(descriptor)
        setattr(sys, name, None)
    with FailureReport():
        written = (folder / f"written-{error}").open("w")
        os.write(2, b"from a library")
        written.write("by the program")
        written.close()
        if error:
            raise ERRORS[error]
    failure.end_process(0)


def test_closed_streams_change_neither_exit_code_nor_files(start: Start, tmp_path: Path) -> None:
    programs = {error: start(runs_without_streams, tmp_path, error) for error in ("", "user", "config", "bug")}
    assert [program.exit_code for program in programs.values()] == [0, 1, 2, 1]
    assert {path.read_text() for path in tmp_path.glob("written-*")} == {"by the program"}
    assert {program.text for program in programs.values()} == {"running\n"}


def waits_in_a_library(port: int, timeout_s: float) -> None:
    """Block in the store like a rank that waits for others; raises after the timeout."""
    with FailureReport() as report:
        report.store = connect(port)
        print("waiting", flush=True)
        report.store.wait(["a key that is never set"], timedelta(seconds=timeout_s))


def computes(port: int, timeout_s: float) -> None:
    del port, timeout_s
    with FailureReport():
        print("waiting", flush=True)
        while True:
            sum(range(1000))


def is_one_of_two_ranks(port: int, prefix: str, settle_s: float, work: str) -> None:
    """Wait in the store, as in start-up; or for the other rank, after the last step; or fail."""
    collector.INTERVAL_S, positions.SETTLE_S = 0.1, settle_s
    positions.POLL_S = 0.02
    rank = int(os.environ["RANK"])
    with FailureReport() as report:
        # "host": rank 0 hosts the store, as without torchrun
        server = dist.TCPStore("127.0.0.1", port, is_master=True) if prefix == "host" and rank == 0 else connect(port)
        store = dist.PrefixStore(prefix, server)
        report.connected(Positions(store, rank, 2, range(2), None, 100.0, report.end_from_thread))
        if prefix == "host":
            store.wait([f"page/{1 - rank}"], timedelta(seconds=30))
        if work == "lost" and prefix == "host":
            store.wait([election.FIRST_FAILURE], timedelta(seconds=30))
        print("waiting", flush=True)
        if work == "steps of a slow store":
            Positions.enter = lambda *position: time.sleep(0.3)  # type: ignore[method-assign]  # noqa: ARG005
        while work.startswith("steps"):
            report.enter(1, "step")
            time.sleep(0.01)
            print("step", flush=True)
        if work == "start-up":
            store.wait(["a key that is never set"], timedelta(seconds=100))
        elif work == "finished":
            report.finish(6)
        else:
            raise ERRORS[work]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)),
    ],
)
def test_a_signal_to_all_ranks_ends_them_with_one_line(number: signal.Signals, start: Start) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    programs = [
        start(is_one_of_two_ranks, server.port, "a", 9.0, "start-up", rank=rank, SETTLE_S=9.0) for rank in range(2)
    ]
    for program in programs:
        program.wait_for("waiting")
    begin = time.monotonic()
    for program in programs:
        os.kill(program.process.pid or 0, number)
    assert [program.exit_code for program in programs] == [128 + number] * 2
    assert time.monotonic() - begin < 5
    texts = [program.text.removeprefix("running\nwaiting\n") for program in programs]
    assert sorted(texts, key=len) == ["", f"titanlite: rank {int(texts[1] != '')} was ended by {number.name}\n"]


@pytest.mark.slow
def test_a_signal_to_one_rank_is_named_and_ends_the_others(start: Start) -> None:
    """Also if the main threads of the others are blocked."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    programs = [start(is_one_of_two_ranks, server.port, "a", 9.0, "start-up", rank=rank) for rank in range(2)]
    for program in programs:
        program.wait_for("waiting")
    begin = time.monotonic()
    os.kill(programs[1].process.pid or 0, signal.SIGINT)
    assert [program.exit_code for program in programs] == [1, 130]
    assert time.monotonic() - begin < 10
    assert [program.text for program in programs] == [
        "running\nwaiting\n",
        "running\nwaiting\ntitanlite: rank 1 was ended by SIGINT\n",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("work", ["steps", "steps of a slow store"])
def test_no_step_follows_the_message_of_a_signal(work: str, start: Start) -> None:
    """Rank 0 hosts the store, and waits for the other rank before it ends. With a slow store, the signal arrives while
    the main thread notes a position."""
    port = free_port()
    works = (work, "start-up")
    programs = [start(is_one_of_two_ranks, port, "host", 9.0, work, rank=rank) for rank, work in enumerate(works)]
    for program, begun in zip(programs, ("step", "waiting"), strict=True):
        program.wait_for(begun)
    os.kill(programs[0].process.pid or 0, signal.SIGTERM)
    assert [program.exit_code for program in programs] == [143, 1]
    assert programs[0].text.endswith("step\ntitanlite: rank 0 was ended by SIGTERM\n")


def is_ended_with_a_full_pipe() -> None:
    block_stderr()
    with FailureReport() as report:
        report.store = dist.HashStore()
        report.end_by_signal(signal.SIGTERM, "second SIGTERM: exiting at once")


@pytest.mark.slow
def test_a_signal_ends_the_process_even_if_printing_blocks(start: Start) -> None:
    program = start(is_ended_with_a_full_pipe)
    begin = time.monotonic()
    assert program.exit_code == 143
    assert time.monotonic() - begin < 30


@pytest.mark.slow
@pytest.mark.parametrize("blocked", [False, True])
def test_a_failed_rank_keeps_its_store_until_the_others_end(blocked: bool, start: Start) -> None:
    """Rank 0 hosts the store and fails; rank 1 fails as a consequence, or is blocked. It prints nothing."""
    port = free_port()
    works = ("bug", "start-up" if blocked else "lost")
    programs = [start(is_one_of_two_ranks, port, "host", 9.0, work, rank=rank) for rank, work in enumerate(works)]
    begin = time.monotonic()
    assert [program.exit_code for program in programs] == [1, 1]
    assert time.monotonic() - begin < 10
    assert programs[0].text.endswith("titanlite: rank 0 failed: ValueError: planted\n")
    assert "titanlite: " not in programs[1].text


def test_a_rank_that_has_finished_does_not_wait_for_one_that_fails(start: Start) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    programs = [
        start(is_one_of_two_ranks, server.port, "a", 9.0, work, rank=rank)
        for rank, work in enumerate(("finished", "bug"))
    ]
    begin = time.monotonic()
    assert [program.exit_code for program in programs] == [0, 1]
    assert time.monotonic() - begin < 60
    assert programs[0].text == "running\nwaiting\n"
    assert printed(programs[1]).endswith("titanlite: rank 1 failed: ValueError: planted\n")


@pytest.mark.slow
def test_a_killed_rank_is_explained_by_one_that_the_launcher_ends(start: Start) -> None:
    """Rank 1 is killed, or rank 0 while it explains; the launcher then ends the other rank by SIGTERM."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def start_rank(work: str, rank: int, settle_s: float) -> Program:
        waits = {"SETTLE_S": settle_s, "SILENT_WAIT_S": 3.0}
        return start(is_one_of_two_ranks, server.port, work, settle_s, work, rank=rank, **waits)

    killed = start_rank("start-up", 1, 1.0)
    left = start_rank("start-up", 0, 1.0)
    explains = start_rank("lost", 0, 100.0)
    server.wait([f"lost/{election.FIRST_FAILURE}"])
    silent = start_rank("lost", 1, 1.0)
    for program in (killed, left, silent):
        program.wait_for("waiting")
    for program in (killed, explains):
        program.process.kill()
    time.sleep(0.1)
    for program in (left, silent):
        program.process.terminate()
    assert [left.exit_code, silent.exit_code] == [1, 1]
    for program, rank in ((left, 1), (silent, 0)):
        lines = re.findall("^titanlite: .*", program.text, re.MULTILINE)
        assert len(lines) == 1, program.text
        assert lines[0].startswith(f"titanlite: rank {rank} on ")
        assert "no heartbeat, in step 0 (start-up): killed" in lines[0]
        assert "Traceback" not in program.text


@pytest.mark.slow
def test_ctrl_c_exits_at_once_whatever_the_main_thread_does(start: Start) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    places = [(function, rank) for function in (waits_in_a_library, computes) for rank in range(2)]
    programs = [start(function, server.port, 100.0, rank=rank) for function, rank in places]
    for program in programs:
        program.wait_for("waiting")
    time.sleep(0.2)
    begin = time.monotonic()
    for program in programs:
        os.kill(program.process.pid or 0, signal.SIGINT)
    assert [program.exit_code for program in programs] == [130] * 4
    assert time.monotonic() - begin < 20
    for program, (_, rank) in zip(programs, places, strict=True):
        expected = "\ntitanlite: interrupted\n" if rank == 0 else ""
        assert program.text == f"running\nwaiting\n{expected}"


@pytest.mark.slow
def test_an_interrupted_rank_reports_no_lost_connection(start: Start) -> None:
    """Interrupted ranks exit one after the other, so the last ones lose the connection to the first ones."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    program = start(waits_in_a_library, server.port, 1.0, rank=1, INTERRUPTED_WAIT_S=2.5)
    program.wait_for("waiting")
    os.kill(program.process.pid or 0, signal.SIGINT)
    assert program.exit_code == 130
    assert program.text == "running\nwaiting\n"


def test_an_error_of_a_thread_ends_a_run_inside_a_program() -> None:
    report = EmbeddedReport(ExitStack())
    report.enter(1, "saving")
    report.end_by_error("taken over")
    with pytest.raises(UserError, match="taken over"):
        report.enter(2, "waiting for data")
