"""The pieces of a large text source, scanned by several processes of this node: those of one process, in its order."""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import IO, NamedTuple

import numpy as np

from titanlite.data.processes import WorkerProcess
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.pieces import Piece
from titanlite.data.sources.stored import SourceFile, size_of
from titanlite.runtime.environment import usable_cores
from titanlite.runtime.errors import UserError

FLUSH_PIECES = 2**16
"""Pieces that are written at once: they bound the memory for any size of the corpus."""

SHARED_BYTES = 2**29
"""Bytes of a source that several processes scan: about a second for one, as long as processes need to start."""
MAX_PROCESSES = 16
TASKS_PER_PROCESS = 8

_SIZE, _LENGTH = Piece._fields.index("size"), Piece._fields.index("length")


class Scanned(NamedTuple):
    pieces: int = 0
    text_bytes: int = 0


def scan(
    source: TextSource,
    files: Mapping[int, SourceFile],
    max_piece_bytes: int,
    advance: Callable[[int], object] = lambda _: None,
) -> Iterator[Piece]:
    """The pieces of these files, by number, in order. advance: takes the bytes of files that are scanned. Raises
    UserError."""
    for number, file in files.items():
        try:
            yield from source.scan(file, number, max_piece_bytes)
            advance(size_of(file))
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error}") from error


def write_pieces(found: Iterable[Piece], out: IO[bytes]) -> Scanned:
    """Append pieces to a file, as int64; returns their number, and the bytes of their texts."""
    pieces, text_bytes, rest = 0, 0, iter(found)
    while rows := list(islice(rest, FLUSH_PIECES)):
        block = np.array(rows, dtype="<i8")
        out.write(block.data)  # the error of tofile() does not say why
        pieces += len(block)
        sizes = np.where(block[:, _LENGTH] < 0, block[:, _SIZE], block[:, _LENGTH])
        text_bytes += int(sizes.sum())
    return Scanned(pieces, text_bytes)


def processes_for(source: TextSource, files: Sequence[SourceFile], total: int) -> int:
    """How many processes scan the files, of `total` bytes: 1 is this one.

    Others read only files on a disk, of titanlite's own kinds.
    """
    is_own = type(source).__module__.startswith("titanlite.")  # a program or a plugin may have registered others
    is_shared = is_own and source.reads_files_separately and not source.is_part
    if total < SHARED_BYTES or not is_shared or not all(isinstance(file, Path) for file in files):
        return 1
    return min(usable_cores(), MAX_PROCESSES, len(files))


def scan_in_processes(
    source: TextSource,
    files: Sequence[SourceFile],
    max_piece_bytes: int,
    out: IO[bytes],
    into: Path,
    processes: int,
    advance: Callable[[int], object],
) -> Scanned:
    """Write what `scan` yields, from several processes. into: a folder for their parts. advance: takes the bytes of
    files that are scanned. Raises the UserError of the first file that has one."""
    arguments = {"source": asdict(source.config), "max_piece_bytes": max_piece_bytes}
    remedy = "start again: the index is built from its beginning"
    workers, idle = list[WorkerProcess](), SimpleQueue[WorkerProcess]()
    pool, scanned = ThreadPoolExecutor(processes), Scanned()

    def scanned_part(number: int, task: Mapping[int, SourceFile]) -> Scanned:
        worker = idle.get()
        try:
            worker.send({"files": [[n, str(file)] for n, file in task.items()], "out": str(into / f"{number}.part")})
            return Scanned(*worker.receive()[0])
        finally:
            idle.put(worker)

    try:
        for _ in range(processes):
            workers.append(WorkerProcess("titanlite.data.index_worker", arguments, remedy))
            idle.put(workers[-1])
        tasks = _tasks(files, processes * TASKS_PER_PROCESS)
        parts = [pool.submit(scanned_part, number, task) for number, task in enumerate(tasks)]
        for number, (task, part) in enumerate(zip(tasks, parts, strict=True)):
            found = part.result()
            scanned = Scanned(scanned.pieces + found.pieces, scanned.text_bytes + found.text_bytes)
            with open(into / f"{number}.part", "rb") as pieces:
                shutil.copyfileobj(pieces, out, 2**24)
            os.remove(into / f"{number}.part")
            advance(sum(map(size_of, task.values())))
    finally:
        for worker in workers:
            worker.close()
        pool.shutdown(cancel_futures=True)
    return scanned


def _tasks(files: Sequence[SourceFile], count: int) -> list[dict[int, SourceFile]]:
    """About `count` groups of neighboring files, by number, of about equal bytes."""
    tasks, filled, size = [dict[int, SourceFile]()], 0, -(-sum(map(size_of, files)) // count)
    for number, file in enumerate(files):
        if tasks[-1] and filled >= size * len(tasks):
            tasks.append({})
        tasks[-1][number] = file
        filled += size_of(file)
    return tasks
