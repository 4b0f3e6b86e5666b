"""A folder of token files: shards, where documents start in them, and tokens.json, which says what they are.

tokens-00000.npy, … are 1-D arrays of ids; a shard begins and ends with a document. tokens-00000.documents is a .npy of
int64: the positions in the shard at which its documents start. tokens.json comes last: without it the folder is not
complete, and tokens.incomplete.json says how far it is.
"""

import io
import json
import os
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from titanlite.data.sources import SourceConfig
from titanlite.runtime.errors import Problem, UserError

FORMAT_VERSION = 1
MANIFEST = "tokens.json"
UNFINISHED = "tokens.incomplete.json"
PARTIAL = ".incomplete"
"""Suffix of files that are being written; what a killed process leaves of them is written anew."""

HEADER_BYTES = 128
COPY_BYTES = 2**22


def documents_file(file: Path) -> Path:
    """Where it stands at which tokens of a token file documents start: a .npy of int64, ascending."""
    return file.with_suffix(".documents")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The tokens.json of a folder, None where there is none. Raises UserError where it cannot be read."""
    return _read_json(folder / MANIFEST)


def read_unfinished(folder: Path) -> dict[str, Any] | None:
    """What an interrupted tokenization has left in the folder, in the form of a manifest; None where nothing."""
    return _read_json(folder / UNFINISHED)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT_VERSION:
        raise UserError(f"{file} is not of the format {FORMAT_VERSION} that this version of titanlite knows")
    shards = found.get("shards")
    shards_are_whole = isinstance(shards, list) and all(
        isinstance(shard, dict) and {"file", "bytes", "documents"} <= shard.keys() for shard in shards
    )
    if not shards_are_whole or not isinstance(found.get("tokenizer"), dict):
        raise UserError(f"{file} does not list its shards and its tokenizer: make the files again")
    return found


def write_unfinished(folder: Path, facts: Mapping[str, Any]) -> None:
    """Keep what is complete so far. facts: as in a manifest."""
    temporary = folder / f"{UNFINISHED}{PARTIAL}"
    temporary.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    _publish(temporary, folder / UNFINISHED)


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Declare the folder complete."""
    write_unfinished(folder, facts)
    _publish(folder / UNFINISHED, folder / MANIFEST)


def _publish(temporary: Path, path: Path) -> None:
    """Rename a written file, so that it is there as a whole or not at all, also after a power cut."""
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class ShardWriter:
    """Writes one shard; nothing of it is there under its name before finish()."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self._path = folder / f"tokens-{number:05}.npy"
        self._dtype = dtype
        self._temporary = folder / f"{self._path.name}{PARTIAL}"
        self._file = self._temporary.open("wb")
        self._file.write(_npy_header(0, dtype))
        self._starts = array("q")
        self.tokens = 0

    def start_document(self, tokens_ahead: int) -> None:
        """A document starts so many tokens behind those written so far."""
        self._starts.append(self.tokens + tokens_ahead)

    def write(self, ids: npt.NDArray[np.integer]) -> None:
        self._file.write(ids.data)
        self.tokens += len(ids)

    def finish(self) -> dict[str, Any]:
        """Put the shard and its document starts in place; what a manifest says about them."""
        self._file.seek(0)
        self._file.write(_npy_header(self.tokens, self._dtype))
        self._file.close()
        starts = documents_file(self._path)
        temporary = starts.with_name(f"{starts.name}{PARTIAL}")
        with open(temporary, "wb") as file:
            np.save(file, np.frombuffer(self._starts, np.int64).astype("<i8"))
        _publish(temporary, starts)
        digest = file_digest(self._temporary)
        _publish(self._temporary, self._path)
        return {
            "file": self._path.name,
            "bytes": self._path.stat().st_size,
            "tokens": self.tokens,
            "documents": len(self._starts),
            "xxh3_128": digest,
            "xxh3_128_of_documents": file_digest(starts),
        }

    def discard(self) -> None:
        """Remove what was written since the last finish()."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _npy_header(count: int, dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy file of `count` elements; of the same size for every count."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == HEADER_BYTES
    return header.getvalue()


def file_digest(path: Path) -> str:
    """xxh3-128 of a whole file, 32 hex digits, as `xxhsum -H2` prints it."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def manifests_of(files: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """The manifests of the folders in which these files lie, by folder. Raises UserError where one cannot be read."""
    found = {folder: read_manifest(folder) for folder in dict.fromkeys(file.parent for file in files)}
    return {folder: manifest for folder, manifest in found.items() if manifest is not None}


def check_manifests(source: SourceConfig, key: str, files: Sequence[Path], vocab_size: int) -> list[Problem]:
    """Problems of folders that say what they hold: not finished, not as they say, for a larger vocabulary.

    files: those of the source. Folders without a tokens.json, made by something else, have no such problems.
    """
    by_folder: dict[Path, list[Path]] = defaultdict(list)
    for file in files:
        by_folder[file.parent].append(file)
    try:
        for folder, inside in by_folder.items():
            _check_folder(folder, inside, whole=os.path.isdir(os.path.expanduser(source.path)), vocab_size=vocab_size)
    except _MismatchError as mismatch:
        rule, remedy = mismatch.args
        return [Problem(f"{key}.path", source.path, rule, remedy)]
    except UserError as error:
        return [Problem(f"{key}.path", source.path, f"a {MANIFEST} that can be read", str(error))]
    return []


class _MismatchError(Exception):
    """args: the rule that does not hold, and the remedy."""


def _check_folder(folder: Path, files: Sequence[Path], *, whole: bool, vocab_size: int) -> None:
    """whole: all shards have to be among `files`; else those that were named. Raises _MismatchError, UserError."""
    manifest = read_manifest(folder)
    if manifest is None:
        if (folder / UNFINISHED).exists():
            remedy = f"{folder / UNFINISHED} says that it was interrupted: run the same command again to its end"
            raise _MismatchError("token files whose tokenization has finished", remedy)
        return
    rule = f"the files that {folder / MANIFEST} lists"
    sizes: dict[str, int] = {shard["file"]: shard["bytes"] for shard in manifest["shards"]}
    documents: dict[str, int] = {shard["file"]: shard["documents"] for shard in manifest["shards"]}
    for file in files:
        if file.name not in sizes:
            raise _MismatchError(rule, f"{file} is not one of them: move it to a folder of its own")
        _check_size(rule, file, sizes[file.name])
        if (starts := documents_file(file)).exists():  # only data.document_mask needs it
            _check_size(rule, starts, HEADER_BYTES + np.dtype(np.int64).itemsize * documents[file.name])
    missing = sorted(sizes.keys() - {file.name for file in files})
    if whole and missing:
        raise _MismatchError(rule, f"{folder / missing[0]} is missing: copy it there, or make the files again")
    needed = manifest["tokenizer"]["vocab_size"]
    if needed > vocab_size:
        rule = f"tokens of a tokenizer of at most model.vocab_size = {vocab_size} tokens"
        raise _MismatchError(rule, f"{folder / MANIFEST} says {needed}: write vocab_size = {needed} in [model]")


def _check_size(rule: str, file: Path, listed: int) -> None:
    """Raises _MismatchError where the file has not as many bytes as are listed."""
    size = file.stat().st_size
    if size != listed:
        raise _MismatchError(rule, f"{file} has {size:,} bytes instead of {listed:,}: copy or make it again")
