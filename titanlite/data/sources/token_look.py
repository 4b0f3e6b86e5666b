"""A look at token files: all that a start needs to know of a file, from opening it once."""

import os
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from titanlite.data.sources.arrays import USUAL_BYTES, raw_layout, usual_layout
from titanlite.data.sources.base import BLOCK_BYTES, READERS, SAMPLED_BLOCKS, current_facts, digest_of_samples
from titanlite.data.sources.formats import (
    CHECKED_TOKENS,
    DOCUMENTS,
    HEAD_BYTES,
    RAW,
    STARTS_PER_PAGE,
    Format,
    Seen,
    format_of,
    head_of,
    read_start,
    shown_format,
)
from titanlite.data.sources.stored import SourceFile, StoredFile
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import OpenFile
from titanlite.storage.store import in_parallel

T = TypeVar("T")

START_BYTES = USUAL_BYTES + 2 * CHECKED_TOKENS
"""Of ids of 16 bits, all that are checked."""

WAIT_S = 0.001
"""Files that wait longer for the file system are looked at by several threads, which cost twice the CPU time if none
of them waits: those that are on a disk are not."""
TIMED_FILES, FILES_PER_TIME = 16, 1024
"""The first 16 of 1,024 files show how long each waits, at least: some of them wait for the CPU."""


Ids = npt.NDArray[Any]
EMPTY: Ids = np.empty(0, np.uint16)


def look_at(
    file: SourceFile, dtype: str, *, reads_ids: bool = False, digests: bool = False, of_documents: bool = False
) -> tuple[Seen, Ids]:
    """Look at a file, and at the one of its documents. Raises UserError if it cannot be opened.

    dtype: see open_tokens. reads_ids: whether to read its first CHECKED_TOKENS ids, which are returned. digests,
    of_documents: whether to read the digests of the file, and of its documents, from a disk.
    """
    if isinstance(file, Path):
        with suppress(OSError):  # which the other way reports, or tries again
            if once := _look_once(file, dtype, reads_ids=reads_ids, digests=digests, of_documents=of_documents):
                return once
    (facts,) = current_facts([file])  # before its content: it has other ones if that changes
    found = format_of(file)
    seen = Seen(file, facts, found, *_documents_of(file, found))
    if not reads_ids:
        return seen, EMPTY
    try:
        head, ids = read_start(file, found, dtype)
    except UserError as error:
        return seen._replace(fault=str(error)), EMPTY
    return seen._replace(head=head), ids


def _look_once(
    file: Path, dtype: str, *, reads_ids: bool, digests: bool, of_documents: bool
) -> tuple[Seen, Ids] | None:
    """As look_at, by one opening; None of a file whose ids are described elsewhere. Raises OSError."""
    opened = OpenFile(file, reads_ahead=False)
    size, mtime_ns = opened.facts.st_size, opened.facts.st_mtime_ns
    start = opened.read(0, START_BYTES if reads_ids else HEAD_BYTES)
    found = shown_format(file, start)
    facts, (documents, of_starts) = (str(file), size, mtime_ns, opened.facts.st_ino), _documents_of(file, found)
    if not reads_ids:
        return Seen(file, facts, found, documents, of_starts), EMPTY
    if found.is_described or (found is RAW and not dtype):
        return None
    try:
        layout = raw_layout(size, dtype) if found is RAW else usual_layout(start, size)
    except ValueError:
        return None
    if layout is None:
        return None
    kind, tokens, begin = layout
    end = begin + min(CHECKED_TOKENS, tokens) * kind.itemsize
    if len(start) < end:
        start += opened.read(len(start), end - len(start))
    if len(start) < end:
        return None
    ids = np.frombuffer(start, kind, min(CHECKED_TOKENS, tokens), begin)
    head = head_of(ids, begin, tokens, size, mtime_ns)
    if not digests:
        return Seen(file, facts, found, documents, of_starts, head), ids

    def read(begin: int, end: int) -> bytes:
        return start[begin:end] if end <= len(start) else opened.read(begin, end - begin)

    digest = digest_of_samples(size, read)
    of_content = _read_documents(documents, tokens) if of_documents and documents else (None, None)
    return Seen(file, facts, found, documents, of_starts, head, "", digest, *of_content), ids


def _read_documents(path: SourceFile, tokens: int) -> tuple[bytes | None, bytes | None]:
    """The digest of a small file of titanlite of the starts of documents, and their pages; None: to be read later."""
    if not str(path).endswith(DOCUMENTS):
        return None, None
    try:
        opened = OpenFile(str(path), reads_ahead=False)
        size = opened.facts.st_size
        content = opened.read(0, min(size, SAMPLED_BLOCKS * BLOCK_BYTES))
        layout = usual_layout(content, size)
    except (OSError, ValueError):
        return None, None
    if len(content) < size:
        return None, None
    digest = digest_of_samples(size, lambda begin, end: content[begin:end])
    if layout is None or layout[0] != np.dtype("<i8"):
        return digest, None
    starts = np.frombuffer(content, "<i8", layout[1], layout[2])
    is_right = not len(starts) or (starts[0] >= 0 and starts[-1] <= tokens and (starts[1:] >= starts[:-1]).all())
    return digest, starts[::STARTS_PER_PAGE].tobytes() if is_right else None


def _documents_of(file: SourceFile, found_format: Format) -> tuple[SourceFile | None, tuple[Any, ...] | None]:
    """The file that records where the documents of a file start, and its facts."""
    if isinstance(file, StoredFile):
        documents = found_format.documents(file)
        return documents, None if documents is None else current_facts([documents])[0]
    if beside := found_format.beside_of(file):
        with suppress(OSError):
            found = os.stat(beside)
            if stat.S_ISREG(found.st_mode):
                return Path(beside), (beside, found.st_size, found.st_mtime_ns, found.st_ino)
    return None, None


def looked_at(files: Sequence[SourceFile], look: Callable[[int], T]) -> list[T]:
    """The results of `look` for the number of each file; of several files at the same time if they take long."""
    if any(isinstance(file, StoredFile) for file in files):
        return in_parallel(look, range(len(files)))
    found = list[T]()
    with ThreadPoolExecutor(READERS) as pool:
        for begin in range(0, len(files), FILES_PER_TIME):
            numbers = range(len(files))[begin : begin + FILES_PER_TIME]
            waits = list[float]()
            for number in numbers[:TIMED_FILES]:
                before = perf_counter() - thread_time()
                found.append(look(number))
                waits.append(perf_counter() - thread_time() - before)
            each = pool.map if min(waits) > WAIT_S else map
            found.extend(each(look, numbers[TIMED_FILES:]))
    return found
