"""Figures of this machine: memory of the process, number of GPUs, peak FLOP/s."""

import os
import resource
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from titanlite.runtime import memory
from titanlite.runtime.errors import UserError
from titanlite.runtime.gpus import set_allocator, usable_gpus
from titanlite.runtime.memory import peak_memory_bytes
from titanlite.runtime.peak_flops import device_peak_flops, peak_flops

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


class FakeTorch(ModuleType):
    """A torch without a device; `error` is the message if CUDA fails to initialize."""

    def __init__(self, build: str | None, count: int = 0, error: str = "No CUDA GPUs are available") -> None:
        super().__init__("torch")
        self.__version__ = "2.13.0"
        self.version = SimpleNamespace(cuda=build)
        self.error = error
        self.cuda = SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count, init=self.init)

    def init(self) -> None:
        raise RuntimeError(f"{self.error}\nmore")


def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would be an ImportError
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert usable_gpus("", tmp_path) == 0
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert usable_gpus("cpu", tmp_path) == 0
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("13.0", count=3))
    assert usable_gpus("", tmp_path) == 3
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(None))
    with pytest.raises(UserError, match=r"torch 2\.13\.0 is a build without CUDA"):
        usable_gpus("", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", FakeTorch("13.0", error="The driver is too old"))
    with pytest.raises(UserError, match=r"cannot use it: The driver is too old .* DEVICE=cpu to train on the CPU$"):
        usable_gpus("", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert usable_gpus("", tmp_path) == 0
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES hides all GPUs"):
        usable_gpus("cuda", tmp_path)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_configured_allocator_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:512"})
    set_allocator()
    assert os.environ == {name: "max_split_size_mb:512"}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("A100-SXM4-40GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA GH200 144G HBM3e", 989.5),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI355X", 2500.0),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert peak_flops(name, torch.bfloat16) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        *("NVIDIA A100-SXM-64GB", "NVIDIA H100", "NVIDIA H20", "NVIDIA GH200 480GB MIG 1g.12gb", "NVIDIA B300 PCIe"),
        *("NVIDIA L40", "NVIDIA A10G", "Tesla T4", "AMD Instinct MI300A", "cpu", ""),
    ],
)
def test_unknown_devices_have_no_figure(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None


def test_other_dtypes_and_a_cpu_have_no_figure() -> None:
    assert peak_flops("NVIDIA H200", torch.float32) is None
    assert peak_flops("NVIDIA H200", torch.float64) is None
    assert device_peak_flops(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_local_device_is_looked_up_by_name() -> None:
    device = torch.device("cuda", 0)
    assert device_peak_flops(device, torch.bfloat16) == peak_flops(torch.cuda.get_device_name(0), torch.bfloat16)
