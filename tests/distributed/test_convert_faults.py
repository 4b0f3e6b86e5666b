"""Conversions that are killed, or run out of disk or memory."""

import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.file_operations import Fault, FaultPoints, one_of_each
from tests.distributed.forked import Parent, fork_ranks
from tests.unit.hf.making import write_model
from titanlite.runtime.memory import peak_memory_bytes
from titanlite.tools.convert.__main__ import main
from titanlite.tools.saved_run import open_run

pytestmark = pytest.mark.slow

EXPORT = ("export", "run", "--shard-size", "20KB", "--no-verify")
IMPORT = ("import", "there")


def convert(folder: Path, out: str, arguments: tuple[str, ...]) -> None:
    command, source, *options = arguments
    main([command, str(folder / source), "--out", str(folder / "outs" / out), *options])


def doomed(folder: Path, out: str, arguments: tuple[str, ...], kill_at: int) -> list[str]:
    """What it does to files."""
    points = FaultPoints(folder / "outs")
    points.arm(Fault("kill", at=kill_at))
    convert(folder, out, arguments)
    return points.operations


def limited(folder: Path, out: str, arguments: tuple[str, ...], num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, -1))
    try:
        convert(folder, out, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))


def sweep(folder: Path, arguments: tuple[str, ...], everywhere: bool) -> list[str]:
    """Kills at an operation of each kind and at the last ones, about the name, or at all operations. A line for each
    kill after which the folder was there and not whole, or the next conversion was not."""
    outs = folder / "outs"
    outs.mkdir()
    (whole,) = fork_ranks(doomed, 1, folder, "whole", arguments, -1)
    assert whole.error is None, whole
    expected, bad, killed = contents(outs / "whole"), [], 0
    count = len(whole.result)
    kills = range(count) if everywhere else sorted({*one_of_each(whole.result), *range(count - 4, count)})
    for kill_at in kills:
        (end,) = fork_ranks(doomed, 1, folder, "out", arguments, kill_at)
        killed += end.was_killed
        if (outs / "out").exists() and contents(outs / "out") != expected:
            bad.append(f"{kill_at}: a part of it")
        if not (outs / "out").exists() and kill_at % 4 == 0:
            (again,) = fork_ranks(doomed, 1, folder, "out", arguments, -1)
            if again.error is not None or contents(outs / "out") != expected:
                bad.append(f"{kill_at}: not afterwards, {again.error}")
        shutil.rmtree(outs)
        outs.mkdir()
    assert killed == len(kills) > 5, (killed, whole)
    return bad + not_on_the_disk(whole.result)


def not_on_the_disk(operations: list[str]) -> list[str]:
    """What a loss of power could take away once the folder has its name."""
    named = max(number for number, operation in enumerate(operations) if operation.startswith("rename"))
    before = [operation.replace("/.step-0.writing", "/step-0").partition(" ") for operation in operations[:named]]
    made = {path.replace("/.metadata.tmp", "/.metadata") for kind, _, path in before if kind in ("create", "mkdir")}
    synced = {path.replace("/.metadata.tmp", "/.metadata") for kind, _, path in before if kind == "fsync"}
    lost = sorted(made - synced - {"."})
    return lost if "fsync ." in operations[named:] else [*lost, "the name"]


def contents(folder: Path) -> dict[str, Any]:
    """By name; what a manifest and a config say of time and place is left out."""
    named = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    sizes = ("MANIFEST.json", "config.toml")
    return {name: "" if path.name in sizes else path.read_bytes().hex() for name, path in named.items()}


def without_space(folder: Path, arguments: tuple[str, ...], limits: list[int]) -> list[list[Any]]:
    """(type of the error, its text, what is left) by limit."""
    (folder / "outs").mkdir(exist_ok=True)
    found = []
    for limit in limits:
        (end,) = fork_ranks(limited, 1, folder, "out", arguments, limit)
        found.append([*(end.error or ("", "")), [path.name for path in (folder / "outs").iterdir()]])
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_model(tmp_path / "there", dtype=torch.float32)
    main(["import", str(tmp_path / "there"), "--out", str(tmp_path / "run")])
    return tmp_path


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("arguments", [EXPORT, IMPORT], ids=["export", "import"])
def test_after_a_kill_at_any_operation_the_folder_is_whole_or_not_there(
    made: Path, parent: Parent, arguments: tuple[str, ...], everywhere: bool
) -> None:
    assert parent(sweep, made, arguments, everywhere) == []


@pytest.mark.parametrize("arguments", [EXPORT, IMPORT], ids=["export", "import"])
def test_a_full_disk_is_one_line_and_leaves_nothing(made: Path, parent: Parent, arguments: tuple[str, ...]) -> None:
    for error, text, left in parent(without_space, made, arguments, [0, 100, 1000, 8000]):
        assert (error, left) == ("UserError", []), (error, text, left)
        assert "cannot be written: " in text
        assert "File too large" in text
        assert "\n" not in text


NUM_BYTES = 130 * 2**20


def write_large(folder: Path) -> None:
    """Of 31 tensors, the largest of which take 8 MiB."""
    sizes = {"dim": 1024, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 2048, "n_layers": 3, "vocab_size": 1000}
    tensors = write_model(folder / "there", dtype=torch.float32, **sizes)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 120 * 2**20


def peak_of(folder: Path, out: str, arguments: tuple[str, ...]) -> int:
    """Bytes that the conversion has taken beside what the process had before."""
    with Path("/proc/self/clear_refs").open("w") as file:
        file.write("5")  # the peak begins anew
    before = peak_memory_bytes(torch.device("cpu"))
    convert(folder, out, arguments)
    return peak_memory_bytes(torch.device("cpu")) - before


def peaks(folder: Path) -> list[int]:
    write = fork_ranks(write_large, 1, folder)
    assert write[0].error is None, write
    found = []
    for out, arguments in (
        ("run", ("import", "there")),
        ("out", ("export", "outs/run", "--shard-size", "16MB", "--no-verify")),
    ):
        (end,) = fork_ranks(peak_of, 1, folder, out, arguments)
        assert end.error is None, end
        found.append(end.result)
    return found


def test_memory_is_that_of_a_shard_and_not_of_the_model(tmp_path: Path, parent: Parent) -> None:
    """The model takes 125 MiB, its largest tensor 8 MiB, a shard 16 MB at most.

    70 and 55 MiB, with what the libraries take for themselves; 82 once, on a busy machine.
    """
    for_import, for_export = parent(peaks, tmp_path)
    assert for_import < 100 * 2**20, for_import / 2**20
    assert for_export < 80 * 2**20, for_export / 2**20
    exported = {n: t for f in (tmp_path / "outs" / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    there = load_file(tmp_path / "there" / "model.safetensors")
    assert exported.keys() == there.keys()
    assert all(torch.equal(tensor, there[name]) for name, tensor in exported.items())
    assert open_run(tmp_path / "outs" / "run").dtype == torch.float32
