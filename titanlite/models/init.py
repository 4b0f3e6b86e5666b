"""Initial weights that are the same on every mesh.

A parameter is drawn in blocks of 2^20 elements of its flattened global tensor, with one CPU generator per block, so a
rank draws only the blocks that overlap its shard. Values are drawn in float64, rounded to float32, and cast to the
parameter's dtype. So the weights are the same for every dtype and on every CPU: in float32, normal_ differs between
vector instruction sets; in float64 it does not, and the rounding removes remaining differences between platforms.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from titanlite.models.family import LOG_UNIFORM_LEAST, Init
from titanlite.runtime.torch_internals import is_dtensor, shape_and_offset

INIT_VERSION = 1
"""Version of the scheme. Increment it with any change of the values, since that changes every run."""

BLOCK_NUMEL = 2**20
"""Elements per generator; the last block of a parameter is shorter."""

CUT_STD = 3.0
"""Bound at which normal values are clamped, in standard deviations."""

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def init_parameters_(module: nn.Module, seed: int, init: Callable[[str], Init]) -> None:
    """Initialize the parameters of `module` in place, without communication.

    Parameters may be plain tensors or DTensors of any placement, on any device. `init` takes a parameter's name in the
    full, unwrapped model; for a shared parameter, the first of its names. torch.get_num_threads() threads, at most 16,
    fill the parameters, each with up to 16 MiB of host memory; the values do not depend on the number of threads.
    """
    with ThreadPoolExecutor(min(torch.get_num_threads(), 16)) as pool:
        running = []
        for name, parameter in module.named_parameters():
            for prefix in _WRAPPER_PREFIXES:
                name = name.replace(prefix, "")
            local, shape, offset = local_region(parameter)
            running.append(pool.submit(fill_region_, local, seed, name, init(name), shape, offset))
    for filled in running:
        filled.result()  # raises the exception of the thread


def local_region(tensor: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """(local shard, global shape, offset of the shard in the global tensor).

    The shard shares the tensor's memory, without its autograd graph. It is a single box of the global tensor, also if
    two mesh axes shard the same dimension, as tensor parallelism and fully_shard do.
    """
    if not is_dtensor(tensor):
        return tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim()
    local = tensor.to_local().detach()
    shape, offset = shape_and_offset(tensor)
    assert tuple(shape) == tuple(local.shape), f"local part {tuple(local.shape)} is not the box {tuple(shape)}"
    return local, tuple(tensor.shape), tuple(offset)


def fill_region_(local: Tensor, seed: int, name: str, init: Init, shape: Sequence[int], offset: Sequence[int]) -> None:
    """Fill `local` in place: the box at `offset` of the parameter `name`, whose global shape is `shape`."""
    assert not local.is_meta, f"{name} has no memory yet"
    if init.kind in ("ones", "constant"):
        local.fill_(1.0 if init.kind == "ones" else init.value)
    elif local.numel():
        _copy_box(_Blocks(seed, name, init, prod(shape)), local, shape, offset, 0)


class _Blocks:
    """The flattened global tensor, drawn block by block; caches the last block."""

    def __init__(self, seed: int, name: str, init: Init, numel: int) -> None:
        self._seed, self._name, self._init, self._numel = seed, name, init, numel
        self._index = -1
        self._drawn = torch.empty(min(BLOCK_NUMEL, numel), dtype=torch.float64, device="cpu")
        self._rounded = torch.empty_like(self._drawn, dtype=torch.float32)

    def copy(self, out: Tensor, start: int) -> None:
        """Copy elements [start, start + out.numel()) into `out`, which is one-dimensional."""
        done = 0
        while done < out.numel():
            index, first = divmod(start + done, BLOCK_NUMEL)
            values = self._block(index)[first : first + out.numel() - done]
            out[done : done + values.numel()].copy_(values)
            done += values.numel()

    def _block(self, index: int) -> Tensor:
        numel = min(BLOCK_NUMEL, self._numel - index * BLOCK_NUMEL)
        drawn, rounded = self._drawn[:numel], self._rounded[:numel]
        if index != self._index:
            digest = hashlib.sha256(f"{self._seed}:{self._name}:{index}".encode()).digest()
            generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
            if self._init.kind.endswith("uniform"):
                drawn.uniform_(-1.0, 1.0, generator=generator)
            else:
                drawn.normal_(generator=generator)
            # NumPy runs on the calling thread only; torch would start a pool of threads for each thread here.
            values = drawn.numpy()
            if self._init.kind == "log_uniform":
                middle, half = (self._init.value + LOG_UNIFORM_LEAST) / 2, (self._init.value - LOG_UNIFORM_LEAST) / 2
                np.log(middle + half * values, out=values)
            else:
                np.clip(values, -CUT_STD, CUT_STD, out=values)
                np.multiply(values, self._init.value, out=values)
            np.copyto(rounded.numpy(), values, casting="same_kind")
            self._index = index
        return rounded


def _copy_box(blocks: _Blocks, out: Tensor, shape: Sequence[int], offset: Sequence[int], start: int) -> None:
    """Copy the box at `offset` of a tensor of `shape` that begins at element `start` of the flattened parameter."""
    inner = tuple(shape[1:])
    if tuple(out.shape[1:]) == inner and out.is_contiguous():
        blocks.copy(out.view(-1), start + (offset[0] * prod(inner) if shape else 0))
    elif out.dim() == 1:
        blocks.copy(out, start + offset[0])
    elif out.dim() == 2:
        # Copy many full rows at once, then slice them: row by row, copying would take twice as long as drawing.
        columns, at_once = inner[0], max(1, BLOCK_NUMEL // inner[0])
        for first, part in enumerate(out.split(at_once)):
            rows = torch.empty(part.shape[0] * columns, dtype=torch.float32, device="cpu")
            blocks.copy(rows, start + (offset[0] + first * at_once) * columns)
            part.copy_(rows.view(-1, columns)[:, offset[1] : offset[1] + part.shape[1]])
    else:
        for index, part in enumerate(out):
            _copy_box(blocks, part, inner, offset[1:], start + (offset[0] + index) * prod(inner))
