"""Tokenize text in worker processes: any free worker encodes the next chunk of pieces; results keep their order.

A worker is a separate process (see data/processes.py) that imports no torch.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from titanlite.data.config import DataConfig
from titanlite.data.corpus import TextCorpus, build_encoder
from titanlite.data.kinds import text_sources
from titanlite.data.processes import Arrays, WorkerProcess, run_worker
from titanlite.data.sources.pieces import BadRowError, TokenPiece
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import UserError

CHUNK_BYTES = 2**20
"""Approximate size of the text that a worker encodes at a time."""

BATCH_PIECES = 256
CHUNKS_PER_WORKER = 3
"""Limit on the chunks per worker that are being encoded or wait for their turn in the output."""


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


class TextEncoder:
    """Reads and encodes the pieces of the sources of a section in this process. section: with max_piece_bytes resolved.
    corpus: the sources, which define the piece numbers."""

    def __init__(self, section: DataConfig, tokenizer: Tokenizer) -> None:
        self.section, self.tokenizer = section, tokenizer
        self.dtype = id_type(tokenizer.vocab_size)
        # Conversations are the only source of their section: token files have documents.
        encoder = build_encoder(section.sources[0], tokenizer, section)
        self.corpus = TextCorpus(text_sources(section.sources), section.max_piece_bytes, encoder)

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


@contextmanager
def encoded(encoder: TextEncoder, chunks: Iterable[range], num_workers: int) -> Iterator[Iterator[Chunk]]:
    """Encode chunks in order, with any number of workers; with 0 workers they are encoded in this process.

    The iterator raises UserError if a worker is killed. Leaving the block ends the workers.
    """
    if num_workers == 0:
        yield map(encoder.encode, chunks)
        return
    arguments = {"section": asdict(encoder.section), "tokenizer": encoder.tokenizer.arguments}
    workers: list[WorkerProcess] = []
    threads = ThreadPoolExecutor(num_workers)
    remedy = "use fewer --workers, and run the same command again to resume after the last complete shard"
    try:
        for _ in range(num_workers):
            workers.append(WorkerProcess("titanlite.tools.encoding", arguments, remedy))
        yield _in_order(threads, workers, chunks)
    finally:
        for worker in workers:
            worker.close()
        threads.shutdown(cancel_futures=True)  # no thread waits for a killed worker


def _in_order(threads: Executor, workers: Sequence[WorkerProcess], chunks: Iterable[range]) -> Iterator[Chunk]:
    """Yield results in order, with at most CHUNKS_PER_WORKER chunks per worker in progress or waiting."""
    free = deque(workers)

    def encode(pieces: range) -> Chunk:
        worker = free.popleft()  # there are as many threads as workers
        try:
            worker.send([pieces.start, pieces.stop])
            value, arrays = worker.receive()
        finally:
            free.append(worker)
        kinds: dict[str, type[Exception]] = {"bad": BadRowError, "user": UserError}
        errors = {place: kinds[kind](text) for place, kind, text in value["errors"]}
        return Chunk(arrays["ids"], value["lengths"], value["flags"], errors)

    results: deque[Future[Chunk]] = deque()
    for pieces in chunks:
        results.append(threads.submit(encode, pieces))
        if len(results) == CHUNKS_PER_WORKER * len(workers):
            yield results.popleft().result()
    while results:
        yield results.popleft().result()


def encoded_chunks(
    requests: Iterator[list[int]], *, section: dict[str, Any], tokenizer: dict[str, str]
) -> Iterator[tuple[Any, Arrays]]:
    """Encode the ranges of pieces that are requested, in a worker process."""
    encoder = TextEncoder(TypeAdapter(DataConfig).validate_python(section), Tokenizer(**tokenizer))
    for bounds in requests:
        chunk = encoder.encode(range(*bounds))
        errors = [
            (place, "bad" if isinstance(error, BadRowError) else "user", str(error))
            for place, error in chunk.errors.items()
        ]
        yield {"lengths": chunk.lengths, "flags": chunk.flags, "errors": errors}, {"ids": chunk.ids}


if __name__ == "__main__":
    run_worker(encoded_chunks)
