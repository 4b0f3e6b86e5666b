"""Files in the safetensors format: headers read strictly, tensors read box by box and written one by one.

Tensors are read by plain reads and not through a mapping of the file into memory: a rank reads the bytes of its own
part alone and holds a few MiB of them at a time, a file that is cut short meanwhile is an error, not a signal, and an
audit of what is opened sees all of it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titanlite.runtime.errors import UserError

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100_000_000
"""As in the format's own library."""

_BLOCK_BYTES = 2**23
_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. start: where its first byte is."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises UserError, with what is wrong and with which entry; OSError.

    The tensors have to fill the file: without overlap, without a gap, without anything behind the last one.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise UserError(f"its header of {length:,} bytes does not fit into its {size:,} bytes: it is torn")
        raw = opened.read(length)
    header = read_object(raw, "its header")
    header.pop("__metadata__", None)
    found = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != end:
            raise UserError(f"{name} begins at byte {tensor.start:,}, and what is before it ends at {end:,}")
        end += tensor.num_bytes
    if end != size:
        raise UserError(f"its tensors end at byte {end:,}, and it has {size:,}: it is torn, or of another header")
    return found


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no name stands twice. Raises UserError."""

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise UserError(f"{what} has {next(name for name in names if names.count(name) > 1)!r} twice")
        return found

    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=of_pairs)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{what} is not a JSON object")
    return found


def _stored(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    """What a header says of one tensor. data: where the file's tensors begin."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{name} is not described by dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise UserError(f"{name} is of dtype {kind!r}, and only {', '.join(_DTYPES)} can be read: not quantized models")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise UserError(f"{name} has shape {shape!r} at {offsets!r}, which have to be lists of whole numbers")
    tensor = StoredTensor(file, _DTYPES[kind], tuple(shape), data + offsets[0])
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise UserError(
            f"{name}, {kind} of shape {tensor.shape}, has {offsets[1] - offsets[0]:,} bytes and not "
            f"{tensor.num_bytes:,}"
        )
    return tensor


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def read_box_(out: Tensor, stored: StoredTensor, offset: Sequence[int]) -> None:
    """Fills `out`, in its own dtype and on its device, with the box at `offset` of a stored tensor; nothing else of the
    file is read. Raises UserError where the file has become shorter, OSError.
    """
    if out.numel() == 0:
        return
    width = stored.dtype.itemsize
    buffer = torch.empty(min(_BLOCK_BYTES // width, out.numel()), dtype=stored.dtype, device="cpu")
    raw = memoryview(buffer.view(torch.uint8).numpy().data)
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    filled = done = 0
    with stored.file.open("rb", buffering=0) as file:
        for first, count in _runs(stored.shape, out.shape, offset):
            while count:
                taken = min(count, buffer.numel() - filled)
                _read_into(file.fileno(), raw[filled * width : (filled + taken) * width], stored, first * width)
                filled, first, count = filled + taken, first + taken, count - taken
                if filled == min(buffer.numel(), out.numel() - done):
                    flat[done : done + filled].copy_(buffer[:filled])
                    filled, done = 0, done + filled
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _runs(whole: Sequence[int], box: Sequence[int], offset: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element, count) of the stretches of the flattened whole that make up the box, in its order."""
    cut = len(whole)
    while cut and box[cut - 1] == whole[cut - 1]:
        cut -= 1
    if cut == 0:
        yield 0, prod(whole)
        return
    strides = [prod(whole[dim + 1 :]) for dim in range(cut)]
    rows = (range(start, start + size) for start, size in zip(offset[: cut - 1], box[: cut - 1], strict=True))
    for index in product(*rows):
        before = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield before + offset[cut - 1] * strides[-1], box[cut - 1] * strides[-1]


def _read_into(descriptor: int, part: memoryview, stored: StoredTensor, position: int) -> None:
    position += stored.start
    while part:
        count = os.preadv(descriptor, [part], position)
        if count == 0:
            raise UserError(f"{stored.file} has become shorter while it was read")
        part, position = part[count:], position + count


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a new file, on the disk on return: the same bytes for the same tensors. On the host. Raises OSError."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # readers ask which framework's tensors these are
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that tensors are aligned in memory where a reader maps the file
    with file.open("xb") as opened:
        opened.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in tensors.values():
            opened.write(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        opened.flush()
        os.fsync(opened.fileno())
