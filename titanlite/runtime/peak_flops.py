"""Peak FLOP/s of known devices, for MFU: published figures only, never an estimate.

All figures are for dense bfloat16 with float32 accumulation, per device as torch names it. Figures published with
structured sparsity (NVIDIA since Hopper) are halved, as the footnotes of those documents state.
"""

import re

import torch

# (pattern of the full device name, TFLOP/s). re.fullmatch is used: a MIG slice, a laptop GPU or an export variant has
# other limits than the device whose name it contains.
_BF16_DENSE_TFLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA A100 Tensor Core GPU datasheet: BFLOAT16 Tensor Core 312 (624 with sparsity), SXM4 and PCIe alike
    (r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", 312.0),
    # NVIDIA H100 Tensor Core GPU datasheet, SXM5: 1,979 with sparsity
    (r"H100 80GB HBM3", 989.5),
    # the same datasheet in its PCIe edition: 1,513 with sparsity
    (r"H100 PCIe", 756.5),
    # the same datasheet in its NVL edition, per GPU: 1,671 with sparsity
    (r"H100 NVL", 835.5),
    # NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 with sparsity
    (r"H200", 989.5),
    # the same datasheet, NVL: 1,671 with sparsity
    (r"H200 NVL", 835.5),
    # NVIDIA GH200 Grace Hopper Superchip datasheet: 1,979 with sparsity; the names have the size of one of the memories
    (r"GH200 (120GB|480GB|144G HBM3e)", 989.5),
    # NVIDIA HGX B200 specifications, per GPU: 4.5 PFLOP/s with sparsity
    (r"B200", 2250.0),
    # NVIDIA GB200 NVL72 specifications, per GPU: 5 PFLOP/s with sparsity
    (r"GB200", 2500.0),
    # NVIDIA HGX B300 specifications: 36 PFLOP/s with sparsity for 8 GPUs
    (r"B300 SXM6 AC", 2250.0),
    # NVIDIA GB300 NVL72 specifications: 360 PFLOP/s with sparsity for 72 GPUs
    (r"GB300", 2500.0),
    # NVIDIA L40S datasheet: 362.05 (733 with sparsity)
    (r"L40S", 362.05),
    # NVIDIA L4 datasheet: 242 with sparsity
    (r"L4", 121.0),
    # NVIDIA A10 datasheet: 125 (250 with sparsity)
    (r"A10", 125.0),
    # NVIDIA Ampere GA102 GPU architecture whitepaper, RTX 3090: bf16 with fp32 accumulate 71 (142 with sparsity)
    (r"GeForce RTX 3090", 71.0),
    # NVIDIA Ada GPU architecture whitepaper, RTX 4090: bf16 with fp32 accumulate 165.2 (330.4 with sparsity)
    (r"GeForce RTX 4090", 165.2),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, RTX 5090: bf16 with fp32 accumulate 209.5 (419 with sparsity)
    (r"GeForce RTX 5090", 209.5),
    # AMD Instinct MI300X and MI325X data sheets: peak bfloat16 1,307.4 (2,614.9 with sparsity)
    (r"Instinct (MI300X|MI325X)", 1307.4),
    # AMD Instinct MI355X data sheet: peak bfloat16 2.5 PFLOP/s
    (r"Instinct (MI355X|MI355 OAM)", 2500.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of one device for matrix products in `dtype`; None if no published figure is known.

    device_name: from torch.cuda.get_device_name. Only bfloat16 has figures: those of float32 depend on whether TF32 is
    allowed.
    """
    if dtype != torch.bfloat16:
        return None
    name = re.sub(r"^(NVIDIA|AMD) ", "", device_name.strip())
    return next((tflops * 1e12 for pattern, tflops in _BF16_DENSE_TFLOPS if re.fullmatch(pattern, name)), None)


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return `peak_flops` of a device of this machine; None for a CPU, whose peak torch does not report."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None
