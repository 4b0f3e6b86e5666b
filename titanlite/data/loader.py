"""Batches for one data-parallel rank, prepared ahead of the trainer in the background."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.data.corpus import Corpus, TextCorpus, Texts
from titanlite.data.permutation import Permutation
from titanlite.data.prefetch import Prefetcher
from titanlite.data.sources import SourceConfig, check_source
from titanlite.data.streams import BadRowPolicy, Stream, StreamState
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.windows import WindowCorpus, check_tokens
from titanlite.runtime.errors import DataError, Problem, UserError, require

STEPS_AHEAD = 2
MIN_PIECE_BYTES = 16
PIECE_BYTES_PER_POSITION = 64


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and in which order."""

    num_streams: int = -1
    """Canonical streams S: the order of the tokens follows from it, whatever the mesh. -1: one per row of the
    global batch, resolved at the first start and written to <dump_folder>/config.toml."""
    shuffle: bool = True
    """Whether pieces are permuted, anew in each epoch."""
    seed: int = 0
    """Seed of the permutation."""
    max_piece_bytes: int = -1
    """Longer documents are cut into pieces of at most this size, at line ends where there are any.
    -1: 64 x training.seq_len."""
    add_bos: bool = False
    """Whether each document starts with the tokenizer's BOS token."""
    add_eos: bool = True
    """Whether each document ends with the tokenizer's EOS token, where it has one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: error stops at the step that consumes it, skip counts it and goes on."""
    max_bad_rows: int = 100
    """skip: the run stops once more rows than this were bad."""
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """The corpora, trained on together: [[data.sources]] tables."""


def check_data(
    section: DataConfig,
    *,
    seq_len: int,
    global_batch_size: int,
    data_degree: int,
    vocab_size: int,
    looks_at_files: bool = True,
) -> list[Problem]:
    """Problems of the [data] section. Facts that are not known (yet) are 0 or -1: what needs them is not checked.

    looks_at_files: also those of the sources' files, which have to be there.
    """
    streams = section.num_streams
    problems = [
        *require(streams == -1 or streams >= 1, "data.num_streams", streams, "-1 or at least 1", "leave it out"),
        *require(
            section.max_piece_bytes == -1 or section.max_piece_bytes >= MIN_PIECE_BYTES,
            "data.max_piece_bytes",
            section.max_piece_bytes,
            f"-1 or at least {MIN_PIECE_BYTES}",
            "leave it out" + (f": -1 means {PIECE_BYTES_PER_POSITION * seq_len}" if seq_len > 0 else ""),
        ),
        *require(section.max_bad_rows >= 0, "data.max_bad_rows", section.max_bad_rows, "at least 0", "write 0 or more"),
        *require(bool(section.sources), "data.sources", [], "at least one source", "add a [[data.sources]] table"),
        *require(
            0 <= section.seed < 2**63,
            "data.seed",
            section.seed,
            "from 0 to 2^63 - 1",
            "write a number from 0",
        ),
    ]
    if streams >= 1 and data_degree > 0:
        problems += require(
            streams % data_degree == 0,
            "data.num_streams",
            streams,
            f"divisible by dp_replicate x dp_shard = {data_degree}, so that a rank reads only streams of its own",
            f"write {-(-streams // data_degree) * data_degree}, or leave it out"
            + (f": it is then training.global_batch_size = {global_batch_size}" if global_batch_size > 0 else ""),
        )
    for n, source in enumerate(section.sources):
        key = f"data.sources.{n}"
        found = check_source(source, key, looks_at_files=looks_at_files)
        if looks_at_files and source.kind == "tokens" and not found and vocab_size > 0:
            found = check_tokens(source, key, vocab_size)
        problems += found
    return problems + _check_mixture(section.sources)


def _check_mixture(sources: Sequence[SourceConfig]) -> list[Problem]:
    kinds = sorted({source.kind for source in sources})
    return require(
        "tokens" not in kinds or len(kinds) == 1,
        "data.sources",
        kinds,
        "tokens sources stand alone: their sequences are windows of the files",
        "turn the others into tokens first: python -m titanlite.data.tokenize CONFIG --out FILE",
    )


class Batch(NamedTuple):
    """One microbatch of one data rank: tokens and labels, int64 (local_batch_size, seq_len), on the CPU.

    labels: the next token at each position, IGNORE_INDEX where there is none.
    """

    tokens: Tensor
    labels: Tensor


class _Step(NamedTuple):
    """A prepared step, and where the streams stand after it."""

    batches: list[Batch]
    states: list[StreamState]
    ended: bool


@dataclass
class _Preparation:
    """Prepares one step after the other; lives in the background thread."""

    streams: dict[int, Stream]
    num_streams: int
    global_batch_size: int
    local_batch_size: int
    data_rank: int
    data_degree: int
    next_sequence: int = 0

    def step(self) -> _Step:
        """Those of the next global_batch_size sequences of the run that are this rank's, in order. Raises DataError."""
        first = self.next_sequence
        mine = range(first + self.data_rank, first + self.global_batch_size, self.data_degree)
        rows = [self._row(n) for n in mine]
        self.next_sequence = first + self.global_batch_size
        size = self.local_batch_size
        batches = [self._batch(rows[i : i + size]) for i in range(0, len(rows), size)]
        streams = self.streams.values()
        return _Step(batches, [stream.state() for stream in streams], all(stream.ended for stream in streams))

    def _row(self, sequence: int) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self.streams[sequence % self.num_streams].next_sequence()
        except UserError as error:
            raise DataError(str(error), sequence) from error

    def _batch(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> Batch:
        tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return Batch(tokens, labels)


class Loader:
    """The microbatches of data rank `data_rank` of `data_degree`, step by step.

    Sequence n of the run is the next one of stream n mod num_streams; optimizer step k takes the sequences
    [k G, (k + 1) G); this rank takes those with n mod data_degree = data_rank, in order, local_batch_size at a time.
    The content of a step is therefore the same for every data_degree and local_batch_size.

    The steps are prepared in a thread, at most two ahead. What this object says of itself (state, bad_rows, ended) is
    about the steps handed out, never about those prepared. It communicates with no other rank.
    """

    def __init__(
        self,
        corpus: Corpus,
        permutation: Permutation,
        *,
        num_streams: int,
        seq_len: int,
        global_batch_size: int,
        local_batch_size: int,
        data_rank: int,
        data_degree: int,
        epochs: int | None,
        policy: BadRowPolicy,
    ) -> None:
        assert num_streams % data_degree == 0
        assert global_batch_size % (local_batch_size * data_degree) == 0
        self.stream_ids = tuple(range(data_rank, num_streams, data_degree))
        """The streams of this rank: rows of state(), and the rows of the whole state that load_state() takes."""
        self.description = f"{corpus.description}; {num_streams} streams"
        """Sources, pieces and streams, in one line."""
        self.wait_s = 0.0
        """Seconds that next_step() has waited for data so far."""
        facts = {"num_streams": num_streams, "seq_len": seq_len, "epochs": epochs, "policy": policy}
        streams = {s: Stream(corpus, permutation, stream=s, **facts) for s in self.stream_ids}  # type: ignore[arg-type]
        self._preparation = _Preparation(
            streams, num_streams, global_batch_size, local_batch_size, data_rank, data_degree
        )
        self._prefetcher: Prefetcher[_Step] | None = None
        self._closed = False
        self._note([stream.state() for stream in streams.values()], all(stream.ended for stream in streams.values()))

    def _note(self, states: list[StreamState], ended: bool) -> None:
        self._states = states
        self.ended = ended
        """Whether this rank's streams (finite ones) have nothing left but masked sequences."""
        self.bad_rows = sum(state.bad_rows for state in states)
        """Bad rows that this rank's streams skipped for the steps handed out so far."""

    def next_step(self) -> list[Batch]:
        """The microbatches of this rank's part of the next optimizer step, global_batch_size / data_degree rows.

        Raises DataError at the step that needs a row which cannot be used, and again at each call after that.
        """
        assert not self._closed, "the loader is closed"
        start = time.perf_counter()
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._preparation.step, STEPS_AHEAD)
        step = self._prefetcher.get()
        self.wait_s += time.perf_counter() - start
        self._note(step.states, step.ended)
        return step.batches

    def state(self) -> Tensor:
        """int64 (own streams, fields of StreamState), after the steps handed out; row i is stream stream_ids[i]."""
        return torch.tensor(self._states, dtype=torch.int64)

    def load_state(self, state: Tensor) -> None:
        """Continue after the step at which `state` was taken: int64 (num_streams, fields), the rows of all ranks.

        The mesh and the batch sizes may be others than they were. Raises UserError where the state is not of this data.
        """
        prep = self._preparation
        shape = (prep.num_streams, len(StreamState._fields))
        if state.dtype != torch.int64 or tuple(state.shape) != shape:
            raise UserError(
                f"the saved state of the data is {tuple(state.shape)} {state.dtype}, and data.num_streams = "
                f"{prep.num_streams} needs {shape} int64: use the num_streams of the run that is resumed"
            )
        rows = [StreamState(*row) for row in state.tolist()]
        handed_out = sum(row.sequences for row in rows)
        expected = [len(range(s, handed_out, prep.num_streams)) for s in range(prep.num_streams)]
        if [row.sequences for row in rows] != expected or handed_out % prep.data_degree:
            raise UserError(
                f"the saved state of the data, {handed_out} sequences, is not the state after a step that can be "
                f"continued on {prep.data_degree} data ranks"
            )
        if self._prefetcher is not None:
            self._prefetcher.close(timeout_s=None)  # it works on the streams that are set now
            self._prefetcher = None
        for stream_id, stream in prep.streams.items():
            stream.load_state(rows[stream_id])
        prep.next_sequence = handed_out
        self._note([stream.state() for stream in prep.streams.values()], all(s.ended for s in prep.streams.values()))

    def close(self) -> None:
        """End the thread. May be called at any time, and twice."""
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()


def build_loader(
    section: DataConfig,
    tokenizer: Tokenizer | None,
    *,
    seq_len: int,
    vocab_size: int,
    global_batch_size: int,
    local_batch_size: int,
    data_rank: int,
    data_degree: int,
    epochs: int | None = None,
) -> Loader:
    """The loader of one rank; `section` is resolved (no -1). Indexes the corpus where that was not done before.

    epochs: how often the data is read; None: for ever. vocab_size: the model's. Raises UserError for a corpus that is
    empty or, repeating, has fewer pieces than there are streams.
    """
    corpus: Corpus
    if section.sources[0].kind == "tokens":
        corpus = WindowCorpus(section.sources, seq_len=seq_len, vocab_size=vocab_size, keep_tail=epochs is not None)
    else:
        assert tokenizer is not None, "sources of text need a tokenizer"
        texts = Texts(section.sources, section.max_piece_bytes)
        corpus = TextCorpus(texts, tokenizer, add_bos=section.add_bos, add_eos=section.add_eos)
    _require_pieces(corpus, section.num_streams, global_batch_size, data_degree, repeats=epochs is None)
    return Loader(
        corpus,
        Permutation(corpus.counts, seed=section.seed, shuffle=section.shuffle),
        num_streams=section.num_streams,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        local_batch_size=local_batch_size,
        data_rank=data_rank,
        data_degree=data_degree,
        epochs=epochs,
        policy=bad_row_policy(section),
    )


def bad_row_policy(section: DataConfig) -> BadRowPolicy:
    """What data.on_bad_row and data.max_bad_rows say."""
    return BadRowPolicy(section.on_bad_row == "skip", section.max_bad_rows)


def _require_pieces(
    corpus: Corpus, num_streams: int, global_batch_size: int, data_degree: int, *, repeats: bool
) -> None:
    """Raise UserError where a stream would have nothing to repeat."""
    pieces = sum(corpus.counts)
    if pieces == 0:
        remedy = "add data" if corpus.packed else "add data, or set a smaller training.seq_len"
        raise UserError(f"there is nothing to train on: {corpus.description}: {remedy}")
    if not repeats or pieces >= num_streams:
        return
    # Empty and broken files count as a piece each: with nothing beside them the number of streams is not to blame.
    found = corpus.fetch(range(pieces))
    if all(isinstance(piece, Exception) for piece in found):
        raise UserError(f"there is nothing to train on: {found[0]}: add data")
    usable = [s for s in range(data_degree, pieces + 1, data_degree) if global_batch_size % s == 0]
    remedy = f"set data.num_streams = {usable[-1]}" if usable else f"use at most {pieces} data ranks"
    smaller = ", or a smaller data.max_piece_bytes" if corpus.packed else ""
    raise UserError(
        f"the corpus has {pieces} pieces and data.num_streams = {num_streams}, so that {num_streams - pieces} streams "
        f"would have none: {remedy}{smaller}, or add data ({corpus.description})"
    )
