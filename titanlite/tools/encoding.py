"""Tokenize text in worker processes: any free worker encodes the next chunk of pieces; results keep their order.

A worker is a separate process that imports no torch. It receives a job and ranges of pieces as JSON and returns JSON
and the bytes of arrays. Nothing is pickled.
"""

import json
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from titanlite.data.corpus import TextCorpus, build_encoder
from titanlite.data.kinds import text_sources
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.pieces import BadRowError, TokenPiece
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.workers import describe_exit, start_process
from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import load_plugins, loaded_plugins

CHUNK_BYTES = 2**20
"""Approximate size of the text that a worker encodes at a time."""

BATCH_PIECES = 256
CHUNKS_PER_WORKER = 3
"""Limit on the chunks per worker that are being encoded or wait for their turn in the output."""


@dataclass(frozen=True)
class Job:
    """The sources to encode, and the settings. tokenizer: the arguments of Tokenizer."""

    sources: tuple[SourceConfig, ...]
    max_piece_bytes: int
    tokenizer: dict[str, str]
    add_bos: bool
    add_eos: bool


class Chunk(NamedTuple):
    """Encoded pieces.

    ids: 1-D, the concatenated tokens of all pieces. lengths: tokens per piece; 0 for a piece with an error.
    flags: Piece.flags of each piece. errors: index in the chunk -> the exception to raise (BadRowError or UserError).
    """

    ids: npt.NDArray[np.integer]
    lengths: list[int]
    flags: list[int]
    errors: dict[int, Exception]


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype of token files (uint16 or uint32) that holds all ids."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class JobEncoder:
    """Reads and encodes pieces in this process. corpus: the sources, which define the piece numbers."""

    def __init__(self, job: Job) -> None:
        tokenizer = Tokenizer(**job.tokenizer)
        self.dtype = id_type(tokenizer.vocab_size)
        # Conversations are the only source of their job: token files have documents.
        encoder = build_encoder(job.sources[0], tokenizer, add_bos=job.add_bos, add_eos=job.add_eos)
        self.corpus = TextCorpus(text_sources(job.sources), job.max_piece_bytes, encoder)

    def fetch(self, pieces: Sequence[int]) -> Iterator[TokenPiece | Exception]:
        """The tokens of each piece, or its error."""
        for begin in range(0, len(pieces), BATCH_PIECES):
            yield from self.corpus.fetch(pieces[begin : begin + BATCH_PIECES])

    def encode(self, pieces: Sequence[int]) -> Chunk:
        ids, lengths = [np.empty(0, self.dtype)], list[int]()
        errors: dict[int, Exception] = {}
        for piece in self.fetch(pieces):
            if isinstance(piece, Exception):
                errors[len(lengths)] = piece
                lengths.append(0)
            else:
                ids.append(piece.tokens.astype(self.dtype))
                lengths.append(len(piece.tokens))
        return Chunk(np.concatenate(ids), lengths, [self.corpus.flags(piece) for piece in pieces], errors)


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection

    def encode(self, pieces: range, dtype: np.dtype[Any]) -> Chunk:
        """Encode in the worker process. Raises its error, and UserError if it has ended."""
        try:
            self.connection.send_bytes(json.dumps([pieces.start, pieces.stop]).encode())
            answer = json.loads(self.connection.recv_bytes())
            if "failed" in answer:
                raise RuntimeError(f"a worker process failed:\n{answer['failed']}")
            if "error" in answer:
                raise UserError(answer["error"])
            kinds: dict[str, type[Exception]] = {"bad": BadRowError, "user": UserError}
            errors = {place: kinds[kind](text) for place, kind, text in answer["errors"]}
            ids = np.frombuffer(self.connection.recv_bytes(), dtype)
            return Chunk(ids, answer["lengths"], answer["flags"], errors)
        except (EOFError, OSError):
            code = self.process.wait()
            hint = " (if memory ran out, use fewer --workers)" if code == -signal.SIGKILL else ""
            remedy = "run the same command again to resume after the last complete shard"
            raise UserError(f"the worker process {self.process.pid} {describe_exit(code)}{hint}; {remedy}") from None


@contextmanager
def encoded(encoder: JobEncoder, job: Job, chunks: Iterable[range], num_workers: int) -> Iterator[Iterator[Chunk]]:
    """Encode chunks in order, with any number of workers; with 0 workers they are encoded in this process.

    encoder: built from `job`. The iterator raises UserError if a worker is killed. Leaving the block ends the workers.
    """
    if num_workers == 0:
        yield map(encoder.encode, chunks)
        return
    workers: list[_Worker] = []
    threads = ThreadPoolExecutor(num_workers)
    try:
        for _ in range(num_workers):
            workers.append(_start_worker(job))
        yield _in_order(threads, workers, chunks, encoder.dtype)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        threads.shutdown(cancel_futures=True)  # no thread waits for a killed worker
        for worker in workers:
            worker.connection.close()


def _in_order(
    threads: Executor, workers: Sequence[_Worker], chunks: Iterable[range], dtype: np.dtype[Any]
) -> Iterator[Chunk]:
    """Yield results in order, with at most CHUNKS_PER_WORKER chunks per worker in progress or waiting."""
    free = deque(workers)

    def encode(pieces: range) -> Chunk:
        worker = free.popleft()  # there are as many threads as workers
        try:
            return worker.encode(pieces, dtype)
        finally:
            free.append(worker)

    results: deque[Future[Chunk]] = deque()
    for pieces in chunks:
        results.append(threads.submit(encode, pieces))
        if len(results) == CHUNKS_PER_WORKER * len(workers):
            yield results.popleft().result()
    while results:
        yield results.popleft().result()


def _start_worker(job: Job) -> _Worker:
    ours, theirs = Pipe()
    number = theirs.fileno()
    process = start_process("titanlite.tools.encoding", str(number), pass_fds=[number], stdin=subprocess.DEVNULL)
    theirs.close()
    with suppress(BrokenPipeError, ConnectionResetError):  # a worker that has ended is reported with its first chunk
        ours.send_bytes(json.dumps({"plugins": loaded_plugins(), **asdict(job)}).encode())
    return _Worker(process, ours)


def _send(connection: Connection, chunk: Chunk) -> None:
    errors = [
        (place, "bad" if isinstance(error, BadRowError) else "user", str(error))
        for place, error in chunk.errors.items()
    ]
    header = {"lengths": chunk.lengths, "flags": chunk.flags, "errors": errors}
    connection.send_bytes(json.dumps(header).encode())
    connection.send_bytes(chunk.ids.data)


def _work(connection: Connection) -> None:
    """Run a worker: returns when the parent closes the connection or exits."""
    try:
        table = json.loads(connection.recv_bytes())
        load_plugins(table.pop("plugins"))  # their kinds of sources
        sources = tuple(SourceConfig(**source) for source in table["sources"])
        encoder = JobEncoder(Job(**table | {"sources": sources}))
        while True:
            _send(connection, encoder.encode(range(*json.loads(connection.recv_bytes()))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        connection.send_bytes(json.dumps({"error": str(error)}).encode())
    except Exception:
        connection.send_bytes(json.dumps({"failed": traceback.format_exc()}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends its workers
    _work(Connection(int(sys.argv[1])))
