"""Ranks with different configurations, data or environments: refused before the first step, by rank, key and values."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.program import CONFIG, FAULTY, Program, Starter, own_tracebacks, rows
from tests.distributed.reference import TOKENS


def start_unequal(start: Starter, folder: Path, arguments: str, *common: str, name: str = "output") -> Program:
    """Start two ranks; rank 1 has further `arguments`."""
    environment = {"FAULTY_RANK": "1", "FAULT": "arguments", "ARGUMENTS": arguments}
    return start(folder, *common, ranks=2, program=FAULTY, environment=environment, name=name)


CONFIGURED = {
    "optimizer.lr": ("0.5", "0.01"),
    "data.seed": ("7", "0"),
    "debug.seed": ("7", "0"),
    "training.max_norm": ("0.5", "1.0"),
}
"""Key: its values on ranks 1 and 0."""


@pytest.mark.slow
def test_another_configuration_on_one_rank_is_refused(tmp_path: Path, start: Starter) -> None:
    program = start_unequal(start, tmp_path, " ".join(f"--{key} {here}" for key, (here, _) in CONFIGURED.items()))
    assert program.wait() == 1, program.output  # as torchrun; the ranks exit with 2
    host = socket.gethostname()
    assert program.output.count(f"\n  rank 1 on {host}\n") == program.output.count("the ranks differ") == 1
    for key, (here, there) in CONFIGURED.items():
        assert f"\n    {key}: {here}; on rank 0 on {host}: {there}\n" in program.output, program.output
    assert own_tracebacks(program.output) == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_initial_checkpoint_on_one_rank_is_refused_and_a_copy_is_verified(
    tmp_path: Path, start: Starter
) -> None:
    start(tmp_path, "--checkpoint.enable", "true", "--checkpoint.interval", "3", name="saved").succeed()
    (tmp_path / "out").rename(tmp_path / "first")
    first, last = (tmp_path / "first/checkpoint" / f"step-{step}" for step in (3, 6))
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    largest = max(copy.iterdir(), key=lambda file: file.stat().st_size)
    key = "--checkpoint.initial_load_path"
    layout = ("--parallelism.dp_shard", "2", "--training.steps", "1")

    program = start_unequal(start, tmp_path, f"{key} {last}", *layout, name="none")
    assert program.wait() == 1, program.output
    assert f"{key[2:]}: a checkpoint; on rank 0 on {socket.gethostname()}: initial weights\n" in program.output

    (tmp_path / "config.toml").write_text(f'{CONFIG}[checkpoint]\ninitial_load_path = "{first}"\n')
    program = start_unequal(start, tmp_path, f"{key} {last}", *layout, name="other")
    assert program.wait() == 1, program.output
    assert program.output.count("the ranks would load different checkpoints") == 1, program.output
    assert f"\n  rank 1: {last} on {socket.gethostname()}, MANIFEST.json " in program.output
    assert f"\n  rank 0: {first} on {socket.gethostname()}, MANIFEST.json " in program.output

    start_unequal(start, tmp_path, f"{key} {copy}", *layout, name="same").succeed()
    shutil.rmtree(tmp_path / "out")
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    program = start_unequal(start, tmp_path, f"{key} {copy}", *layout, name="damaged")
    assert program.wait() == 1, program.output
    assert f"is corrupted: {largest.name} (written by rank " in program.output
    assert own_tracebacks(program.output) == 0


@pytest.mark.slow
def test_another_data_file_on_one_rank_is_refused_and_a_copy_is_not(tmp_path: Path, start: Starter) -> None:
    copy, other = tmp_path / "copy.npy", tmp_path / "other.npy"
    shutil.copyfile(TOKENS, copy)
    tokens = np.load(TOKENS)
    np.save(other, np.concatenate([tokens[:-1], tokens[:1] ^ 1]))
    assert copy.stat().st_size == other.stat().st_size
    start_unequal(start, tmp_path, f"--data.sources.0.path {copy}", "--training.steps", "1", name="same").succeed()
    assert len(rows(tmp_path / "out")) == 1
    program = start_unequal(start, tmp_path, f"--data.sources.0.path {other}")
    assert program.wait() == 1
    assert "\n    data.sources.0: content: xxh3-128:" in program.output
    assert own_tracebacks(program.output) == 0
