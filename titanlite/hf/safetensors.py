"""Check headers of safetensors files, read boxes of their tensors, write files.

The safetensors library writes the files, but does not read them: it maps a file into memory, and truncation of a mapped
file kills the process with SIGBUS. Plain reads load only the rank's shard, 8 MiB at a time, and raise an exception if
the file is truncated.
"""

import os
import reprlib
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from titanlite.runtime.durability import sync_path
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular, read_at
from titanlite.runtime.json_files import JsonError, parse_json

SUFFIX = ".safetensors"
MAX_TENSORS = 100_000
MAX_NAME_LENGTH = 1_024
MAX_DIMS = 8
MAX_HEADER_BYTES = 25_000_000
"""250 bytes for each of MAX_TENSORS. Most entries take less than 150."""
MAX_COMMAS = 12 * MAX_TENSORS
"""An entry has at most 11: between entries, fields, sizes of MAX_DIMS dimensions, and offsets."""

_WRITE_AGAIN = "download the file again, or write it with the safetensors library"
_BLOCK_BYTES = 2**23
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors, of dtype U8, that store one in MXFP4."""
BLOCK_SCALES = "_scale_inv"
"""End of the name of the scales of a matrix in float8, behind its own name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. start: offset of its first byte."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


FP8_BLOCK = 128
"""Rows, and columns, of a float8 matrix with the same scale."""


@dataclass(frozen=True)
class StoredFp8:
    """A matrix in float8 (e4m3) with a factor for each block of FP8_BLOCK rows and columns (DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2024, section 3.3.2). Its values are the products in float32."""

    values: StoredTensor
    scales: StoredTensor
    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def read_(self, out: Tensor, offset: Sequence[int]) -> None:
        """See read_box_."""
        box = torch.empty(out.shape)
        read_box_(box, self.values, offset)
        places = [torch.arange(first, first + size) for first, size in zip(offset, out.shape, strict=True)]
        blocks = [place // FP8_BLOCK for place in places]
        first = [int(block[0]) for block in blocks]
        factors = torch.empty([int(block[-1]) - begin + 1 for block, begin in zip(blocks, first, strict=True)])
        read_box_(factors, self.scales, first)
        rows, columns = (block - begin for block, begin in zip(blocks, first, strict=True))
        out.copy_(box.mul_(factors[rows][:, columns]))


@dataclass(frozen=True)
class StoredStack:
    """Tensors of equal shape in files that are one tensor, stacked along its first dimension."""

    tensors: tuple[StoredTensor | StoredFp8, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that has all values."""
        return reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.tensors), *self.tensors[0].shape)


GROUP = 32
"""Values of MXFP4 with the same scale: two in each byte, the first one in its lower half."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of 1 bit of mantissa and 2 bits of exponent; the highest of the 4 bits is the sign."""


@dataclass(frozen=True)
class StoredMxfp4:
    """A stack of matrices in MXFP4 (Open Compute Project, "OCP Microscaling Formats (MX) Specification", 2023).

    blocks: (experts, out, in / 32, 16) bytes; scales: (experts, out, in / 32) exponents of 2, plus 127.
    """

    blocks: StoredTensor
    scales: StoredTensor
    dtype: ClassVar[torch.dtype] = torch.bfloat16
    """It has all values."""

    def rows(self, expert: int, rows: range, columns: range) -> Tensor:
        """Some (out, in) of an expert, in float32. Raises UserError for a scale that means NaN."""
        groups = range(columns.start // GROUP, -(-columns.stop // GROUP))
        parts = []
        for stored, last in ((self.blocks, (GROUP // 2,)), (self.scales, ())):
            box = torch.empty(1, rows.stop - rows.start, len(groups), *last, dtype=torch.uint8)
            read_box_(box, stored, (expert, rows.start, groups.start, *(0 for _ in last)))
            parts.append(box[0, :: rows.step].to(torch.int64))
        blocks, scales = parts
        if (scales == 255).any():
            raise UserError(f"{self.scales.file}: a scale of MXFP4 is 255, which means NaN; {_WRITE_AGAIN}")
        codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)
        values = torch.tensor((*_FP4, *(-value for value in _FP4)))[codes]
        first = columns.start - GROUP * groups.start
        return torch.ldexp(values, scales.unsqueeze(-1) - 127).flatten(1)[:, first : first + len(columns)]


@dataclass(frozen=True)
class StoredRows:
    """A parameter of experts, (experts, out, in) or (experts, out): the rows start, start + step, … of a tensor that is
    stored as (experts, in, rows) or (experts, rows), or in MXFP4. See StoredPart in models/family.py."""

    tensor: StoredTensor | StoredMxfp4
    start: int
    step: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.tensor, StoredMxfp4):
            n_experts, rows, groups, _ = self.tensor.blocks.shape
            return n_experts, rows // self.step, groups * GROUP
        n_experts, *others, rows = self.tensor.shape
        return (n_experts, rows // self.step, *others)

    def read_(self, out: Tensor, offset: Sequence[int]) -> None:
        """See read_box_."""
        first = self.start + self.step * offset[1]
        rows = range(first, first + self.step * (out.shape[1] - 1) + 1, self.step)
        for expert, part in enumerate(out, offset[0]):
            if isinstance(self.tensor, StoredMxfp4):
                part.copy_(self.tensor.rows(expert, rows, range(offset[2], offset[2] + out.shape[2])))
                continue
            box = torch.empty(1, *out.shape[2:], rows.stop - rows.start, dtype=self.dtype)
            read_box_(box, self.tensor, (expert, *offset[2:], rows.start))
            part.copy_(box[0, ..., :: self.step].t())


@dataclass(frozen=True)
class StoredSlices:
    """Some rows of each of `groups` equal parts of a tensor: see StoredGroups in models/family.py."""

    tensor: StoredTensor
    groups: int
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups * (self.stop - self.start), *self.tensor.shape[1:])

    def read_(self, out: Tensor, offset: Sequence[int]) -> None:
        """See read_box_."""
        size, rows = self.stop - self.start, self.tensor.shape[0] // self.groups
        row, end = offset[0], offset[0] + len(out)
        while row < end:
            group, inside = divmod(row, size)
            count = min(size - inside, end - row)
            part = out[row - offset[0] : row - offset[0] + count]
            read_box_(part, self.tensor, (group * rows + self.start + inside, *offset[1:]))
            row += count


Stored = StoredTensor | StoredFp8 | StoredStack | StoredRows | StoredSlices


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Check a file's header and return its tensors by name. Reads no tensor.

    Stricter than the library: names are unique, dtypes are floating-point (except in MXFP4), and the tensors fill the
    file without gap or overlap. Raises UserError, which names the entry and the rule; OSError.
    """
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise UserError(
                f"its header of {length:,} bytes exceeds the file of {size:,} bytes: the file is truncated; "
                f"{_WRITE_AGAIN}"
            )
        if length > MAX_HEADER_BYTES:
            raise UserError(
                f"its header has {length:,} bytes, more than {MAX_HEADER_BYTES:,}: the file is damaged, or not in the "
                f"safetensors format; {_WRITE_AGAIN}"
            )
        raw = opened.read(length)
    # Before parsing, which takes seconds for millions of values. Braces are those of the header, of __metadata__, and
    # of each tensor; names could have more.
    if raw.count(b"{") - 2 > MAX_TENSORS or raw.count(b",") > MAX_COMMAS:
        raise UserError(f"its header has more entries than {MAX_TENSORS:,} tensors need")
    header = read_object(raw, "its header")
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise UserError(f"it has {len(header):,} tensors, more than {MAX_TENSORS:,}; write them into several files")
    found = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if tensor.start != end:
            raise UserError(
                f"tensor {name} begins at byte {tensor.start:,}, but the tensor before it ends at {end:,}; "
                f"{_WRITE_AGAIN}"
            )
        end += tensor.num_bytes
    if end != size:
        raise UserError(
            f"its tensors end at byte {end:,}, not at {size:,}: the file is truncated, or its header is wrong; "
            f"{_WRITE_AGAIN}"
        )
    return found


def read_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; raise UserError if it is invalid or has a duplicate name."""
    try:
        found: dict[str, Any] = parse_json(raw)
    except JsonError as error:
        raise UserError(f"{what} {error}") from None
    return found


def _stored(file: Path, name: str, entry: Any, data: int) -> StoredTensor:
    """Check a header's entry for one tensor. data: the byte where the file's tensors begin."""
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"the tensor name {name[:40]!r}… has {len(name):,} characters, more than {MAX_NAME_LENGTH:,}; "
            f"{_WRITE_AGAIN}"
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"the entry of {name} must have exactly dtype, shape and data_offsets; {_WRITE_AGAIN}")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtypes = _DTYPES | _FLOAT8 | ({"U8": torch.uint8} if name.endswith((BLOCKS, SCALES)) else {})
    if not isinstance(kind, str) or kind not in dtypes:
        raise UserError(
            f"tensor {name} has dtype {reprlib.repr(kind)}; convert the model to one of {', '.join(_DTYPES)} "
            "(quantized models are not supported)"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        shown = f"shape {reprlib.repr(shape)} and data_offsets {reprlib.repr(offsets)}"
        raise UserError(
            f"tensor {name} has {shown}, but these must be lists of integers from 0, and data_offsets two of them; "
            f"{_WRITE_AGAIN}"
        )
    if len(shape) > MAX_DIMS:
        raise UserError(f"tensor {name} has {len(shape):,} dimensions, more than {MAX_DIMS}; {_WRITE_AGAIN}")
    tensor = StoredTensor(file, dtypes[kind], tuple(shape), data + offsets[0])
    if offsets[1] - offsets[0] != tensor.num_bytes:
        raise UserError(
            f"tensor {name}, {kind} of shape {tensor.shape}, has {offsets[1] - offsets[0]:,} bytes instead of "
            f"{tensor.num_bytes:,}; {_WRITE_AGAIN}"
        )
    return tensor


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def read_box_(out: Tensor, stored: Stored, offset: Sequence[int]) -> None:
    """Fill `out`, with its dtype and on its device, with the box at `offset` of a stored tensor.

    Reads no other bytes of the file. Raises UserError if the file cannot be read, or was truncated meanwhile.
    """
    if out.numel() == 0:
        return
    if isinstance(stored, StoredStack):
        for part, tensor in zip(out, stored.tensors[offset[0] : offset[0] + len(out)], strict=True):
            read_box_(part, tensor, offset[1:])
        return
    if isinstance(stored, StoredRows | StoredFp8 | StoredSlices):
        stored.read_(out, offset)
        return
    width = stored.dtype.itemsize
    buffer = torch.empty(min(_BLOCK_BYTES // width, out.numel()), dtype=stored.dtype, device="cpu")
    raw = memoryview(buffer.view(torch.uint8).numpy().data)
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    filled = done = 0
    try:
        with open_regular(stored.file) as file:
            for first, count in _runs(stored.shape, out.shape, offset):
                while count:
                    taken = min(count, buffer.numel() - filled)
                    part = raw[filled * width : (filled + taken) * width]
                    if read_at(file.fileno(), part, stored.start + first * width) < len(part):
                        raise UserError(f"{stored.file} was truncated while it was read")
                    filled, first, count = filled + taken, first + taken, count - taken
                    if filled == min(buffer.numel(), out.numel() - done):
                        flat[done : done + filled].copy_(buffer[:filled])
                        filled, done = 0, done + filled
    except OSError as error:
        raise UserError(f"{stored.file} cannot be read: {error.strerror or error}") from None
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def _runs(shape: Sequence[int], box: Sequence[int], offset: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first element, count) of the contiguous runs of the flattened tensor that form the box, in its order."""
    cut = len(shape)
    while cut and box[cut - 1] == shape[cut - 1]:
        cut -= 1
    if cut == 0:
        yield 0, prod(shape)
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(cut)]
    rows = (range(start, start + size) for start, size in zip(offset[: cut - 1], box[: cut - 1], strict=True))
    for index in product(*rows):
        before = sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield before + offset[cut - 1] * strides[-1], box[cut - 1] * strides[-1]


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors to a new file and sync it to the disk. The same tensors give the same bytes.

    The library writes a temporary file that only its owner may read, and renames it over an existing file. To refuse an
    existing file, and to know the default permissions, create an empty file exclusively first. Raises OSError.
    """
    with file.open("xb") as opened:
        permissions = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
    try:
        save_file(dict(tensors), file, {"format": "pt"})  # readers look for the framework of the tensors
    except SafetensorError as error:
        file.unlink()
        raise OSError(str(error)) from None
    file.chmod(permissions)
    sync_path(file)
