"""MANIFEST.json: what a checkpoint is and what its files have to be. A folder without it is no checkpoint."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from titanlite.checkpoint.storage import HASH, METADATA_FILE, FileRecord, InvalidCheckpointError

MANIFEST_FILE = "MANIFEST.json"
FORMAT_VERSION = 1
"""Raised with any change that an earlier titanlite could not read."""


@dataclass(frozen=True)
class Branch:
    """A stretch of a run's history. id: a random name. step: after which it left the branch before it; 0: the start.

    launch: torchrun's name of the launch that began it, which all its restarts share; "" where it has none of its own.
    """

    id: str
    step: int
    launch: str = ""


@dataclass(frozen=True)
class Manifest:
    """step: optimizer steps done. content: "full", or "model": parameters only.

    lineage: the branches that led here, the newest last. counts: running totals of the meter, by name. facts: what a
    resumed run has to agree with, or is told about (see compatibility.py). config: the resolved configuration.
    versions: of what wrote it. files: all of the folder but this one.
    """

    step: int
    content: Literal["full", "model"]
    lineage: tuple[Branch, ...]
    counts: Mapping[str, Any]
    facts: Mapping[str, Any]
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    created: str
    files: Mapping[str, FileRecord]
    format: int = FORMAT_VERSION


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes MANIFEST.json, on the disk on return. Raises OSError."""
    text = json.dumps(asdict(manifest) | {"hash": {HASH: _NO_HASH}}, indent=1) + "\n"
    text = _replace_last(text, _NO_HASH, _digest(text))
    path = folder / MANIFEST_FILE
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # which names the file only where it could not be opened
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_manifest(folder: Path) -> Manifest:
    """Raises InvalidCheckpointError where there is none that is as it was written, OSError where it cannot be read."""
    try:
        raw = (folder / MANIFEST_FILE).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} is missing") from None
    try:
        text = raw.decode("utf-8")
        content = json.loads(text)
        digest = str(content.pop("hash")[HASH])
        hashed = _replace_last(text, digest, _NO_HASH)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InvalidCheckpointError(f"{MANIFEST_FILE} cannot be read: it is torn or damaged") from None
    if _digest(hashed) != digest:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} does not have the content that was written: its {HASH} differs")
    if content["format"] > FORMAT_VERSION:
        raise UnknownFormatError(content["format"])
    content["lineage"] = tuple(Branch(**branch) for branch in content["lineage"])
    content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
    if METADATA_FILE not in content["files"]:
        raise InvalidCheckpointError(f"{MANIFEST_FILE} does not list {METADATA_FILE}")
    return Manifest(**content)


class UnknownFormatError(Exception):
    """A newer titanlite wrote this checkpoint: it is not damaged, and must not be touched."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"its format is {version}, and this titanlite knows {FORMAT_VERSION} at most: use a newer titanlite"
        )


_NO_HASH = "0" * 32
"""Stands for the manifest's own hash while that is taken."""


def _replace_last(text: str, old: str, new: str) -> str:
    """The hash stands last: a setting may read like it. Raises ValueError where `old` is empty."""
    before, _, behind = text.rpartition(old)
    return before + new + behind


def _digest(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())
