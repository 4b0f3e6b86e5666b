"""One part of a tokenization: its token file, the starts of its documents and its entry in the manifest.

A part depends only on the plan. It may be written again, also by two processes at once: the bytes are the same.
"""

import io
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titanlite.data.corpus import TextCorpus
from titanlite.data.kinds import text_sources
from titanlite.data.sources.base import TextSource, sampled_digest
from titanlite.data.sources.formats import documents_file
from titanlite.data.sources.pieces import ENDS_DOCUMENT
from titanlite.data.sources.stored import Listing, SourceFile
from titanlite.data.sources.tokens import HEADER_BYTES, Shard
from titanlite.runtime.cache import hash_of
from titanlite.runtime.errors import UserError
from titanlite.runtime.json_files import parse_json
from titanlite.storage.address import is_address
from titanlite.tools.encoding import TextEncoder, id_type
from titanlite.tools.tokenize.folder import errors_of_writing, scratch_cache
from titanlite.tools.tokenize.plan import ENTRY, Job, PlannedFile
from titanlite.tools.usable_rows import UsableRows

CHUNK_BYTES = 2**20
"""Approximate size of the text that is tokenized at a time."""


def tokenize_part(job: Job, part: int) -> Shard:
    """Write a part unless it is written; return its entry. A part without tokens has nothing else. Raises UserError."""
    entry_name = job.name(part, ENTRY)
    try:
        entry: Shard = parse_json(job.out.read(entry_name), Shard)
    except FileNotFoundError:
        with errors_of_writing(job.out):
            with scratch_cache():
                entry = _write(job, part)
            job.out.write(entry_name, (json.dumps(entry) + "\n").encode())
    return entry


def _write(job: Job, part: int) -> Shard:
    encoder = TextEncoder(job.section, job.tokenizer, [_source_of(job, part)])
    rows = UsableRows(job.section)
    name = job.name(part, ".npy")
    tokens, documents = job.out.temporary(name), job.out.temporary(documents_file(Path(name)).name)
    try:
        with TokenWriter(tokens, id_type(job.tokenizer.vocab_size)) as writer:
            _write_documents(encoder, rows, writer)
        with TokenWriter(documents, np.dtype("<i8")) as starts:
            starts.write(np.frombuffer(writer.starts, np.int64))
        entry: Shard = {
            "file": name,
            "bytes": tokens.stat().st_size,
            "tokens": writer.tokens,
            "documents": len(writer.starts),
            "xxh3_128": hash_of(tokens),
            "xxh3_128_of_documents": hash_of(documents),
            "pieces": encoder.corpus.count,
            "bad_rows": rows.bad_rows,
        }
        if writer.tokens:
            job.out.publish(documents, documents_file(Path(name)).name)
            job.out.publish(tokens, name)
    finally:
        tokens.unlink(missing_ok=True)
        documents.unlink(missing_ok=True)
    return entry


def _source_of(job: Job, part: int) -> TextSource:
    """The source of a part, with its files alone. Raises UserError if a file has changed since the plan was written."""
    planned = job.plan["parts"][part]
    source = text_sources([job.section.sources[planned["source"]]])[0]
    if planned["files"] != [0, 0]:
        begin, end = planned["files"]
        files = [_unchanged(file) for file in job.plan["files"][planned["source"]][begin:end]]
        source.select(files, (planned["extent"][0], planned["extent"][1]) if planned["extent"] else None)
    return source


def _unchanged(planned: PlannedFile) -> SourceFile:
    path = planned["path"]
    found: Sequence[SourceFile] = Listing(path).files if is_address(path) else [Path(path)]
    if not found or sampled_digest(found[0]).hex() != planned["digest"]:
        raise UserError(f"{path} has changed since the plan was written: restore it, or start with a new --out")
    return found[0]


def _write_documents(encoder: TextEncoder, rows: UsableRows, writer: "TokenWriter") -> None:
    """Write the tokens of all pieces. A document whose first piece is a bad row or empty starts with its next piece."""
    corpus, is_start = encoder.corpus, True
    for pieces in _chunks(corpus):
        for piece, found in zip(pieces, encoder.fetch(pieces), strict=True):
            if isinstance(found, Exception):
                rows.check(found)
                is_start = True
                continue
            if is_start and len(found.tokens):
                writer.start_document()
                is_start = False
            writer.write(found.tokens)
            is_start = is_start or bool(corpus.flags(piece) & ENDS_DOCUMENT)


def _chunks(corpus: TextCorpus) -> Iterator[range]:
    """All pieces, in ranges of about CHUNK_BYTES."""
    begin, size = 0, 0
    for piece in range(corpus.count):
        size += corpus.num_bytes(piece)
        if size >= CHUNK_BYTES:
            yield range(begin, piece + 1)
            begin, size = piece + 1, 0
    if begin < corpus.count:
        yield range(begin, corpus.count)


class TokenWriter:
    """Writes a .npy file of integers. tokens: their number; starts: positions at which documents start."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file = path.open("xb")
        self._file.write(_npy_header(0, dtype))
        self._dtype = dtype
        self.starts = array("q")
        self.tokens = 0

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._file.write(_npy_header(self.tokens, self._dtype))
        self._file.close()

    def start_document(self) -> None:
        self.starts.append(self.tokens)

    def write(self, ids: npt.NDArray[np.integer]) -> None:
        self._file.write(ids.astype(self._dtype).data)
        self.tokens += len(ids)


def _npy_header(count: int, dtype: np.dtype[Any]) -> bytes:
    """The header of a .npy file of `count` elements. Its size does not depend on `count`."""
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, description)
    assert len(header.getvalue()) == HEADER_BYTES
    return header.getvalue()
