"""Conversions that are killed or run out of disk space, and their peak memory."""

import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.file_operations import Fault, FaultPoints, one_of_each
from tests.distributed.forked import fork_ranks
from tests.unit.hf.making import write_model
from titanlite.runtime.memory import peak_memory_bytes
from titanlite.tools.convert.__main__ import main
from titanlite.tools.saved_run import open_run

pytestmark = pytest.mark.slow

EXPORT = ("export", "run", "--shard-size", "20KB", "--no-verify")
IMPORT = ("import", "hf-model")


def convert(folder: Path, out: str, arguments: tuple[str, ...]) -> None:
    command, source, *options = arguments
    main([command, str(folder / source), "--out", str(folder / "outs" / out), *options])


def convert_and_kill(folder: Path, out: str, arguments: tuple[str, ...], kill_at: int) -> list[str]:
    """Convert with a kill at operation `kill_at` (-1: no kill); return the file operations."""
    points = FaultPoints(folder / "outs")
    points.arm(Fault("kill", at=kill_at))
    convert(folder, out, arguments)
    return points.operations


def convert_with_limit(folder: Path, out: str, arguments: tuple[str, ...], num_bytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, -1))
    try:
        convert(folder, out, arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))


def sweep(folder: Path, arguments: tuple[str, ...], everywhere: bool) -> list[str]:
    """Kill at one operation of each kind and at the last four (which publish the folder), or at all operations.

    Returns a line for each kill that left an incomplete folder, or after which the next conversion failed.
    """
    outs = folder / "outs"
    outs.mkdir()
    (complete,) = fork_ranks(convert_and_kill, 1, folder, "complete", arguments, -1)
    assert complete.error is None, complete
    expected, bad, killed = contents(outs / "complete"), [], 0
    count = len(complete.result)
    kills = range(count) if everywhere else sorted({*one_of_each(complete.result), *range(count - 4, count)})
    for kill_at in kills:
        (end,) = fork_ranks(convert_and_kill, 1, folder, "out", arguments, kill_at)
        killed += end.was_killed
        if (outs / "out").exists() and contents(outs / "out") != expected:
            bad.append(f"{kill_at}: incomplete folder")
        if not (outs / "out").exists() and kill_at % 4 == 0:
            (again,) = fork_ranks(convert_and_kill, 1, folder, "out", arguments, -1)
            if again.error is not None or contents(outs / "out") != expected:
                bad.append(f"{kill_at}: next conversion, {again.error}")
        shutil.rmtree(outs)
        outs.mkdir()
    assert killed == len(kills) > 5, (killed, complete)
    return bad + not_synced(complete.result)


def not_synced(operations: list[str]) -> list[str]:
    """Paths that a power failure could remove after the folder is published."""
    named = max(number for number, operation in enumerate(operations) if operation.startswith("rename"))
    before = [operation.replace("/.step-0.writing", "/step-0").partition(" ") for operation in operations[:named]]
    made = {path.replace("/.metadata.tmp", "/.metadata") for kind, _, path in before if kind in ("create", "mkdir")}
    synced = {path.replace("/.metadata.tmp", "/.metadata") for kind, _, path in before if kind == "fsync"}
    lost = sorted(made - synced - {"."})
    return lost if "fsync ." in operations[named:] else [*lost, "the name"]


def contents(folder: Path) -> dict[str, Any]:
    """File contents by name; "" for files that contain times and paths."""
    named = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    varying = ("MANIFEST.json", "config.toml")
    return {name: "" if path.name in varying else path.read_bytes().hex() for name, path in named.items()}


def without_space(folder: Path, arguments: tuple[str, ...], limits: list[int]) -> list[list[Any]]:
    """(error type, error text, remaining names) by limit"""
    (folder / "outs").mkdir(exist_ok=True)
    found = []
    for limit in limits:
        (end,) = fork_ranks(convert_with_limit, 1, folder, "out", arguments, limit)
        found.append([*(end.error or ("", "")), [path.name for path in (folder / "outs").iterdir()]])
    return found


@pytest.fixture
def made(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf-model", dtype=torch.float32)
    main(["import", str(tmp_path / "hf-model"), "--out", str(tmp_path / "run")])
    return tmp_path


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("arguments", [EXPORT, IMPORT], ids=["export", "import"])
def test_after_a_kill_the_folder_is_complete_or_absent(
    made: Path, arguments: tuple[str, ...], everywhere: bool
) -> None:
    assert sweep(made, arguments, everywhere) == []


@pytest.mark.parametrize("arguments", [EXPORT, IMPORT], ids=["export", "import"])
def test_full_disk_is_reported_in_one_line_without_leftovers(made: Path, arguments: tuple[str, ...]) -> None:
    for error, text, left in without_space(made, arguments, [0, 100, 1000, 8000]):
        assert (error, left) == ("UserError", []), (error, text, left)
        assert "cannot write " in text
        assert "File too large" in text
        assert "\n" not in text


def write_large(folder: Path) -> None:
    """Write a model of 31 tensors, the largest of 8 MiB."""
    sizes = {"dim": 1024, "n_heads": 16, "n_kv_heads": 16, "ffn_dim": 2048, "n_layers": 3, "vocab_size": 1000}
    tensors = write_model(folder / "hf-model", dtype=torch.float32, **sizes)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 120 * 2**20


def peak_of(folder: Path, out: str, arguments: tuple[str, ...]) -> int:
    """Peak bytes of the conversion, without the memory that the process had before."""
    with Path("/proc/self/clear_refs").open("w") as file:
        file.write("5")  # resets the peak
    before = peak_memory_bytes(torch.device("cpu"))
    convert(folder, out, arguments)
    return peak_memory_bytes(torch.device("cpu")) - before


def peaks(folder: Path) -> list[int]:
    write = fork_ranks(write_large, 1, folder)
    assert write[0].error is None, write
    found = []
    for out, arguments in (
        ("run", ("import", "hf-model")),
        ("out", ("export", "outs/run", "--shard-size", "16MB", "--no-verify")),
    ):
        (end,) = fork_ranks(peak_of, 1, folder, out, arguments)
        assert end.error is None, end
        found.append(end.result)
    return found


def test_memory_is_that_of_a_shard_instead_of_the_model(tmp_path: Path) -> None:
    """The model takes 125 MiB, its largest tensor 8 MiB, a shard 16 MB at most.

    Measured: 70 MiB (import) and 55 MiB (export), including the libraries; once 82 MiB on a busy machine.
    """
    for_import, for_export = peaks(tmp_path)
    assert for_import < 100 * 2**20, for_import / 2**20
    assert for_export < 80 * 2**20, for_export / 2**20
    exported = {n: t for f in (tmp_path / "outs" / "out").glob("*.safetensors") for n, t in load_file(f).items()}
    source = load_file(tmp_path / "hf-model" / "model.safetensors")
    assert exported.keys() == source.keys()
    assert all(torch.equal(tensor, source[name]) for name, tensor in exported.items())
    assert open_run(tmp_path / "outs" / "run").dtype == torch.float32
