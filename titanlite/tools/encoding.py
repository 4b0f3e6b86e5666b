"""Text to tokens in worker processes: chunks of pieces, encoded by whoever is free, handed out in their order.

A worker is a process of its own that imports no torch. It gets a job and ranges of pieces as JSON and answers with JSON
and the bytes of arrays; nothing is pickled.
"""

import json
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.data.corpus import Encoder, TextCorpus, Texts
from titanlite.data.kinds import text_sources
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BadRowError
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.workers import describe_exit, start_process
from titanlite.runtime.errors import UserError

CHUNK_BYTES = 2**20
"""A worker encodes about so much text at a time."""

BATCH_PIECES = 256
CHUNKS_PER_WORKER = 3
"""So many are under way for each worker, one of them perhaps waiting for its turn."""


@dataclass(frozen=True)
class Job:
    """What is encoded, and how. tokenizer: its arguments."""

    sources: tuple[SourceConfig, ...]
    max_piece_bytes: int
    tokenizer: dict[str, str]
    add_bos: bool
    add_eos: bool


class Chunk(NamedTuple):
    """Pieces as tokens.

    ids: 1-D, the tokens of all pieces one after the other. lengths: how many each piece has, 0 where it has an error.
    flags: Piece.flags of each. errors: by place in the chunk, what is to be raised: BadRowError, UserError.
    """

    ids: npt.NDArray[np.integer]
    lengths: list[int]
    flags: list[int]
    errors: dict[int, Exception]


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest of the types in which token files are written."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class JobEncoder:
    """Reads and encodes pieces in this process. texts: the sources' text; pieces are counted as there."""

    def __init__(self, job: Job) -> None:
        named = job.tokenizer
        tokenizer = Tokenizer(Path(named["file"]), bos=named["bos"], eos=named["eos"])
        self.texts = Texts(text_sources(job.sources), job.max_piece_bytes)
        self.dtype = id_type(tokenizer.vocab_size)
        self._corpus = TextCorpus(self.texts, Encoder(tokenizer, add_bos=job.add_bos, add_eos=job.add_eos))

    def encode(self, pieces: Sequence[int]) -> Chunk:
        ids, lengths = [np.empty(0, self.dtype)], list[int]()
        errors: dict[int, Exception] = {}
        for begin in range(0, len(pieces), BATCH_PIECES):
            for piece in self._corpus.fetch(pieces[begin : begin + BATCH_PIECES]):
                if isinstance(piece, Exception):
                    errors[len(lengths)] = piece
                    lengths.append(0)
                else:
                    ids.append(piece.tokens.astype(self.dtype))
                    lengths.append(len(piece.tokens))
        return Chunk(np.concatenate(ids), lengths, [self.texts.row(piece).flags for piece in pieces], errors)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection
    chunks: deque[int]


@contextmanager
def encoded(encoder: JobEncoder, job: Job, chunks: Iterable[range], num_workers: int) -> Iterator[Iterator[Chunk]]:
    """The chunks in their order, whatever the number of workers; with 0 they are encoded in this process.

    encoder: of `job`. Raises UserError, from within the iteration, where a worker is killed. Leaving the block ends the
    workers.
    """
    if num_workers == 0:
        yield map(encoder.encode, chunks)
        return
    workers: list[_Worker] = []
    try:
        for _ in range(num_workers):
            workers.append(_start_worker(job))
        yield _in_order(workers, chunks, encoder.dtype)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
            worker.connection.close()


def _start_worker(job: Job) -> _Worker:
    ours, theirs = Pipe()
    number = theirs.fileno()
    process = start_process("titanlite.tools.encoding", str(number), pass_fds=[number], stdin=subprocess.DEVNULL)
    theirs.close()
    ours.send_bytes(json.dumps(asdict(job)).encode())
    return _Worker(process, ours, deque())


def _in_order(workers: Sequence[_Worker], chunks: Iterable[range], dtype: np.dtype[Any]) -> Iterator[Chunk]:
    """At most CHUNKS_PER_WORKER chunks for each worker are under way or wait for their turn."""
    numbered = enumerate(chunks)
    done: dict[int, Chunk] = {}
    given, handed_out, exhausted = 0, 0, False
    while True:
        while not exhausted and given - handed_out < CHUNKS_PER_WORKER * len(workers):
            number, pieces = next(numbered, (given, None))
            if pieces is None:
                exhausted = True
                break
            worker = min(workers, key=lambda one: len(one.chunks))
            with _naming_the_dead(worker):
                worker.connection.send_bytes(json.dumps([pieces.start, pieces.stop]).encode())
            worker.chunks.append(number)
            given += 1
        if handed_out == given:
            return
        while handed_out not in done:
            waiting = {worker.connection: worker for worker in workers if worker.chunks}
            for ready in wait(list(waiting)):
                worker = waiting[ready]  # type: ignore[index]
                with _naming_the_dead(worker):
                    done[worker.chunks.popleft()] = _receive(worker.connection, dtype)
        yield done.pop(handed_out)
        handed_out += 1


@contextmanager
def _naming_the_dead(worker: _Worker) -> Iterator[None]:
    """Turn the end of a connection into a UserError about the process at its other end."""
    try:
        yield
    except (EOFError, OSError):
        code = worker.process.wait()
        hint = " (where memory ran out, use fewer --workers)" if code == -signal.SIGKILL else ""
        again = "the same command goes on after the last complete shard"
        raise UserError(f"the worker process {worker.process.pid} {describe_exit(code)}{hint}; {again}") from None


def _receive(connection: Connection, dtype: np.dtype[Any]) -> Chunk:
    answer = json.loads(connection.recv_bytes())
    if "failed" in answer:
        raise RuntimeError(f"a worker process failed:\n{answer['failed']}")
    if "error" in answer:
        raise UserError(answer["error"])
    kinds: dict[str, type[Exception]] = {"bad": BadRowError, "user": UserError}
    errors = {place: kinds[kind](text) for place, kind, text in answer["errors"]}
    return Chunk(np.frombuffer(connection.recv_bytes(), dtype), answer["lengths"], answer["flags"], errors)


def _send(connection: Connection, chunk: Chunk) -> None:
    errors = [
        (place, "bad" if isinstance(error, BadRowError) else "user", str(error))
        for place, error in chunk.errors.items()
    ]
    header = {"lengths": chunk.lengths, "flags": chunk.flags, "errors": errors}
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(chunk.ids.data)


def _job_from(table: dict[str, Any]) -> Job:
    return Job(**table | {"sources": tuple(SourceConfig(**source) for source in table["sources"])})


def _work(connection: Connection) -> None:
    """A worker's life: it ends when its parent closes the connection, or is gone."""
    try:
        encoder = JobEncoder(_job_from(json.loads(connection.recv_bytes())))
        while True:
            _send(connection, encoder.encode(range(*json.loads(connection.recv_bytes()))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
    except Exception:
        connection.send_bytes(json.dumps({"failed": traceback.format_exc()}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which ends its workers
    _work(Connection(int(sys.argv[1])))
