"""Failing training: one error message, a quick exit of all ranks, no leftover processes."""

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.program import FAULTY, PYTHON, TORCHRUN, TRAIN, Program, Starter, free_port, own_tracebacks, rows
from titanlite.data.bpe import train_bpe

SENTENCE = "the model reads a few words and learns which of them follow the others in a text"
SOON_S = 15.0
"""Far below the 30 s after which torchrun kills remaining processes."""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def seconds_to_end(program: Program) -> float:
    begin = time.monotonic()
    program.wait()
    return time.monotonic() - begin


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(iter([SENTENCE] * 4), 280, folder)
    return folder


def text_arguments(tokenizer: Path, file: Path) -> list[str]:
    """Train on the rows of `file` in order: row n belongs to stream n mod 16, so rank 1 of two has the odd rows."""
    settings = {
        "tokenizer.path": str(tokenizer),
        "model.vocab_size": "280",
        "data.shuffle": "false",
        "data.sources.0.kind": "jsonl",
        "data.sources.0.path": str(file),
        "training.steps": "40",
    }
    return [text for key, value in settings.items() for text in (f"--{key}", value)]


def write_rows(file: Path, bad: dict[int, str]) -> None:
    lines = [json.dumps({"text": f"{number}: {SENTENCE} {SENTENCE[:number]}"}) for number in range(96)]
    for number, line in bad.items():
        lines[number] = line
    file.write_text("\n".join(lines) + "\n")


BAD_ROW = 35  # in stream 3, after two good rows


def log_of(program: Program) -> list[str]:
    """Lines of train.log."""
    return (program.workplace / "out" / "train.log").read_text().splitlines()


def assert_bad_row_is_reported_once(program: Program, file: Path) -> None:
    message = re.findall(r"^titanlite: bad row: (.*)$", program.output, re.MULTILINE)
    assert len(message) == 1, program.output
    assert str(file) in message[0]
    assert f"line {BAD_ROW + 1}" in message[0]
    assert "invalid JSON at character 9: Unterminated string" in message[0]
    assert program.output.count(", line ") == 1
    assert log_of(program)[-1].endswith(f" error: bad row: {message[0]}")
    assert own_tracebacks(program.output) == 0


@pytest.mark.slow
def test_user_error_on_one_rank_is_reported_once_at_the_same_step(
    tokenizer: Path, tmp_path: Path, start: Starter
) -> None:
    file = tmp_path / "rows.jsonl"
    write_rows(file, {BAD_ROW: '{"text": "cut short'})
    found = {}
    for ranks in (0, 2):
        (tmp_path / f"{ranks}").mkdir()
        batch = ("--training.local_batch_size", "4")
        program = start(tmp_path / f"{ranks}", *text_arguments(tokenizer, file), *batch, ranks=ranks)
        program.wait_for("^titanlite: bad row")
        assert seconds_to_end(program) < SOON_S
        assert program.wait() == 1
        assert_bad_row_is_reported_once(program, file)
        found[ranks] = rows(program.workplace / "out")
    assert 1 < len(found[0]) < 39
    assert [row["step"] for row in found[2]] == [row["step"] for row in found[0]]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found[2]] == pytest.approx([row[key] for row in found[0]], rel=1e-10, abs=0)


@pytest.mark.slow
def test_a_token_file_that_shrinks_during_training_is_named_once(tmp_path: Path, start: Starter) -> None:
    """A mapped file would end both ranks by SIGBUS, without a message."""
    file = tmp_path / "tokens.npy"
    np.save(file, np.zeros(2**18, np.uint16))
    data = ["--data.sources.0.path", str(file), "--training.steps", "100000", "--metrics.log_freq", "1"]
    program = start(tmp_path, *data, ranks=2)
    program.wait_for(r" 3/\d")
    os.truncate(file, 1000)
    program.wait_for("^titanlite: ")
    assert seconds_to_end(program) < SOON_S
    assert program.wait() == 1
    (message,) = re.findall(r"^titanlite: (.*)$", program.output, re.MULTILINE)
    assert re.match(rf"{file} became shorter .* it has 1,000 bytes instead of 524,416, and bytes [\d,]+ to", message)
    assert "Traceback" not in program.output


@pytest.mark.soak  # default suite: test_user_error_on_one_rank_is_reported_once_at_the_same_step
def test_every_mesh_reports_the_same_bad_row_of_a_step(tokenizer: Path, tmp_path: Path, start: Starter) -> None:
    """Lines 34 and 35 belong to streams 1 and 2, on ranks 1 and 0, which find them in either order."""
    write_rows(tmp_path / "rows.jsonl", {33: "[]", 34: "{}"})
    arguments = text_arguments(tokenizer, tmp_path / "rows.jsonl")
    late = [{"FAULT": "late", "FAULTY_RANK": rank} for rank in "01"]
    meshes = [{}, *({"ranks": 2, "program": FAULTY, "environment": environment} for environment in late)]
    programs = [
        start(tmp_path, *arguments, "--job.dump_folder", str(tmp_path / f"out{n}"), name=f"output{n}", **mesh)
        for n, mesh in enumerate(meshes)
    ]
    for program in programs:
        assert program.wait() == 1
        message = re.findall("^titanlite: (.*)$", program.output, re.MULTILINE)
        assert len(message) == 1, program.output
        assert "rows.jsonl, line 34: " in message[0]
        assert own_tracebacks(program.output) == 0


@pytest.mark.slow
def test_error_on_all_ranks_is_reported_once(tokenizer: Path, tmp_path: Path, start: Starter) -> None:
    """Two ranks with one bad row each exceed the limit of one."""
    write_rows(tmp_path / "rows.jsonl", {18: "[]", 35: "{}"})
    skip = ["--data.on_bad_row", "skip", "--data.max_bad_rows", "1"]
    program = start(tmp_path, *text_arguments(tokenizer, tmp_path / "rows.jsonl"), *skip, ranks=2)
    program.wait_for("^titanlite: ")
    assert seconds_to_end(program) < SOON_S
    assert program.output.count("titanlite: ") == 1
    assert program.output.count("data.max_bad_rows = 1: 2 rows were skipped as bad") == 1
    assert own_tracebacks(program.output) == 0
    assert [row["bad_rows"] for row in rows(tmp_path / "out")][-1] == 2


@pytest.mark.slow
def test_bad_validation_data_ends_the_run_before_its_first_step(
    tokenizer: Path, tmp_path: Path, start: Starter
) -> None:
    write_rows(tmp_path / "rows.jsonl", {})
    write_rows(tmp_path / "held_out.jsonl", {90: "{}"})
    held_out = {"enable": "true", "sources.0.kind": "jsonl", "sources.0.path": str(tmp_path / "held_out.jsonl")}
    arguments = [text for key, value in held_out.items() for text in (f"--validation.{key}", value)]
    program = start(tmp_path, *text_arguments(tokenizer, tmp_path / "rows.jsonl"), *arguments, ranks=2)
    assert program.wait() == 1
    (message,) = re.findall(r"^titanlite: (.*)$", program.output, re.MULTILINE)
    assert message.startswith(f"bad row: {tmp_path}/held_out.jsonl, line 91: ")
    assert rows(tmp_path / "out") == []


@pytest.mark.parametrize("launcher", [None, pytest.param(TORCHRUN, marks=pytest.mark.soak)], ids=["forked", "torchrun"])
def test_programming_error_is_reported_only_by_its_rank(
    launcher: tuple[str, ...] | None, tmp_path: Path, start: Starter
) -> None:
    faults = {"FAULT": "step", "FAULTY_RANK": "1"}
    program = start(tmp_path, ranks=2, program=FAULTY, launcher=launcher, environment=faults)
    program.wait_for("^titanlite: ")
    assert seconds_to_end(program) < SOON_S
    assert re.findall("^titanlite: .*$", program.output, re.MULTILINE) == [
        "titanlite: rank 1 failed: ValueError: planted"
    ]
    assert own_tracebacks(program.output) == 1
    assert program.output.count("ValueError: planted") == (2 if launcher is None else 3)  # torchrun repeats the message
    assert log_of(program)[-1].endswith(" error: rank 1 failed: ValueError: planted")
    assert sum("planted" in line or "Traceback" in line for line in log_of(program)) == 1
    if launcher is not None:  # torchrun names the rank whose process ended first
        assert re.search(r"Root Cause(.*\n)+?  rank      : 1 ", program.output)
    assert program.wait() == 1
    assert len(rows(tmp_path / "out")) == 2


def start_without_a_launcher(start: Starter, folder: Path, fault: str, *arguments: str) -> list[Program]:
    """Start two ranks that no launcher stops. Rank 0, which hosts the store, has the fault."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common |= {"FAULT": fault, "FAULTY_RANK": "0"}
    return [
        start(
            *(folder, *arguments),
            program=FAULTY,
            name=f"output{rank}",
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


@pytest.mark.slow
@needs_proc
def test_ranks_without_a_launcher_also_end(tmp_path: Path, start: Starter) -> None:
    programs = start_without_a_launcher(start, tmp_path, "step")
    programs[0].wait_for("^titanlite: rank 0 failed: ValueError: planted")
    assert seconds_to_end(programs[1]) < SOON_S
    assert [program.wait() for program in programs] == [1, 1]
    assert [own_tracebacks(program.output) for program in programs] == [1, 0]
    assert "titanlite: " not in programs[1].output, programs[1].output
    for program in programs:
        program.wait_until_gone(SOON_S)


@pytest.mark.slow
def test_a_rank_0_that_is_stopped_with_the_store_is_named(tmp_path: Path, start: Starter) -> None:
    """Its connections stay open, as after the loss of a node, so that calls to the store block without limit."""
    programs = start_without_a_launcher(start, tmp_path, "stop", "--comm.train_timeout_s", "3")
    programs[0].wait_for(r" 2/\d")
    assert seconds_to_end(programs[1]) < 1 + 3 + 5
    assert programs[1].wait() == 1
    stopped = r"^titanlite: the launcher or rank 0 has ended, is stopped, .* in step 3 \(forward, backward and update\)"
    assert len(re.findall(stopped, programs[1].output, re.MULTILINE)) == 1, programs[1].output
    programs[0].process.kill()


IN_STEP = r"in step 3 \(forward, backward and update\)"
ALONE = r"[\s\S]*\(rank 0 lost the connection: "
DEAD, HANGS = r"rank 1 on \S+: no heartbeat, ", r"rank 1 on \S+ hangs or lags: "
CHECKPOINTS = ("--checkpoint.enable", "true", "--checkpoint.interval", "1")
SAVES = (*CHECKPOINTS, "--checkpoint.async_mode", "async", "--comm.save_timeout_s", "3")
SILENT = {
    "kill": (r" 2/\d", rf"{DEAD}{IN_STEP}: killed, out of memory{ALONE}", ()),
    "hang-data": (r" 2/\d", rf"{HANGS}in step 3 \(waiting for data\) for \d+ s; the other.*{ALONE}", CHECKPOINTS),
    "hang": (r" 2/\d", rf"{HANGS}{IN_STEP} for \d+ s; .* in a collective{ALONE}", ()),
    "lock": (r" 2/\d", rf"{HANGS}{IN_STEP} for \d+ s, in a call that holds Python's lock; .*{ALONE}", ()),
    "stop-save": (r" 3/\d", rf"{DEAD}in step 3 \(saving\): killed, out of memory, stopped", CHECKPOINTS),
    "kill-start": ("Job: ", rf"{DEAD}in step 0 \(start-up\): killed, out of memory", ()),
    "hang-start": ("Job: ", rf"{HANGS}in step 0 \(start-up\) for \d+ s; the other ranks wait for it", ()),
    "hang-save": (r" 3/\d", rf"{HANGS}in step \d+ \(saving\) for \d+ s; .*\n.*: cannot save step 3: ", SAVES),
    "hang-end": (r" 6/\d", rf"{HANGS}in step 6 \(ending\) for \d+ s; the other ranks wait for it", ()),
}
"""Fault -> last output before it, message, settings."""


SILENT_CASES = [
    *(pytest.param(fault, {}, id=fault, marks=pytest.mark.soak if fault != "kill" else ()) for fault in SILENT),
    *(
        pytest.param(fault, {"TORCH_GLOO_LAZY_INIT": "1"}, id=f"{fault}-not-connected", marks=pytest.mark.soak)
        for fault in SILENT
    ),
]
"""Faults with groups that connect at their start, and with those of large jobs, which connect at their first use."""


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "environment"), SILENT_CASES)
def test_a_rank_that_is_killed_or_hangs_is_named(
    fault: str, environment: dict[str, str], tmp_path: Path, start: Starter
) -> None:
    """One message, by a rank that waits for it, and an exit within 5 s after the timeout; files show where ranks are.

    A save may take comm.save_timeout_s, half an hour; a rank that is stopped gives no heartbeats.
    """
    begun, expected, settings = SILENT[fault]
    limit_s = 6 if begun == "Job: " else 3
    faults = {"FAULT": fault, "FAULTY_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    faults |= environment
    settings = ("--comm.train_timeout_s", "3", "--comm.init_timeout_s", "6", *settings)
    if fault == "hang-data":  # in a run that has resumed
        assert start(tmp_path, *settings, "--training.steps", "1", name="first").wait() == 0
    program = start(tmp_path, *settings, ranks=2, program=FAULTY, environment=faults)
    program.wait_for(begun)
    begin = time.monotonic()
    while 0 in program.ranks():
        program.process.poll()
        assert time.monotonic() - begin < limit_s + 5, program.output
        time.sleep(0.05)
    if fault == "lock":  # no thread of the rank runs: the process of its node kills it
        while program.ranks():
            assert time.monotonic() - begin < limit_s + 5 + 7 + 5, program.output
            time.sleep(0.05)
    program.close()
    (message,) = re.findall("^titanlite: .*$", program.output, re.MULTILINE)
    assert re.search(f"^titanlite: {expected}", program.output, re.MULTILINE), program.output
    assert own_tracebacks(program.output) == 0
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].startswith(message)
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    assert str(folder) in program.output
    files = {file.name: file.read_text() for file in folder.iterdir()}
    living = [0, 1] if fault.startswith("hang") else [0]
    assert sorted(files) == [f"rank-{rank}.{suffix}" for rank in living for suffix in ("gloo.json", "txt")]
    assert begun == "Job: " or json.loads(files["rank-0.gloo.json"])["entries"]
    assert fault.startswith("hang") == (" in hang\n" in files.get("rank-1.txt", ""))


@pytest.mark.soak  # default suite: unit/ranks/test_collector.py, test_positions.py
@needs_proc
@pytest.mark.parametrize("hanging", [0, 1])
def test_ranks_that_hold_the_lock_while_they_wait_end_in_time(hanging: int, tmp_path: Path, start: Starter) -> None:
    """As compiled blocks do on a GPU, whose launches wait for a rank that hangs: none of their threads runs. The rank
    that hangs prints the message, and the process of their node kills the others 7 s after it."""
    settings = ("--comm.train_timeout_s", "5", "--training.global_batch_size", "12")
    faults = {"FAULT": "launch", "FAULTY_RANK": "all", "HANGING_RANK": str(hanging)}
    program = start(tmp_path, *settings, ranks=3, program=FAULTY, environment=faults)
    program.wait_for(r" 2/\d")
    begin = time.monotonic()
    while program.ranks():
        assert time.monotonic() - begin < 1 + 5 + 5 + 7 + 5, program.output
        time.sleep(0.05)
    program.close()
    (message,) = re.findall("^titanlite: .*$", program.output, re.MULTILINE)
    others = ", ".join(str(rank) for rank in range(3) if rank != hanging)
    standing = f"the threads of ranks {others} stand still, as in launches that wait for a device"
    assert re.search(f"^titanlite: all ranks are {IN_STEP} for \\d+ s: .*; {standing}; stacks ", message), message
    assert own_tracebacks(program.output) == 0


@pytest.mark.soak  # default suite: two ranks
@pytest.mark.parametrize("fault", ["kill", "hang"])
def test_one_of_16_ranks_that_is_killed_or_hangs_is_named(fault: str, tmp_path: Path, start: Starter) -> None:
    """On a machine that has too few cores for them."""
    begun, expected, _ = SILENT[fault]
    faults = {"FAULT": fault, "FAULTY_RANK": "11"}
    settings = ("--comm.train_timeout_s", "30", "--training.local_batch_size", "1")
    program = start(tmp_path, *settings, ranks=16, program=FAULTY, environment=faults)
    program.wait_for(begun)
    assert seconds_to_end(program) < 30 + 20
    (message,) = re.findall("^titanlite: .*$", program.output, re.MULTILINE)
    assert re.search(f"^titanlite: {expected.partition(ALONE)[0]}".replace("rank 1 ", "rank 11 "), message)
    assert own_tracebacks(program.output) == 0
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    living = {rank for rank in range(16) if fault == "hang" or rank != 11}
    assert {file.name for file in folder.glob("*.txt")} == {f"rank-{rank}.txt" for rank in living}
    program.wait_until_gone(SOON_S)


@pytest.mark.soak  # default suite: tests/unit/metrics/test_goodput.py
def test_a_slow_rank_is_named_once_and_equal_ranks_are_not(tmp_path: Path, start: Starter) -> None:
    """Two runs at the same time, on a machine that has too few cores for both."""
    arguments = ["--training.steps", "30", "--metrics.log_freq", "5", "--training.local_batch_size", "8"]
    folders = {name: tmp_path / name for name in ("slow", "equal")}
    for folder in folders.values():
        folder.mkdir()
    slow = start(
        folders["slow"], *arguments, ranks=2, program=FAULTY, environment={"FAULT": "slow", "FAULTY_RANK": "1"}
    )
    equal = start(folders["equal"], *arguments, ranks=2)
    assert [program.wait() for program in (slow, equal)] == [0, 0], slow.output + equal.output
    warnings = re.findall(r"warning: (rank \d+ on \S+ has been slow for 2\d steps)", slow.output)
    assert len(warnings) == slow.output.count("has been slow") == 1, slow.output
    assert warnings[0].startswith(f"rank 1 on {socket.gethostname()} ")
    assert "has been slow" not in equal.output
    last = rows(folders["slow"] / "out")[-1]
    assert (last["slowest_rank"], last["slowest_host"]) == (1, socket.gethostname())
    assert last["slowest_ratio"] > 2


LONG = ["--training.steps", "1000000"]


INTERRUPTED = [
    pytest.param(0, None, r" 3/\d", id="one process"),
    pytest.param(0, PYTHON, "", id="one process that loads libraries"),
    pytest.param(2, None, "building data", id="a rank that waits for the other"),
    pytest.param(2, TORCHRUN, r" 3/\d", id="torchrun", marks=pytest.mark.soak),
    pytest.param(2, TORCHRUN, "", id="ranks that load libraries", marks=pytest.mark.soak),
]


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "launcher", "begun"), INTERRUPTED)
def test_ctrl_c_ends_a_program_with_one_line(
    ranks: int, launcher: tuple[str, ...] | None, begun: str, tmp_path: Path, start: Starter
) -> None:
    """Only torchrun receives the signal, because its workers have separate sessions. Without it, all ranks do."""
    faults = {"FAULT": "data", "FAULTY_RANK": "0"}
    program = start(
        *(tmp_path, *LONG),
        ranks=ranks,
        launcher=launcher,
        program=FAULTY if begun == "building data" else TRAIN,
        environment=faults,
    )
    if begun:
        program.wait_for(begun)
    else:
        program.wait_until(lambda: len(program.workers("libtorch_cpu")) >= max(1, ranks))
    if begun == "building data":
        time.sleep(2)  # rank 1 has built its data by then, and waits in torch
    program.process.send_signal(signal.SIGINT)
    assert seconds_to_end(program) < SOON_S
    (line,) = re.findall("^titanlite: .*", program.output, re.MULTILINE)
    assert re.fullmatch(r"titanlite: (interrupted|rank \d was ended by SIGINT)", line)
    assert own_tracebacks(program.output) == 0, program.output
    assert program.wait() == 130 if ranks == 0 else program.wait() != 0
    program.wait_until_gone(SOON_S)
    if not begun:
        assert "Job:" not in program.output, "the libraries were already loaded"
        assert not (tmp_path / "out").exists()


@needs_proc
@pytest.mark.slow
def test_ranks_end_with_a_terminated_launcher(tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *LONG, ranks=2, launcher=TORCHRUN)
    program.wait_for(r" 3/\d")
    os.kill(program.process.pid, signal.SIGTERM)
    assert seconds_to_end(program) < SOON_S
    program.wait_until_gone(SOON_S)
    assert own_tracebacks(program.output) == 0
    assert len(re.findall("^titanlite: ", program.output, re.MULTILINE)) == 1
    assert re.search(r"^titanlite: rank \d was ended by SIGTERM$", program.output, re.MULTILINE)
