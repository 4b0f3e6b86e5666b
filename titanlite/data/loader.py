"""The data loader: batches of one data rank, prepared ahead of the trainer in the background."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.batch import FILLER, IGNORE_INDEX, Batch
from titanlite.data.config import DataConfig
from titanlite.data.deal import most_sequences, streams_of
from titanlite.data.kinds import open_source, source_names
from titanlite.data.preparation import Assignment, Int64s, Preparation, PreparedStep, sequences_of
from titanlite.data.steps import BatchStage, steps_of_stages
from titanlite.data.streams import Origin, SourceState
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.workers import Prefetcher, WorkerPool
from titanlite.runtime.errors import UserError

STEPS_AHEAD = 2


class Loader:
    """The microbatches of data rank `data_rank` of `data_degree`, step by step.

    Sequence n of the run is the next sequence of stream n mod num_streams. Optimizer step k takes the sequences
    [k G, (k + 1) G) for a global batch of G; with several stages, each step takes the next ones, as many as its stage
    says. This rank takes those of its streams (see data/deal.py), in order, local_batch_size rows per microbatch. The
    content of a step is therefore the same for every data_degree, local_batch_size and number of workers.

    The last rows of a step may be filler, see with_filler: each rank returns the same number of rows in every step.

    A thread or worker processes prepare at most two steps ahead; each process prepares one more step, and up to
    64 KiB in its output pipe. state, bad_rows and origins refer to the steps returned, not to the steps prepared. The
    loader does not communicate with other ranks.
    """

    def __init__(
        self,
        assignment: Assignment,
        tokenizer: Tokenizer | None,
        *,
        data_rank: int,
        data_degree: int,
        together: int = 1,
    ) -> None:
        self.sources = [open_source(source) for source in assignment.section.sources]
        self.num_streams = num_streams = assignment.section.num_streams
        self._assignment, self._last_step = assignment, 0
        self._rows_per_step = {}
        for stage in assignment.stages:
            sizes, size = (stage.global_batch_size, num_streams, data_degree, together), stage.local_batch_size
            most = most_sequences(*sizes)
            self._rows_per_step[stage] = -(-most // size) * size
        self.stream_ids = streams_of(data_rank, num_streams, data_degree, together)
        """The streams of this rank: the rows of state(), and the rows of all ranks' state that load_state() uses."""
        prepare = WorkerPool if assignment.section.num_workers > 0 else Preparation
        self._preparation = prepare(assignment, self.sources, tokenizer, self.stream_ids)
        self.source_names = source_names(assignment.section.sources)
        self.description = f"{self._preparation.description}; {num_streams} streams"
        """Sources, pieces and streams, in one line."""
        self.wait_s = 0.0
        """Total seconds spent waiting for data."""
        self._prefetcher: Prefetcher[PreparedStep] | None = None
        self._next: PreparedStep | Exception | None = None
        self._closed = False
        self._set_progress(0, self._preparation.states(), self._preparation.ended())
        self._beginning = self.state()

    def _set_progress(self, num_returned: int, states: Int64s, ended: Int64s) -> None:
        self._num_returned = num_returned
        self._states = states
        self.ended: list[bool] = ended.astype(bool).tolist()
        """For each source, whether it is exhausted in all of this rank's streams."""
        by_source = states.reshape(len(states), -1, len(SourceState._fields)).sum(axis=0)
        self.bad_rows = int(by_source[:, _BAD_ROWS].sum())
        """Bad rows that this rank's streams skipped in the steps returned."""
        self.too_long: list[int] = by_source[:, _TOO_LONG].tolist()
        """For each source, the conversations longer than a sequence that these streams truncated or skipped."""

    def next_step(self) -> list[Batch]:
        """The microbatches of this rank's part of the next optimizer step.

        Raises DataError at the step that needs a bad row, UserError if a worker exited; later calls raise it again.
        """
        step = self._peek()
        if isinstance(step, Exception):
            raise step
        self._next = None
        self._last_step += 1
        stage = self._assignment.stage_of(self._last_step)
        self.first_sequence = first = self._num_returned
        """Number of the first sequence in the last step returned, of all ranks."""
        self._set_progress(first + stage.global_batch_size, step.states, step.ended)
        self.sequences = sequences_of(self.stream_ids, self.num_streams, range(first, self._num_returned))
        """Numbers of this rank's sequences in the last step returned."""
        self.origin_values = step.origins
        """Origins of `sequences`, int64 (sequences, fields of Origin)."""
        numbers = torch.tensor(self.sequences, dtype=torch.int64)
        batch = Batch(
            torch.from_numpy(step.tokens),
            torch.from_numpy(step.labels),
            numbers,
            torch.from_numpy(step.origins[:, Origin._fields.index("source")].copy()),
            None if step.positions is None else torch.from_numpy(step.positions),
            torch.from_numpy(step.lengths[:, 0].copy()),
        )
        rows, size = self._rows_per_step[stage], stage.local_batch_size
        if len(numbers) < rows:
            batch = with_filler(batch, rows, self._assignment.vocab_size)
        return [rows_of(batch, slice(begin, begin + size)) for begin in range(0, rows, size)]

    @property
    def origins(self) -> list[Origin]:
        """Origins of `sequences`."""
        return [Origin(*values) for values in self.origin_values.tolist()]

    def locate(self, origin: Origin) -> str:
        """Source, file and row of a sequence, for messages."""
        return f"data.sources.{origin.source}: {self._preparation.locate(origin)}"

    def ended_after_next(self) -> list[bool]:
        """Value of `ended` after the next step; waits for this step. next_step() raises its errors."""
        step = self._peek()
        return self.ended if isinstance(step, Exception) else step.ended.astype(bool).tolist()

    def _peek(self) -> PreparedStep | Exception:
        """The next step, or the exception for next_step() to raise."""
        assert not self._closed, "the loader is closed"
        if self._next is None:
            start = time.perf_counter()
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._preparation.step, STEPS_AHEAD)
            try:
                self._next = self._prefetcher.get()
            except Exception as error:
                self._next = error
            self.wait_s += time.perf_counter() - start
        return self._next

    def state(self) -> Tensor:
        """The state after the steps returned: int64 (own streams, SourceState fields of all sources).

        Row i is stream stream_ids[i].
        """
        return torch.from_numpy(self._states.copy())

    def load_state(self, state: Tensor, step: int = 0) -> None:
        """Continue after `step`, with its `state`: int64 (num_streams, fields), the rows of all ranks.

        step: has no effect with a single stage. The mesh and the batch sizes may differ from the earlier run. Sources
        may have been added after those of the state; they begin at their start. Raises UserError if the state does not
        match.
        """
        added = self._states.shape[1] - state.shape[1] if state.ndim == 2 else 0
        if added > 0 and added % len(SourceState._fields) == 0 and len(state) == self.num_streams:
            state = torch.cat([state, state.new_zeros(self.num_streams, added)], dim=1)
            state[list(self.stream_ids), -added:] = self._beginning[:, -added:].to(state.dtype)
        shape = (self.num_streams, self._states.shape[1])
        if state.dtype != torch.int64 or tuple(state.shape) != shape:
            raise UserError(
                f"the saved state of the data is {tuple(state.shape)} {state.dtype}, but data.num_streams = "
                f"{self.num_streams} and {len(self.source_names)} data.sources need {shape} int64: use the num_streams "
                "and sources of the run that is resumed"
            )
        each = sequences_of_streams(state).tolist()
        num_returned = sum(each)
        expected = [len(range(stream, num_returned, self.num_streams)) for stream in range(self.num_streams)]
        if each != expected:
            raise UserError(
                f"the saved state of the data ({num_returned} sequences) is not the state after a step: its streams "
                "have other numbers of sequences; use another checkpoint"
            )
        assert step or not num_returned or len(self._assignment.stages) == 1, "the step decides the stage"
        if self._prefetcher is not None:
            self._prefetcher.close(timeout_s=None)  # its thread uses the current streams
            self._prefetcher = None
        self._next = None
        own = state[list(self.stream_ids)].numpy()
        self._preparation.load_state(own, num_returned, step)
        self._last_step = step
        self._set_progress(num_returned, own, self._preparation.ended())

    def epochs(self) -> list[float]:
        """For each source, the epochs in the steps returned; the sum over the data ranks is that of the run.

        Pieces that are not read to their end do not count; of a streamed source, only files and row groups do.
        """
        return self._preparation.epochs(self._states)

    def too_long_by_name(self, *, counts: bool) -> dict[str, int]:
        """The key of metrics -> value in `too_long`, of each source of conversations. counts: else the values are 0."""
        sources = zip(self.sources, self.source_names, self.too_long, strict=True)
        return {f"too_long/{name}": count * counts for source, name, count in sources if source.config.is_chat}

    def describe_epochs(self, steps: int) -> str:
        """Tokens of an epoch of each source, and how often a run of `steps` reads it. Tokenizes a sample of text."""
        parts = []
        stages, longest = self._assignment.stages, self._assignment.longest
        read = [0.0] * len(self.source_names)  # sequences of the longest stage
        for stage, count, mixture in zip(
            stages, steps_of_stages(stages, steps), self._preparation.mixtures, strict=True
        ):
            sequences = count * stage.tokens / longest
            read = [before + sequences * share for before, share in zip(read, mixture.shares, strict=True)]
        for name, sequences, size in zip(self.source_names, read, self._preparation.epoch_sizes(), strict=True):
            if size is None or not size.sequences:
                parts.append(f"{name}: the number of tokens is unknown")
                continue
            about = "" if size.is_exact else "about "
            tokens = size.tokens if size.is_exact else round(size.tokens, 3 - len(str(size.tokens)))
            times = sequences / size.sequences
            parts.append(f"{name}: {about}{tokens:,} tokens, read {times:,.2f} times in {steps:,} steps")
        return "; ".join(parts)

    def describe(self, state: Tensor) -> str:
        """Format the sequence number and the epochs of a state of all streams, in one line.

        The state may lack the last sources, which have been added since: they are left out.
        """
        fields = state.unflatten(1, (-1, len(SourceState._fields)))
        epochs = []
        for name, source in zip(self.source_names, fields.unbind(1), strict=False):
            first, last = int(source[:, _EPOCH].min()), int(source[:, _EPOCH].max())
            span = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            epochs.append(span if len(self.source_names) == 1 else f"{name}: {span}")
        return f"sequence {int(sequences_of_streams(state).sum()):,} ({', '.join(epochs)})"

    def restart(self) -> None:
        """Restart at the first sequence of the run."""
        state = torch.zeros(self.num_streams, self._beginning.shape[1], dtype=torch.int64)
        state[list(self.stream_ids)] = self._beginning  # the rows of other ranks are not used
        self.load_state(state, 0)

    def close(self) -> None:
        """Stop the thread and the processes. May be called at any time, repeatedly."""
        self._closed = True
        self._preparation.close()  # before the prefetcher, whose thread may wait for a worker
        if self._prefetcher is not None:
            self._prefetcher.close()


def rows_of(batch: Batch, rows: slice | Tensor) -> Batch:
    """These rows of the batch."""
    return Batch._make(None if values is None else values[rows] for values in batch)


def with_filler(batch: Batch, rows: int, vocab_size: int) -> Batch:
    """The batch with filler rows after its own, `rows` in total.

    Filler rows repeat the tokens, positions and sources of the own ones, which a mixture of experts spreads over its
    experts as it does with data. They hold no token of a document: all labels are IGNORE_INDEX, lengths are 0, and
    sequences are -1. A rank without sequences in this step repeats the tokens 0, 1, 2, ...
    """
    own = len(batch.tokens)
    if own:
        batch = rows_of(batch, torch.arange(rows) % own)
    else:
        positions = torch.arange(batch.tokens.shape[1]).expand(rows, -1)
        sources, lengths = torch.zeros(2, rows, dtype=torch.int64)
        tokens, labels, numbers = positions % vocab_size, torch.empty_like(positions), torch.empty_like(sources)
        batch = Batch(tokens, labels, numbers, sources, None if batch.positions is None else positions, lengths)
    batch.labels[own:] = IGNORE_INDEX
    batch.sequences[own:] = FILLER
    assert batch.lengths is not None
    batch.lengths[own:] = 0
    return batch


_EPOCH = SourceState._fields.index("epoch")
_BAD_ROWS = SourceState._fields.index("bad_rows")
_TOO_LONG = SourceState._fields.index("too_long")
_SEQUENCES = SourceState._fields.index("sequences")


def sequences_of_streams(state: Tensor) -> Tensor:
    """Number of sequences returned per row of a state of streams: int64 (streams,)."""
    return state[:, _SEQUENCES :: len(SourceState._fields)].sum(1)


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
    together: int = 1,
    later: Sequence[BatchStage] = (),
    logs: bool = True,
) -> Loader:
    """Build the loader of one rank. `section` is resolved (no -1). Builds the indexes of sources that have none.

    vocab_size: the model's. together: sequences that stay together, see data/deal.py. later: the stages after the first
    one. logs: whether skipped rows are logged as warnings; true for one of the ranks that read the same data. Raises
    UserError if a source is empty.
    """
    arguments = tokenizer.arguments if tokenizer else None
    stages = (BatchStage(1, global_batch_size, seq_len, local_batch_size), *later)
    assignment = Assignment(section, arguments, vocab_size, stages, logs)
    return Loader(assignment, tokenizer, data_rank=data_rank, data_degree=data_degree, together=together)
