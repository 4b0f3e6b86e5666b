"""Write token files: shards that appear only when complete, and their manifest tokens.json."""

import io
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.tokens import HEADER_BYTES, MANIFEST, UNFINISHED, documents_file
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.runtime.cache import hash_of
from titanlite.runtime.durability import PARTIAL, appears_complete, publish, replace_file, sync_path


def write_unfinished(folder: Path, facts: Mapping[str, Any]) -> None:
    """Record the shards that are complete so far. facts: as in a manifest."""
    replace_file(folder / UNFINISHED, (json.dumps(facts, indent=1) + "\n").encode())


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Keep the tokenizer with the token files. Call before write_manifest: a complete folder has its tokenizer."""
    kept = folder / TOKENIZER_FOLDER
    tokenizer.save(kept)
    for file in kept.iterdir():
        sync_path(file)
    sync_path(kept)


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Mark the folder as complete."""
    write_unfinished(folder, facts)
    publish(folder / UNFINISHED, folder / MANIFEST)


class ShardWriter:
    """Writes one shard. The shard gets its final name in finish()."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self._path = folder / f"tokens-{number:05}.npy"
        self._dtype = dtype
        self._temporary = folder / f"{self._path.name}{PARTIAL}"
        self._file = self._temporary.open("wb")
        self._file.write(_npy_header(0, dtype))
        self._starts = array("q")
        self.tokens = 0

    def start_document(self, tokens_ahead: int) -> None:
        """Record that a document starts `tokens_ahead` tokens after those written so far."""
        self._starts.append(self.tokens + tokens_ahead)

    def write(self, ids: npt.NDArray[np.integer]) -> None:
        self._file.write(ids.data)
        self.tokens += len(ids)

    def finish(self) -> dict[str, Any]:
        """Publish the shard and its document starts; returns its entry in the manifest."""
        self._file.seek(0)
        self._file.write(_npy_header(self.tokens, self._dtype))
        self._file.close()
        starts = documents_file(self._path)
        with appears_complete(starts) as temporary, temporary.open("wb") as file:
            np.save(file, np.frombuffer(self._starts, np.int64).astype("<i8"))
        digest = hash_of(self._temporary)
        publish(self._temporary, self._path)
        return {
            "file": self._path.name,
            "bytes": self._path.stat().st_size,
            "tokens": self.tokens,
            "documents": len(self._starts),
            "xxh3_128": digest,
            "xxh3_128_of_documents": hash_of(starts),
        }

    def discard(self) -> None:
        """Delete the unfinished shard."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _npy_header(count: int, dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy file of `count` elements. Its size does not depend on `count`."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == HEADER_BYTES
    return header.getvalue()
