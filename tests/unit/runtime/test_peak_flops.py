"""Peak FLOP/s: known devices only, not devices with similar names."""

import pytest
import torch

from titanlite.runtime.peak_flops import device_peak_flops, peak_flops


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
