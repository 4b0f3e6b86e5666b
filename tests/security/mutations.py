"""Mutations of files: the same bytes for the same seed."""

import gzip
import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

import torch

Mutate = Callable[[Random, bytes], bytes]
"""A changed copy of the content of a file."""

EXTREMES = (0, 1, -1, 2, 127, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63))
EDGE = 512
"""Bytes at both ends of a file, where formats have headers and footers: half of the mutations are there."""

_CHANGES = (1, 1, 1, 2, 3, 8)
"""Numbers of changes of one mutation, one of which is drawn."""


def mutate_bytes(rng: Random, content: bytes) -> bytes:
    """Change bits, numbers and ranges."""
    data = bytearray(content)
    for _ in range(rng.choice(_CHANGES)):
        rng.choice(_BYTE_CHANGES)(rng, data)
    return bytes(data)


def _place(rng: Random, data: bytearray) -> int:
    size = len(data)
    if not size or rng.random() < 0.5:
        return rng.randrange(size + 1)
    at = rng.randrange(min(size, EDGE))
    return at if rng.random() < 0.5 else size - 1 - at


def _range(rng: Random, data: bytearray) -> tuple[int, int]:
    begin = _place(rng, data)
    return begin, begin + rng.choice((1, 2, 4, 8, 16, 64, 1024))


def _flip(rng: Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at : at + 1] = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 1])


def _set(rng: Random, data: bytearray) -> None:
    at = _place(rng, data)
    data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, 10, 13, 34, 92, rng.randrange(256)))])


def _number(rng: Random, data: bytearray) -> None:
    width = rng.choice((1, 2, 4, 8))
    at = _place(rng, data) // width * width
    number = rng.choice((*EXTREMES, len(data), len(data) + 1))
    if rng.random() < 0.3:
        number = int.from_bytes(data[at : at + width], "little") + rng.choice((-1, 1, 8, 256))
    data[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")


def _delete(rng: Random, data: bytearray) -> None:
    begin, end = _range(rng, data)
    del data[begin:end]


def _insert(rng: Random, data: bytearray) -> None:
    begin, end = _range(rng, data)
    data[begin:begin] = rng.randbytes(end - begin)


def _duplicate(rng: Random, data: bytearray) -> None:
    begin, end = _range(rng, data)
    data[begin:begin] = data[begin:end] * rng.choice((1, 1, 2, 100))


def _swap(rng: Random, data: bytearray) -> None:
    (a, a_end), (b, _) = _range(rng, data), _range(rng, data)
    size = a_end - a
    data[a:a_end], data[b : b + size] = data[b : b + size], data[a:a_end]


def _clear(rng: Random, data: bytearray) -> None:
    begin, end = _range(rng, data)
    data[begin:end] = bytes([rng.choice((0, 0xFF))]) * len(data[begin:end])


def _truncate(rng: Random, data: bytearray) -> None:
    del data[_place(rng, data) :]


_BYTE_CHANGES = (_flip, _set, _number, _number, _delete, _insert, _duplicate, _swap, _clear, _truncate)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object, whose names may be repeated."""


class _Raw(str):
    """Text in place of a JSON value."""


_DEEP = 3000
_LONG = 20_000
"""Characters of a document in which nothing is repeated any more: some changes would make terabytes."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.5, 1e308, -1e308, 5e-324, *EXTREMES),
    *(2**63, 2**64, -(2**63) - 1, [], {}, [None], [[]], {"": None}, "", "x", "0", "\0", "\u202e", "é", "\x1b[2J"),
    *("../../x", "/dev/zero", ".", "..", "a\nb", "x" * 5000, "nan", "NaN", "Infinity", "2026-01-01", "float64", "U8"),
    *map(_Raw, ("NaN", "-Infinity", "1e999", "1" * 400, "1" * 5000, "-0", "-0.0", '"\\ud800"', "x", "")),
    *map(_Raw, ("[" * 70 + "]" * 70, "[" * _DEEP + "]" * _DEEP, '{"a":' * _DEEP + "1" + "}" * _DEEP)),
)


def mutate_json(rng: Random, content: bytes) -> bytes:
    """Change values, names and the structure of a JSON document; of one that is none, bytes."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, content)
    try:
        root = [json.loads(content, object_pairs_hook=_Pairs)]
    except (ValueError, RecursionError):
        return mutate_bytes(rng, content)
    for _ in range(rng.choice(_CHANGES)):
        _change_json(rng, root)
    return _dumped(root[0] if root else None).encode("utf-8", "surrogatepass")


def _containers(value: Any) -> list[Any]:
    """All lists and objects in a value, itself included."""
    found, left = [], [value]
    while left:
        each = left.pop()
        if isinstance(each, list):
            found.append(each)
            left += [inner for _, inner in each] if isinstance(each, _Pairs) else each
    return found


def _change_json(rng: Random, root: list[Any]) -> None:
    filled = [each for each in _containers(root) if each]
    if not filled:
        return
    container = rng.choice(filled)
    at = rng.randrange(len(container))
    named = isinstance(container, _Pairs)
    name, value = container[at] if named else ("", container[at])
    action = rng.randrange(12)
    if action == 0:
        del container[at]
    elif action == 1:
        times = rng.choice((1, 1, 3, 1000))
        container[at:at] = [container[at]] * (times if len(_dumped(root[0])) < _LONG else 1)
    elif action == 2 and named:
        container[at] = (rng.choice(("", "x", name + "s", name[:-1], "__class__", name.upper())), value)
    elif action == 3:
        rng.shuffle(container)
    elif action == 4 and named:
        container.append((name, deepcopy(rng.choice(_VALUES))))
    else:
        new = _new_value(rng, root, value)
        container[at] = (name, new) if named else new


def _new_value(rng: Random, root: list[Any], value: Any) -> Any:
    action = rng.randrange(6)
    if action == 0:  # one of another place: of a plausible kind
        other = rng.choice(_containers(root))
        picked = rng.choice(other) if other else None
        return deepcopy(picked[1] if isinstance(other, _Pairs) and picked else picked)
    if action == 1 and isinstance(value, int | float):
        return rng.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value * 1000,
                float(value) if abs(value) < 2**99 else 0.5,
                str(value),
            )
        )
    if action == 1 and isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        change = rng.choice(("", "x", "\0", "é", "\udc80", " ", "-", "9"))
        return value[:at] + change + value[at + rng.randrange(2) :]
    if action == 2:
        return [value]
    if action == 3 and isinstance(value, list) and not isinstance(value, _Pairs):
        return value[: rng.randrange(len(value) + 1)]
    return deepcopy(rng.choice(_VALUES))


def _dumped(value: Any) -> str:
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, _Pairs):
        return "{" + ", ".join(f"{json.dumps(name)}: {_dumped(each)}" for name, each in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dumped, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and not value.isprintable())


def mutate_json_lines(rng: Random, content: bytes) -> bytes:
    """Change a few lines, of a JSON value each, or their order."""
    lines = content.split(b"\n")
    for _ in range(rng.choice(_CHANGES)):
        at = rng.randrange(len(lines))
        action = rng.randrange(10)
        if action == 0:
            lines[at : at + 1] = [lines[at]] * rng.choice((0, 2, 300))
        elif action == 1:
            rng.shuffle(lines)
        elif action == 2:
            lines[at] = rng.choice((b"", b"\r", b"\xff\xfe", b"\xef\xbb\xbf", b"[]", b"null", b"{}", b"1", b"\0"))
        else:
            lines[at] = mutate_json(rng, lines[at]) if lines[at] else lines[at]
        lines = lines or [b""]
    return mutate_bytes(rng, content) if rng.random() < 0.15 else b"\n".join(lines)


_TOML_VALUES = (
    *('""', '"x"', "true", "false", "0", "-1", "1", "0.5", "nan", "inf", "-inf", "1e308", "9223372036854775807"),
    *("9223372036854775808", "[]", "{}", "[[]]", "[1, 'a']", "{a = 1}", "2026-01-01", "07:32:00", "'''x", "\\", ""),
    *("2026-01-01T00:00:00Z", '"../../x"', '"/dev/zero"', '"\\u202e"', '"s3://x/y"', '"float64"', '"\\u0000"'),
    *("1" * 5000, "[" * 200 + "]" * 200, "[" * _DEEP + "]" * _DEEP, "{a = " * 200 + "1" + "}" * 200, f'"{"x" * 5000}"'),
)
_ASSIGNMENT = re.compile(rb"(\s*[\w.\"-]+\s*=\s*)(.*)")


def mutate_toml(rng: Random, content: bytes) -> bytes:
    """Change values, names and lines of a TOML document."""
    if rng.random() < 0.15:
        return mutate_bytes(rng, content)
    lines = content.split(b"\n")
    for _ in range(rng.choice(_CHANGES)):
        at = rng.randrange(len(lines)) if lines else 0
        found = _ASSIGNMENT.fullmatch(lines[at]) if lines else None
        action = rng.randrange(8)
        if action == 0:
            lines[at : at + 1] = []
        elif action == 1:
            lines[at:at] = lines[at : at + 1]
        elif action == 2:
            rng.shuffle(lines)
        elif action == 3:
            lines[at : at + 1] = [mutate_bytes(rng, line) for line in lines[at : at + 1]]
        elif found:
            values = [each[2] for line in lines if (each := _ASSIGNMENT.fullmatch(line))]
            new = rng.choice(values) if rng.random() < 0.3 else rng.choice(_TOML_VALUES).encode()
            lines[at] = found[1] + new
    return b"\n".join(lines)


def mutate_safetensors(rng: Random, content: bytes) -> bytes:
    """Change the header, and give it its length, or any bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, content)
    (length,) = struct.unpack_from("<Q", content)
    header = mutate_json(rng, content[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def mutate_npy(rng: Random, content: bytes) -> bytes:
    """Change the header of a .npy file, which is a Python literal, as text; or any bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, content)
    head, data = content[:10], content[10:]
    length = int.from_bytes(head[8:10], "little")
    text = data[:length]
    shape = rng.choice(("()", "(1,)", "(-1,)", "(0,)", f"({2**62},)", f"({2**31}, {2**31})", "(1,1,1)", "(None,)", "x"))
    kind = rng.choice(("<i8", ">i8", "|O", "<f8", "|u1", "|b1", "<U9", "|V0", "[('a','<i8')]", "<m8[s]", "(" * 300))
    text = re.sub(rb"'shape': \([^)]*\)", f"'shape': {shape}".encode(), text) if rng.random() < 0.6 else text
    text = re.sub(rb"'descr': '[^']*'", f"'descr': '{kind}'".encode(), text) if rng.random() < 0.6 else text
    return head[:8] + (len(text) % 2**16).to_bytes(2, "little") + text + data[length:]


def mutate_npz(rng: Random, content: bytes) -> bytes:
    """Change members of a zip archive, which get their checksums; or any bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([*members])
    action = rng.randrange(8)
    if action == 0:
        del members[name]
    elif action == 1:
        members[name] = members[rng.choice([*members])]
    elif action == 2:
        members[rng.choice(("x.npy", "../x.npy", "x", "é"))] = members[name]
    elif action < 5 and (about := members.get("about.npy")):
        text = mutate_json(rng, about[128:])
        header = re.sub(rb"\(\d+,\)", f"({len(text)},)".encode(), about[:128])
        members["about.npy"] = header[:127].ljust(127) + b"\n" + text
    else:
        members[name] = mutate_npy(rng, members[name])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return out.getvalue()


def mutate_metadata(rng: Random, content: bytes) -> bytes:
    """Change values of DCP's metadata, a pickle of the test itself; or any bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, content)
    try:
        metadata = pickle.loads(content)
    except pickle.UnpicklingError:  # datatrove's files have the same end of their name
        return mutate_bytes(rng, content)
    slots: list[tuple[Any, Any, Any]] = []
    left = [metadata]
    while left:
        each = left.pop()
        attributes = {} if isinstance(each, torch.Size) else getattr(each, "__dict__", {})
        inner = [*each.items()] if isinstance(each, dict) else [*enumerate(each)] if isinstance(each, list) else []
        slots += [(each, key, value) for key, value in [*inner, *attributes.items()]]
        left += [value for _, value in inner] + [*attributes.values()]
    values = (*EXTREMES, None, "", "../x", "x", b"x", 0.5, True, [], [1], {}, torch.Size([2**40]), torch.Size([]))
    for _ in range(rng.choice(_CHANGES)):
        owner, key, value = rng.choice(slots)
        new = rng.choice((*values, torch.float64, torch.int64, rng.choice(slots)[2]))
        if isinstance(value, torch.Size) and rng.random() < 0.7:
            new = torch.Size(rng.choice((*value, 0, 1, 2**31, 2**62)) for _ in range(rng.choice((len(value), 0, 3))))
        if isinstance(owner, dict | list):
            owner[key] = new
        else:
            object.__setattr__(owner, key, new)
    with suppress(RuntimeError, AttributeError):  # of torch, which refuses to write some values
        return pickle.dumps(metadata)
    return mutate_bytes(rng, content)


def packed(mutate: Mutate, pack: Callable[[bytes], bytes], unpack: Callable[[bytes], bytes]) -> Mutate:
    """A mutation of compressed content: half of the time of what is in it."""

    def mutate_packed(rng: Random, content: bytes) -> bytes:
        return mutate_bytes(rng, content) if rng.random() < 0.5 else pack(mutate(rng, unpack(content)))

    return mutate_packed


def zstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(content, "zstd", asbytes=True)


def _unzstd(content: bytes) -> bytes:
    import pyarrow

    return pyarrow.input_stream(pyarrow.BufferReader(content), compression="zstd").read()


MUTATIONS: dict[str, Mutate] = {
    ".jsonl": mutate_json_lines,
    ".jsonl.gz": packed(mutate_json_lines, gzip.compress, gzip.decompress),
    ".jsonl.zst": packed(mutate_json_lines, zstd, _unzstd),
    ".csv.gz": packed(mutate_bytes, gzip.compress, gzip.decompress),
    ".json": mutate_json,
    ".lock": mutate_json,
    ".toml": mutate_toml,
    ".safetensors": mutate_safetensors,
    ".npy": mutate_npy,
    ".documents": mutate_npy,
    ".npz": mutate_npz,
    ".metadata": mutate_metadata,
}
"""End of a name -> the mutation of such a file. Of others, any bytes."""


def mutated(rng: Random, name: str, content: bytes) -> bytes:
    """A changed copy of the content of a file of this name."""
    fitting = [suffix for suffix in MUTATIONS if name.endswith(suffix)]
    mutate = MUTATIONS[max(fitting, key=len)] if fitting else mutate_bytes
    for _ in range(10):  # some change nothing
        found = mutate(rng, content)
        if found != content:
            break
    return found
