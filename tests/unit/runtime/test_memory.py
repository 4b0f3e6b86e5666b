"""Memory figures of this process."""

import resource
from pathlib import Path

import pytest
import torch

from titanlite.runtime import memory
from titanlite.runtime.memory import peak_memory_bytes

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_peak_includes_freed_memory() -> None:
    before = peak_memory_bytes(CPU)
    size = before + 2**27  # more than any earlier peak left free
    block = torch.ones(size, dtype=torch.uint8)
    del block
    assert size <= peak_memory_bytes(CPU) < 3 * size


def test_without_proc_ru_maxrss_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert peak_memory_bytes(CPU) == pytest.approx(expected, rel=0.1)


def test_the_limits_of_all_control_groups_above_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "job/step/memory.max": "max",
        "job/memory.max": "3000",
        "memory/slurm/memory.limit_in_bytes": "2000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "cpu/slurm/memory.limit_in_bytes": "1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    own = tmp_path / "own"
    own.write_text("5:memory:/slurm\n4:cpu:/slurm\n0::/job/step\n")
    monkeypatch.setattr(memory, "OWN_CGROUPS", own)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    assert sorted(memory.control_group_limits()) == [2000, 3000, 9223372036854771712]
    assert memory.device_memory_bytes(CPU) == 2000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_counts_reserved_memory() -> None:
    device = torch.device("cuda", 0)
    block = torch.ones(2**26, dtype=torch.uint8, device=device)
    del block
    assert peak_memory_bytes(device) >= 2**26
