"""Initial weights that are the same on every mesh.

A parameter is drawn in blocks of 2^20 elements of its flattened global tensor, with one CPU generator per block, so a
rank draws only the blocks that overlap its shard. If these have more than twice the shard's numbers, ranks draw blocks
together and exchange parts (shared_draws.py). Values are drawn in float64, rounded to float32, and cast to the
parameter's dtype. So the weights are the same for every dtype and on every CPU: in float32, normal_ differs between
vector instruction sets; in float64 it does not, and the rounding removes remaining differences between platforms.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from titanlite.models.parts import LOG_UNIFORM_LEAST, Init
from titanlite.models.shared_draws import Plan, Round, axes_to_share, gathered_axes
from titanlite.runtime.torch_internals import is_dtensor, shape_and_offset

INIT_VERSION = 1
"""Version of the scheme. Increment it with any change of the values, since that changes every run."""

BLOCK_NUMEL = 2**20
"""Elements per generator; the last block of a parameter is shorter."""

CUT_STD = 3.0
"""Bound at which normal values are clamped, in standard deviations."""

_WRAPPER_PREFIXES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def init_parameters_(module: nn.Module, seed: int, init: Callable[[str], Init]) -> None:
    """Initialize the parameters of `module` in place. A collective of the ranks that have shards of it.

    Parameters may be plain tensors or DTensors of any placement, on any device. `init` takes a parameter's name in the
    full, unwrapped model; for a shared parameter, the first of its names. torch.get_num_threads() threads, at most 16,
    draw blocks, each with up to 16 MiB of host memory; the values do not depend on the number of threads. Ranks
    communicate only about parameters of which each would draw far too much, and only the calling thread does. Two
    rounds of them take up to 50 MiB on the host and on the device.
    """
    alone: list[_Parameter] = []
    together: list[tuple[_Parameter, Plan]] = []
    plans: dict[object, Plan] = {}
    for name, parameter in module.named_parameters():
        for prefix in _WRAPPER_PREFIXES:
            name = name.replace(prefix, "")
        each = _Parameter(name, init(name), *local_region(parameter))
        assert not each.local.is_meta, f"{name} has no memory yet"
        axes = axes_to_share(parameter, BLOCK_NUMEL) if each.init.is_random else ()
        if not axes:
            alone.append(each)
            continue
        assert is_dtensor(parameter)
        layout = parameter.device_mesh, parameter.placements, each.shape
        if layout not in plans:
            own = np.array([(begin, begin + size) for begin, size in zip(each.offset, each.local.shape, strict=True)])
            plans[layout] = Plan(each.shape, own, gathered_axes(parameter, axes, own, each.local.device), BLOCK_NUMEL)
        together.append((each, plans[layout]))
    with ThreadPoolExecutor(min(torch.get_num_threads(), 16)) as pool:
        _draw_together_(together, seed, pool)
        running = [
            pool.submit(fill_region_, each.local, seed, each.name, each.init, each.shape, each.offset) for each in alone
        ]
    for filled in running:
        filled.result()  # raises the exception of the thread


class _Parameter(NamedTuple):
    """A parameter, and this rank's shard of it: see local_region."""

    name: str
    init: Init
    local: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]


def _draw_together_(parameters: Iterable[tuple[_Parameter, Plan]], seed: int, pool: ThreadPoolExecutor) -> None:
    """Draw parameters with the ranks of their plans. While a round is exchanged, the pool draws the next one."""

    def drawing(parameter: _Parameter, part: Round) -> tuple[Tensor, list[Future[None]]]:
        numel = prod(parameter.shape)
        edges = [0]
        for index in part.blocks:
            edges.append(edges[-1] + min(BLOCK_NUMEL, numel - index * BLOCK_NUMEL))
        drawn = torch.empty(edges[-1], dtype=torch.float32, device="cpu")
        return drawn, [
            pool.submit(draw_block_, drawn[first:end], seed, parameter.name, parameter.init, index)
            for index, (first, end) in zip(part.blocks, pairwise(edges), strict=True)
        ]

    rounds = [(parameter, plan, part) for parameter, plan in parameters for part in plan.rounds]
    following = [(parameter, part) for parameter, _, part in rounds[1:]]
    running = drawing(rounds[0][0], rounds[0][2]) if rounds else None
    for number, (parameter, plan, part) in enumerate(rounds):
        assert running is not None
        drawn, blocks = running
        running = drawing(*following[number]) if number < len(following) else None
        for block in blocks:
            block.result()
        plan.exchange_(parameter.local, drawn, part)


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
    if not init.is_random:
        local.fill_(1.0 if init.kind == "ones" else init.value)
    elif local.numel():
        _copy_box(_Blocks(seed, name, init, prod(shape)), local, shape, offset, 0)


def draw_block_(out: Tensor, seed: int, name: str, init: Init, index: int, drawn: Tensor | None = None) -> None:
    """Draw block `index` of the parameter `name` into `out`, in float32 on the CPU. drawn: memory for the values in
    float64."""
    drawn = torch.empty_like(out, dtype=torch.float64) if drawn is None else drawn
    digest = hashlib.sha256(f"{seed}:{name}:{index}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little"))
    if init.kind.endswith("uniform"):
        drawn.uniform_(-1.0, 1.0, generator=generator)
    else:
        drawn.normal_(generator=generator)
    # NumPy runs on the calling thread only; torch would start a pool of threads for each thread here.
    values = drawn.numpy()
    if init.kind == "log_uniform":
        middle, half = (init.value + LOG_UNIFORM_LEAST) / 2, (init.value - LOG_UNIFORM_LEAST) / 2
        np.log(middle + half * values, out=values)
    else:
        np.clip(values, -CUT_STD, CUT_STD, out=values)
        np.multiply(values, init.value, out=values)
    np.copyto(out.numpy(), values, casting="same_kind")


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
        rounded = self._rounded[:numel]
        if index != self._index:
            draw_block_(rounded, self._seed, self._name, self._init, index, self._drawn[:numel])
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
