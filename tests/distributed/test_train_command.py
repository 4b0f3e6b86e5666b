"""The training command as a user starts it: equal numbers on every mesh, and errors of invalid starts."""

import math
import re
import socket
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.program import CONFIG, PATIENCE_S, Program, Starter, own_tracebacks, rows, start_program
from tests.distributed.reference import GLOBAL_BATCH, SEQ_LEN, TOKENS
from tests.unit.planning.test_step_time import profile
from titanlite.metrics.timing import COLUMNS
from titanlite.planning.hardware.machine import dump_profile

STEPS = 6
EPOCH = f"epoch/tokens {TOKENS}"
UP_TO_LOSSES = [
    *["step", "loss", "grad_norm", "lr", "num_valid", "tokens_seen", "tokens_per_second", "step_time_s", "data_time_s"],
    *["memory_gib", "skipped_steps", "bad_rows", "interval_loss"],
]
SLOWEST = ["slowest_rank", "slowest_host", "slowest_ratio"]
"""Keys of runs on several ranks."""
MACHINE_DEPENDENT = {"tokens_per_second", "step_time_s", "data_time_s", "memory_gib", *SLOWEST, *COLUMNS}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A finished run in one process."""
    return start_program(tmp_path_factory.mktemp("single")).succeed()


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row without times, speeds and memory."""
    return {key: value for key, value in row.items() if key not in MACHINE_DEPENDENT}


def test_one_process_logs_every_step(single: Program) -> None:
    found = rows(single.workplace / "out")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row in found:
        assert list(row) == [*UP_TO_LOSSES, EPOCH, *COLUMNS]
        assert row["num_valid"] == GLOBAL_BATCH * SEQ_LEN
        assert row["tokens_seen"] == row["step"] * GLOBAL_BATCH * SEQ_LEN
        assert (row["skipped_steps"], row["bad_rows"]) == (0, 0)
        assert 0 < row["data_time_s"] < row["step_time_s"]
    assert [row["lr"] for row in found[:2]] == pytest.approx([0.005, 0.01])
    windows = (len(np.load(TOKENS)) - 1) // SEQ_LEN
    assert [row[EPOCH] for row in found] == [row["step"] * GLOBAL_BATCH / windows for row in found]
    assert f" {found[-1][EPOCH]:.2f} " in single.output
    assert f"read {found[-1][EPOCH]:.2f} times in {STEPS} steps" in single.output
    assert found[-1]["loss"] < found[0]["loss"] - 0.1
    assert f"Done: {STEPS} steps" in single.output
    assert "warning: Checkpoints: none, since checkpoint.enable = false: " in single.output
    assert "warning: The weights were not saved: " in single.output
    names = sorted(path.name for path in (single.workplace / "out").iterdir())
    assert names == ["config.toml", "metrics.jsonl", "records", "run.json", "train.log"]


LAYOUTS = [
    pytest.param({"dp_shard": 2}, id="sharded"),
    pytest.param({"dp_replicate": 2}, id="replicated", marks=pytest.mark.soak),
    pytest.param({"tp": 2}, id="the same rows on both ranks", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_match_one_process(layout: dict[str, int], single: Program, tmp_path: Path, start: Starter) -> None:
    arguments = [text for key, value in layout.items() for text in (f"--parallelism.{key}", str(value))]
    program = start(tmp_path, *arguments, "--training.local_batch_size", "4", ranks=2).succeed()
    found, expected = rows(tmp_path / "out"), rows(single.workplace / "out")
    assert [list(row) for row in found] == [[*UP_TO_LOSSES, *SLOWEST, EPOCH, *COLUMNS]] * STEPS
    assert all(row["slowest_ratio"] >= 1 and row["slowest_host"] == socket.gethostname() for row in found)
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-14, abs=0)
    for row, expected_row in zip(found, expected, strict=True):
        assert numbers(row) == pytest.approx(numbers(expected_row), rel=1e-10, abs=0)
    for once in (f"Done: {STEPS} steps", " 1/6 ", "warning: Checkpoints: none", "warning: The weights were not saved"):
        assert program.output.count(once) == 1, once


def profile_file(folder: Path, bytes_per_s: float) -> str:
    """A hardware profile in whose network messages take that long."""
    file = folder / f"{bytes_per_s:.0e}.toml"
    file.write_text(dump_profile(profile("cpu", latency_s=1e-6, bytes_per_s=bytes_per_s, operation_s=1e-6)))
    return str(file)


@pytest.mark.slow
def test_chosen_layouts_match_one_process(single: Program, tmp_path: Path, start: Starter) -> None:
    """3 steps on 4 ranks, then 3 on 2 ranks, which choose again and resume; tp = 2 is kept."""
    hardware = profile_file(tmp_path, 1e9)
    settings = ("--parallelism.layout", "auto", "--parallelism.hardware", hardware, "--parallelism.tp", "2")
    losses = {}
    for ranks, steps in ((4, 3), (2, STEPS)):
        run = (*settings, "--checkpoint.enable", "true", "--lr_schedule.decay_steps", str(STEPS - 2))
        program = start(tmp_path, *run, "--training.steps", str(steps), ranks=ranks, name=f"{ranks}").succeed()
        (layout,) = re.findall(r"Layout: auto: (.*), recompute .* fastest of \d+ mesh", program.output)
        section = tomllib.loads((tmp_path / "out" / "config.toml").read_text())["parallelism"]
        assert (section["layout"], section["tp"]) == ("given", 2)
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert math.prod(section[axis] for axis in axes) == ranks
        assert layout == " x ".join(f"{axis} {section[axis]}" for axis in axes if section[axis] > 1)
        losses |= {row["step"]: row["loss"] for row in rows(tmp_path / "out")}
    expected = {row["step"]: row["loss"] for row in rows(single.workplace / "out")}
    assert losses == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.slow
def test_no_layout_that_fits_is_said_once(tmp_path: Path, start: Starter) -> None:
    settings = ("--parallelism.layout", "auto", "--parallelism.hardware", profile_file(tmp_path, 1e9))
    program = start(tmp_path, *settings, "--parallelism.tp", "4", ranks=4)  # of 2 heads of keys
    assert program.wait() != 0
    assert program.output.count("no layout of 4 ranks fits the checks of the configuration") == 1
    assert own_tracebacks(program.output) == 0


@pytest.mark.slow
def test_written_config_repeats_the_run_and_keeps_earlier_files(tmp_path: Path, start: Starter) -> None:
    first = start(tmp_path, "--training.global_batch_size", "-1", name="first").succeed()
    folder = tmp_path / "out"
    earlier = {name: (folder / name).read_bytes() for name in ("config.toml", "metrics.jsonl")}

    second = start(tmp_path, "--job.config_file", str(folder / "config.toml"), name="second").succeed()
    assert {name: (folder / f"{name}.1").read_bytes() for name in earlier} == earlier
    assert [numbers(row) for row in rows(folder)] == [numbers(row) for row in rows(folder, "metrics.jsonl.1")]
    assert (folder / "config.toml").read_bytes() == earlier["config.toml"]
    renamed = "has files of an earlier run; renamed to config.toml.1, metrics.jsonl.1"
    assert [program.output.count(renamed) for program in (first, second)] == [0, 1]


@pytest.mark.slow
def test_a_run_of_tokens_resumes_with_more_tokens(tmp_path: Path, start: Starter) -> None:
    """3 steps, of which the last one is not full; then 5 by the same command with more tokens."""
    per_step = GLOBAL_BATCH * SEQ_LEN
    starts = (("first", 2 * per_step + 1, 3), ("again", 3 * per_step, 3), ("longer", 5 * per_step, 5))
    for name, tokens, steps in starts:
        tokens_and_saves = ("--training.tokens", str(tokens), "--checkpoint.enable")
        program = start(
            tmp_path, *tokens_and_saves, "--lr_schedule.warmup_steps", f"{per_step + 1} tokens", name=name
        ).succeed()
        assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, steps + 1))
        assert f"steps {steps} ({steps * per_step:,} tokens), warm-up 2" in program.output
        assert ("Nothing to do" in program.output) == (name == "again")
        assert "warmup" not in program.output
        assert f"\nsteps = {steps}\ntokens = -1\n" in (tmp_path / "out" / "config.toml").read_text()


WRONG = [
    *["--training.steps", "0"],
    *["--training.seq_length", "32"],
    *["--optimizer.lr", "fast"],
    *["--parallelism.dp_shard", "3"],
    *["--data.sources.0.path", "nowhere/*.npy"],
]
REPORTED = [
    *("the configuration has 5 problems:", "training.steps = 0", "training.seq_length", "training.seq_len"),
    *("optimizer.lr = 'fast'", "parallelism.dp_shard = 3", "data.sources.0.path = 'nowhere/*.npy'"),
]


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_all_problems_of_a_config_are_reported_together(ranks: int, tmp_path: Path, start: Starter) -> None:
    program = start(tmp_path, *WRONG, ranks=ranks)
    if ranks:
        program.wait_for("the configuration has")
    reported = time.monotonic()
    # torchrun does not exit with the code of its ranks.
    assert program.wait() == (1 if ranks else 2)
    assert time.monotonic() - reported < (10 if ranks else PATIENCE_S)
    for text in REPORTED:
        assert text in program.output, text
    assert program.output.count("the configuration has") == 1
    assert program.output.count("training.steps = 0") == 1
    assert own_tracebacks(program.output) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml", "output"]
    assert (tmp_path / "config.toml").read_text() == CONFIG
