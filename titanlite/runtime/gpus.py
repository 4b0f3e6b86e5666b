"""The number of GPUs, for the launcher. Imports torch only if the system appears to have one."""

import os
import sys
import warnings
from pathlib import Path

from titanlite.runtime.errors import UserError


def usable_gpus(device: str = "", root: Path = Path("/")) -> int:
    """The number of GPUs that torch can use. Raises UserError if it should find one but cannot.

    It should if `device` is "cuda", or if `device` is "" and an NVIDIA device exists that CUDA_VISIBLE_DEVICES does not
    hide. root: the folder with dev/ and proc/.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    nvidia = any(root.glob("dev/nvidia[0-9]*")) or any(root.glob("proc/driver/nvidia/gpus/*"))
    wanted = device == "cuda" or (nvidia and not hidden)
    if device == "cpu" or not (wanted or any(root.glob("dev/dxg"))):
        return 0
    set_allocator()
    import torch  # slow to import: only if there may be a GPU

    with warnings.catch_warnings(action="ignore"):  # the error covers torch's warnings
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted and count == 0:
        raise UserError(why_no_gpu("this machine has an NVIDIA GPU" if nvidia else "DEVICE=cuda was given", hidden))
    return count


def set_allocator() -> None:
    """Let torch's allocator extend its segments, for less fragmentation, unless a variable configures it.

    torch reads the variable once, and prefers this name to the older ones.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ[names[0]] = "expandable_segments:True"


def why_no_gpu(reason: str, hidden: bool) -> str:
    """The reason why torch cannot use a GPU, and the remedy, in one line."""
    import torch

    build = f"torch {torch.__version__}"
    select = "https://pytorch.org/get-started/locally"
    if hidden:
        return f"{reason}, but CUDA_VISIBLE_DEVICES hides all GPUs: unset it, or set DEVICE=cpu to train on the CPU"
    if torch.version.cuda is None:
        return (
            f"{reason}, but {build} is a build without CUDA: install one with CUDA ({select}) with "
            f"'{sys.executable}' -m pip install --force-reinstall, or set DEVICE=cpu to train on the CPU"
        )
    try:
        torch.cuda.init()
        error = "it finds no device"
    except (RuntimeError, AssertionError) as failure:
        error = str(failure).strip().split("\n")[0]
    return (
        f"{reason}, but {build}, built for CUDA {torch.version.cuda}, cannot use it: {error} "
        f"Update the driver, or install a torch built for an older CUDA ({select}), or give the container access "
        f"to the GPU (docker run --gpus all), or set DEVICE=cpu to train on the CPU"
    )
