"""Check 1: versions, the kernels that attention uses, and the rates of the device itself."""

import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from gpu_checks.rows import Emit, Found, SkippedError, Value, WrongError, run_case
from gpu_checks.workload import Setup, fused_kernel, matmul_flops
from titanlite.models.attention import attend, attention_mask, document_arguments, pin_kernels
from titanlite.runtime.memory import GIB, device_memory_bytes
from titanlite.runtime.peak_flops import device_peak_flops

CHECK = "1 facts"
LEAST_OF_PEAK = 0.5
"""A device whose largest matrix products are slower than this is shared, throttled or limited in power."""


def check(emit: Emit, setup: Setup) -> None:
    pin_kernels(setup.device)
    cases: dict[str, Callable[[], Found]] = {
        "versions": lambda: versions(setup),
        "device": lambda: device(setup),
        "attention, causal": lambda: attention(setup, documents=False),
        "attention, documents": lambda: attention(setup, documents=True),
        "kernels of attention": lambda: backends(setup),
        "bfloat16 product": lambda: product(setup),
        "copy on the device": lambda: copy_on_device(setup),
        "copy to the host": lambda: copy_to_host(setup),
        "launch": lambda: launch(setup),
    }
    for name, case in cases.items():
        emit(run_case(CHECK, name, case))


def versions(setup: Setup) -> Found:
    found: dict[str, Any] = {"Python": platform.python_version(), "torch": torch.__version__}
    if setup.device_type == "cuda":
        found |= {"CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if shutil.which("nvidia-smi"):
            found["driver"] = nvidia_smi("driver_version")
    return Found(", ".join(f"{name} {version}" for name, version in found.items()), found, measured=True)


def nvidia_smi(query: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def device(setup: Setup) -> Found:
    memory = device_memory_bytes(setup.device) / GIB
    if setup.device_type == "cpu":
        return Found(f"CPU, {torch.get_num_threads()} threads, {memory:.1f} GiB", {"GiB": memory}, measured=True)
    properties = torch.cuda.get_device_properties(setup.device)
    free = torch.cuda.mem_get_info(setup.device)[0] / GIB
    peak = device_peak_flops(setup.device, torch.bfloat16)
    values: dict[str, Value] = {"device": properties.name, "GiB": memory, "free GiB": free, "peak FLOP/s": peak}
    known = "unknown peak" if peak is None else f"peak {peak / 1e12:.1f} TFLOP/s in bfloat16"
    text = f"{properties.name}, {memory:.1f} GiB ({free:.1f} free), {properties.multi_processor_count} SMs, {known}"
    if shutil.which("nvidia-smi"):
        text += f"; power limit, SM clock, temperature: {nvidia_smi('power.limit,clocks.sm,temperature.gpu')}"
    return Found(text, values, measured=True)


def inputs(setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the shape of an 8B (tiny: few and short)."""
    heads, kv_heads, seq_len, head_dim = (4, 2, 32, 16) if setup.tiny else (32, 8, 8192, 128)
    sizes = [(1, number, seq_len, head_dim) for number in (heads, kv_heads, kv_heads)]
    queries, keys, values = (torch.randn(size, device=setup.device, dtype=torch.bfloat16) for size in sizes)
    return queries, keys, values


def attention(setup: Setup, *, documents: bool) -> Found:
    """The kernel that the model's attention uses in bfloat16, and its rate forward. Fails if it is not fused."""
    queries, keys, values = inputs(setup)
    mask = None
    if documents:
        positions = torch.arange(queries.shape[2], device=setup.device).remainder(queries.shape[2] // 4).unsqueeze(0)
        ids = document_arguments(positions)["document_ids"]
        mask = attention_mask(ids, queries.dtype, queries.shape[3])
    if mask is None or isinstance(mask, Tensor):
        kernel = fused_kernel(lambda: attend(queries, keys, values, mask))
    else:
        kernel = "FlexAttention"  # check 9 tests that it is fused
    seconds = setup.seconds(lambda: attend(queries, keys, values, mask))
    # Two products over the scores, half of which are visible; documents see a quarter of that.
    flops = 2 * queries.numel() * queries.shape[2] / (4 if documents else 1)
    rate = flops / seconds
    numbers: dict[str, Value] = {"kernel": kernel, "ms": 1000 * seconds, "FLOP/s": rate}
    return Found(f"{kernel}: {1000 * seconds:.3f} ms forward, {rate / 1e12:.2f} TFLOP/s", numbers)


def backends(setup: Setup) -> Found:
    """Forward and backward time of each kernel of scaled_dot_product_attention that takes the shapes of an 8B."""
    if setup.device_type == "cpu":
        raise SkippedError("a CPU has one fused kernel")
    found: dict[str, Value] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        tensors = [tensor.requires_grad_() for tensor in inputs(setup)]
        upstream = torch.randn_like(tensors[0])

        def work(tensors: list[Tensor] = tensors, upstream: Tensor = upstream) -> None:
            queries, keys, values = tensors
            out = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            torch.autograd.grad(out, tensors, upstream)

        try:
            with sdpa_kernel([backend]):
                found[backend.name] = 1000 * setup.seconds(work)
        except RuntimeError:  # this kernel does not take the shapes, or is not built for this device
            found[backend.name] = None
    if not any(found.values()):
        raise WrongError("no fused kernel takes the shapes of an 8B")
    texts = [f"{name} {'-' if ms is None else f'{ms:.2f} ms'}" for name, ms in found.items()]
    return Found(f"forward and backward: {', '.join(texts)}", found)


def product(setup: Setup) -> Found:
    flops = matmul_flops(setup)
    peak = device_peak_flops(setup.device, torch.bfloat16)
    if peak is None:
        return Found(f"{flops / 1e12:.2f} TFLOP/s, unknown peak", {"FLOP/s": flops}, measured=True)
    text = f"{flops / 1e12:.0f} TFLOP/s, {flops / peak:.0%} of the published peak"
    if flops < LEAST_OF_PEAK * peak and not setup.tiny:
        raise WrongError(f"{text}: the device is shared, throttled or limited in power, so no rate below counts")
    return Found(text, {"FLOP/s": flops, "share of peak": flops / peak}, measured=setup.tiny)


def copy_on_device(setup: Setup) -> Found:
    source = torch.ones(2**20 if setup.tiny else 2**30, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    rate = 2 * source.numel() / setup.seconds(lambda: target.copy_(source))
    return Found(f"{rate / 1e9:,.0f} GB/s, read and written", {"bytes/s": rate}, measured=True)


def copy_to_host(setup: Setup) -> Found:
    if setup.device_type == "cpu":
        raise SkippedError("needs CUDA")
    source = torch.ones(2**20 if setup.tiny else 2**29, dtype=torch.uint8, device=setup.device)
    rates: dict[str, float] = {}
    for name, pinned in (("page-locked", True), ("pageable", False)):
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        seconds = setup.seconds(lambda target=target: target.copy_(source, non_blocking=True))  # type: ignore[misc]
        rates[name] = source.numel() / seconds
    text = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    return Found(text, rates, measured=True)


def launch(setup: Setup) -> Found:
    """Host time of a small operation: steps whose operations take less on the device wait for the host."""
    value = torch.zeros(8, device=setup.device)
    seconds = setup.seconds(lambda: [value.add_(1.0) for _ in range(100)]) / 100
    return Found(f"{1e6 * seconds:.1f} µs per small operation", {"seconds": seconds}, measured=True)
