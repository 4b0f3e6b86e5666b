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

from tests.distributed.program import (
    FAULTY,
    PATIENCE_S,
    PYTHON,
    TORCHRUN,
    Program,
    Starter,
    free_port,
    own_tracebacks,
    rows,
    start_program,
)
from titanlite.data.bpe import train_bpe

SENTENCE = "the model reads a few words and learns which of them follow the others in a text"
SOON_S = 15.0
"""Far below the 30 s after which torchrun kills remaining processes."""

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def seconds_to_end(program: Program) -> float:
    begin = time.monotonic()
    program.wait()
    return time.monotonic() - begin


def assert_all_gone(program: Program) -> None:
    end = time.monotonic() + SOON_S
    while program.processes():
        assert time.monotonic() < end, program.processes()
        time.sleep(0.05)


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


@pytest.fixture(scope="module")
def single_with_a_bad_row(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Program:
    workplace = tmp_path_factory.mktemp("bad_row")
    write_rows(workplace / "rows.jsonl", {BAD_ROW: '{"text": "cut short'})
    program = start_program(workplace, *text_arguments(tokenizer, workplace / "rows.jsonl"))
    assert program.wait() == 1, program.output
    return program


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
    single_with_a_bad_row: Program, tokenizer: Path, tmp_path: Path, start: Starter
) -> None:
    file = single_with_a_bad_row.workplace / "rows.jsonl"
    assert_bad_row_is_reported_once(single_with_a_bad_row, file)
    assert "Traceback" not in single_with_a_bad_row.output
    expected = rows(single_with_a_bad_row.workplace / "out")
    assert 1 < len(expected) < 39

    program = start(tmp_path, *text_arguments(tokenizer, file), "--training.local_batch_size", "4", ranks=2)
    program.wait_for("^titanlite: bad row")
    assert seconds_to_end(program) < SOON_S
    assert program.wait() == 1
    assert_bad_row_is_reported_once(program, file)
    found = rows(tmp_path / "out")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=1e-10, abs=0)


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
    assert program.output.count("ValueError: planted") == 2
    assert log_of(program)[-1].endswith(" error: rank 1 failed: ValueError: planted")
    assert sum("planted" in line or "Traceback" in line for line in log_of(program)) == 1
    if launcher is not None:  # torchrun names the rank whose process ended first
        assert re.search(r"Root Cause(.*\n)+?  rank      : 1 ", program.output)
    assert program.wait() == 1
    assert len(rows(tmp_path / "out")) == 2


@pytest.mark.slow
@needs_proc
def test_ranks_without_a_launcher_also_end(tmp_path: Path, start: Starter) -> None:
    """Rank 0 hosts the store, and no launcher stops the others: only rank 0 prints."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FAULT": "step"}
    programs = [
        start(
            tmp_path,
            program=FAULTY,
            name=f"output{rank}",
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "FAULTY_RANK": "0"},
        )
        for rank in range(2)
    ]
    programs[0].wait_for("^titanlite: rank 0 failed: ValueError: planted")
    assert seconds_to_end(programs[1]) < SOON_S
    assert [program.wait() for program in programs] == [1, 1]
    assert [own_tracebacks(program.output) for program in programs] == [1, 0]
    assert "titanlite: " not in programs[1].output, programs[1].output
    for program in programs:
        assert_all_gone(program)


QUIET = {
    "kill": r"rank 1 on \S+: no sign of life, in step 3 \(forward, backward and update\): killed, out of memory",
    "hang-data": r"rank 1 on \S+ hangs or lags: in step 3 \(waiting for data\) for \d+ s; the other ranks wait for it",
    "hang": r"rank 1 on \S+ hangs or lags: in step 3 \(forward, backward and update\) for \d+ s; .* in a collective",
    "stop-save": r"rank 1 on \S+: no sign of life, in step 3 \(saving\): killed, out of memory, stopped",
}
CHECKPOINTS = ["--checkpoint.enable", "true", "--checkpoint.interval", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "resumes"),
    [
        ("kill", False),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (("stop-save", False), ("hang-data", True), ("hang", False))
        ),
    ],
)
def test_a_rank_that_is_killed_or_hangs_is_named(fault: str, resumes: bool, tmp_path: Path, start: Starter) -> None:
    """One message, by a rank that waits for it, and an exit within 5 s after the timeout; files show where ranks are.

    A save may take comm.save_timeout_s, half an hour; a rank that is stopped gives no signs of life.
    """
    faults = {"FAULT": fault, "FAULTY_RANK": "1", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    settings = ["--comm.train_timeout_s", "3", *(CHECKPOINTS if resumes or fault == "stop-save" else [])]
    if resumes:
        assert start(tmp_path, *settings, "--training.steps", "1", name="first").wait() == 0
    program = start(tmp_path, *settings, ranks=2, program=FAULTY, environment=faults)
    program.wait_for(r" 2/\d" if fault != "stop-save" else r" 3/\d")
    begin = time.monotonic()
    while 0 in program.ranks():
        program.process.poll()
        assert time.monotonic() - begin < 3 + 5
        time.sleep(0.05)
    program.close()
    messages = re.findall("^titanlite: .*$", program.output, re.MULTILINE)
    assert len(messages) == 1, program.output
    assert re.match(f"titanlite: {QUIET[fault]}", messages[0]), messages
    assert bool(re.search(r"\(rank 0 lost the connection: ", program.output)) == (fault != "stop-save")
    assert own_tracebacks(program.output) == 0
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"].startswith(messages[0])
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    assert str(folder) in messages[0]
    files = {file.name: file.read_text() for file in folder.iterdir()}
    living = [0, 1] if fault.startswith("hang") else [0]
    assert sorted(files) == [f"rank-{rank}.{suffix}" for rank in living for suffix in ("gloo.json", "txt")]
    assert json.loads(files["rank-0.gloo.json"])["entries"]
    if fault.startswith("hang"):
        assert ("hanging_next_step" if fault == "hang-data" else "hanging_train_step") in files["rank-1.txt"]


ELSEWHERE = {
    "kill-start": r"rank 1 on \S+: no sign of life, in step 0 \(start-up\): killed, out of memory",
    "hang-start": r"rank 1 on \S+ hangs or lags: in step 0 \(start-up\) for \d+ s; the other ranks wait for it",
    "hang-save": r"rank 1 on \S+ hangs or lags: in step \d+ \(saving\) for \d+ s; .*\n.*: cannot save step 3: ",
    "hang-end": r"rank 1 on \S+ hangs or lags: in step 6 \(ending\) for \d+ s; the other ranks wait for it",
}


@pytest.mark.soak  # default suite: test_a_rank_that_is_killed_or_hangs_is_named
def test_a_rank_that_is_killed_or_hangs_outside_of_a_step_is_named(tmp_path: Path, start: Starter) -> None:
    """In start-up, in the thread of a save, and after the last step, in four programs at the same time."""
    timeouts = [f"--comm.{name}_timeout_s={seconds}" for name, seconds in (("init", 6), ("train", 4), ("save", 3))]
    programs = {
        fault: start(
            tmp_path,
            *(*timeouts, "--job.dump_folder", str(tmp_path / "out" / fault)),
            *([*CHECKPOINTS, "--checkpoint.async_mode", "async"] if fault == "hang-save" else []),
            ranks=2,
            program=FAULTY,
            name=fault,
            environment={"FAULT": fault, "FAULTY_RANK": "1"},
        )
        for fault in ELSEWHERE
    }
    for fault, program in programs.items():
        program.wait_for("^titanlite: ")
        begin = time.monotonic()
        while 0 in program.ranks():
            program.process.poll()
            assert time.monotonic() - begin < SOON_S
            time.sleep(0.05)
        program.close()
        assert re.search(f"^titanlite: {ELSEWHERE[fault]}", program.output, re.MULTILINE), program.output
        assert len(re.findall("^titanlite: ", program.output, re.MULTILINE)) == 1, program.output
        assert own_tracebacks(program.output) == 0
    assert len(rows(tmp_path / "out" / "hang-end")) == 6


@pytest.mark.slow
def test_a_rank_0_that_is_stopped_with_the_store_is_named(tmp_path: Path, start: Starter) -> None:
    """Its connections stay open, as after the loss of a node, so that calls to the store block without limit."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "FAULT": "stop"}
    programs = [
        start(
            tmp_path,
            *("--comm.train_timeout_s", "3"),
            program=FAULTY,
            name=f"output{rank}",
            environment={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "FAULTY_RANK": "0"},
        )
        for rank in range(2)
    ]
    programs[0].wait_for(r" 2/\d")
    assert seconds_to_end(programs[1]) < 1 + 3 + 5
    assert programs[1].wait() == 1
    stopped = r"^titanlite: the launcher or rank 0 has ended, is stopped, .* in step 3 \(forward, backward and update\)"
    assert len(re.findall(stopped, programs[1].output, re.MULTILINE)) == 1, programs[1].output
    programs[0].process.kill()


@pytest.mark.soak  # default suite: tests/unit/metrics/test_slow_ranks.py
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


def interrupt(program: Program) -> None:
    """Send SIGINT, as Ctrl-C does. Only torchrun receives it, because its workers have separate sessions.

    In a forked program all ranks receive it, as if forwarded by torchrun.
    """
    program.process.send_signal(signal.SIGINT)
    assert seconds_to_end(program) < SOON_S
    (line,) = re.findall("^titanlite: .*", program.output, re.MULTILINE)
    assert re.fullmatch(r"titanlite: (interrupted|rank \d was ended by SIGINT)", line)
    assert own_tracebacks(program.output) == 0, program.output


def wait_until(program: Program, ranks: int, library: str) -> None:
    """Wait until `ranks` ranks have loaded the library."""
    end = time.monotonic() + PATIENCE_S
    while len(program.workers(library)) < ranks:
        assert program.process.poll() is None, program.output
        assert time.monotonic() < end
        time.sleep(0.02)


@needs_proc
@pytest.mark.slow
def test_ctrl_c_ends_one_process(tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *LONG, launcher=PYTHON)
    program.wait_for(r" 3/\d")
    interrupt(program)
    assert program.wait() == 130
    assert "Traceback" not in program.output
    assert program.processes() == []
    assert [row["step"] for row in rows(tmp_path / "out")][:3] == [1, 2, 3]


@needs_proc
@pytest.mark.soak  # test_ctrl_c_ends_one_process, and the next two, are cheaper
def test_ctrl_c_ends_all_ranks(tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *LONG, ranks=2, launcher=TORCHRUN)
    program.wait_for(r" 3/\d")
    assert len(program.workers("libtorch")) == 2
    interrupt(program)
    assert program.wait() != 0
    assert_all_gone(program)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_ctrl_c_ends_a_program_while_it_loads_libraries(ranks: int, tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *LONG, ranks=ranks, launcher=TORCHRUN if ranks else PYTHON)
    wait_until(program, max(1, ranks), "libtorch_cpu")
    interrupt(program)
    assert "Job:" not in program.output, "the libraries were already loaded"
    assert_all_gone(program)
    assert not (tmp_path / "out").exists()


@needs_proc
@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_waits_for_the_others(tmp_path: Path, start: Starter) -> None:
    faults = {"FAULT": "data", "FAULTY_RANK": "0"}
    program = start(tmp_path, *LONG, ranks=2, program=FAULTY, environment=faults)
    program.wait_for("building data")
    time.sleep(2)  # rank 1 has built its data by then, and waits in torch
    interrupt(program)
    assert_all_gone(program)


@needs_proc
@pytest.mark.slow
def test_ranks_end_with_a_terminated_launcher(tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *LONG, ranks=2, launcher=TORCHRUN)
    program.wait_for(r" 3/\d")
    os.kill(program.process.pid, signal.SIGTERM)
    assert seconds_to_end(program) < SOON_S
    assert_all_gone(program)
    assert own_tracebacks(program.output) == 0
    assert len(re.findall("^titanlite: ", program.output, re.MULTILINE)) == 1
    assert re.search(r"^titanlite: rank \d was ended by SIGTERM$", program.output, re.MULTILINE)
