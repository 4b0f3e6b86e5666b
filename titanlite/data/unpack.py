"""Gzip files, unpacked once into the cache folder, so that each of their lines can be read on its own."""

import gzip
import json
import logging
import os
import zlib
from pathlib import Path
from typing import IO, NamedTuple

from titanlite.data.cache import built_once, cache_folder, content_key, file_facts

FORMAT_VERSION = 1
CHUNK_BYTES = 2**16

GZIP_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile)
"""What reading gzip data raises where it ends early or is corrupt."""

logger = logging.getLogger("titanlite")


class Unpacked(NamedTuple):
    """A file of whole lines. lines: how many. damage: why there are no more of them; "" where nothing is missing."""

    file: Path
    lines: int
    damage: str


def is_gzip(name: str) -> bool:
    """Whether a file of this name holds gzip data."""
    return name.lower().endswith(".gz")


def open_lines(opened: IO[bytes], name: str) -> IO[bytes]:
    """What an open file of this name holds, unpacked where it is gzip data; reading it may raise GZIP_DAMAGE."""
    return gzip.open(opened, "rb") if is_gzip(name) else opened  # type: ignore[return-value]


def unpacked(path: Path) -> Unpacked:
    """The content of a gzip file, from the cache or unpacked now; other processes wait for the one that unpacks.

    Of data that ends early or is corrupt, the whole lines before the damage. Raises UserError where the cache folder
    cannot be written, and OSError where the file cannot be read.
    """
    folder = cache_folder() / "unpacked" / content_key(["unpacked", FORMAT_VERSION, file_facts([path])])
    built_once(folder, f"the unpacked {path}", lambda into: _unpack(path, into, folder))
    meta = json.loads((folder / "meta.json").read_text())
    return Unpacked(folder / "content", meta["lines"], meta["damage"])


def _unpack(path: Path, into: Path, folder: Path) -> None:
    with open(into / "content", "wb") as out:
        lines, damage = _copy_lines(path, out)
        size = out.tell()
    (into / "meta.json").write_text(json.dumps({"lines": lines, "damage": damage}))
    sizes = [f"{count / 2**20:,.1f} MiB" for count in (os.path.getsize(path), size)]
    logger.info("unpacked %s (%s) into %s (%s)%s", path, sizes[0], folder, sizes[1], damage and f": {damage}")


def _copy_lines(path: Path, out: IO[bytes]) -> tuple[int, str]:
    """Write what `path` holds, and only whole lines before a damage. Returns their number and the damage."""
    lines, whole_bytes = 0, 0
    with gzip.open(path, "rb") as packed:
        try:
            while chunk := packed.read1(CHUNK_BYTES):
                lines += chunk.count(b"\n")
                if b"\n" in chunk:
                    whole_bytes = out.tell() + chunk.rindex(b"\n") + 1
                out.write(chunk)
        except GZIP_DAMAGE as error:
            out.truncate(whole_bytes)
            out.seek(whole_bytes)
            return lines, damage_after(lines, error)
    return lines, ""


def damage_after(lines: int, error: BaseException) -> str:
    """What to say about gzip data of which only so many lines can be read."""
    fault = "ends early" if isinstance(error, EOFError) else f"is corrupt ({' '.join(str(error).split())})"
    return f"the gzip data {fault} after line {lines}"
