"""Batches for one data-parallel rank, prepared ahead of the trainer in the background."""

import time

import torch
from torch import Tensor

from titanlite.batch import Batch
from titanlite.data.config import DataConfig
from titanlite.data.kinds import source_names
from titanlite.data.preparation import Int64s, PreparedStep, Sources
from titanlite.data.streams import Origin, SourceState
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.workers import Assignment, Prefetcher, WorkerPool
from titanlite.runtime.errors import UserError

STEPS_AHEAD = 2


class Loader:
    """The microbatches of data rank `data_rank` of `data_degree`, step by step.

    Sequence n of the run is the next one of stream n mod num_streams; optimizer step k takes the sequences
    [k G, (k + 1) G); this rank takes those with n mod data_degree = data_rank, in order, local_batch_size at a time.
    The content of a step is therefore the same for every data_degree, local_batch_size and number of workers.

    The steps are prepared in a thread, or in processes, at most two ahead, and in each process one more and what a pipe
    holds. What this object says of itself (state, bad_rows, origins) is about the steps handed out, never about those
    prepared. It communicates with no other rank.
    """

    def __init__(
        self,
        assignment: Assignment,
        sources: Sources,
        *,
        local_batch_size: int,
        data_rank: int,
        data_degree: int,
        num_workers: int,
    ) -> None:
        self.num_streams = num_streams = assignment.section.num_streams
        self._global_batch_size = assignment.global_batch_size
        assert num_streams % data_degree == 0
        assert self._global_batch_size % (local_batch_size * data_degree) == 0
        self.stream_ids = tuple(range(data_rank, num_streams, data_degree))
        """The streams of this rank: rows of state(), and the rows of the whole state that load_state() takes."""
        self.source_names = source_names(assignment.section.sources)
        self.description = f"{sources.description}; {num_streams} streams"
        """Sources, pieces and streams, in one line."""
        self.wait_s = 0.0
        """Seconds that it was waited for data so far."""
        self._local_batch_size = local_batch_size
        self._data_degree = data_degree
        # It checks states for all workers, and does their work where there are none.
        self._preparation = assignment.preparation(sources, self.stream_ids)
        self._producer = (
            self._preparation
            if num_workers == 0
            else WorkerPool(assignment, self.stream_ids, num_workers, self._preparation.states())
        )
        self._prefetcher: Prefetcher[PreparedStep] | None = None
        self._next: PreparedStep | Exception | None = None
        self._closed = False
        self._note(0, self._preparation.states(), self._preparation.ended())
        self._beginning = self.state()

    def _note(self, handed_out: int, states: Int64s, ended: Int64s) -> None:
        self._handed_out = handed_out
        self._states = states
        self.ended: list[bool] = ended.astype(bool).tolist()
        """Of each source, whether this rank's streams have nothing left of it but masked sequences."""
        self.bad_rows = int(states.reshape(-1, len(SourceState._fields))[:, _BAD_ROWS].sum())
        """Bad rows that this rank's streams skipped for the steps handed out so far."""

    def next_step(self) -> list[Batch]:
        """The microbatches of this rank's part of the next optimizer step, global_batch_size / data_degree rows.

        Raises DataError at the step that needs a row which cannot be used, UserError where a worker is gone; and again
        at each call after that.
        """
        step = self._ahead()
        if isinstance(step, Exception):
            raise step
        self._next = None
        first = self._handed_out
        self._note(first + self._global_batch_size, step.states, step.ended)
        self.sequences = range(first + self.stream_ids[0], self._handed_out, self._data_degree)
        """Numbers of this rank's sequences of the step handed out last."""
        self._origins = step.origins
        size = self._local_batch_size
        return [self._batch(step, slice(begin, begin + size)) for begin in range(0, len(self.sequences), size)]

    @property
    def origins(self) -> list[Origin]:
        """Where each of these sequences comes from."""
        return [Origin(*values) for values in self._origins.tolist()]

    def ended_after_next(self) -> list[bool]:
        """What `ended` will be after the next step; waits until that is prepared. Errors are left to next_step()."""
        step = self._ahead()
        return self.ended if isinstance(step, Exception) else step.ended.astype(bool).tolist()

    def _ahead(self) -> PreparedStep | Exception:
        """The next step, or what next_step() is to raise."""
        assert not self._closed, "the loader is closed"
        if self._next is None:
            start = time.perf_counter()
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._producer.step, STEPS_AHEAD)
            try:
                self._next = self._prefetcher.get()
            except Exception as error:
                self._next = error
            self.wait_s += time.perf_counter() - start
        return self._next

    def _batch(self, step: PreparedStep, rows: slice) -> Batch:
        return Batch(
            torch.from_numpy(step.tokens[rows]),
            torch.from_numpy(step.labels[rows]),
            torch.tensor(self.sequences[rows]),
            torch.from_numpy(step.origins[rows, Origin._fields.index("source")].copy()),
            None if step.positions is None else torch.from_numpy(step.positions[rows]),
        )

    def state(self) -> Tensor:
        """int64 (own streams, fields of SourceState of each source), after the steps handed out; row i is stream
        stream_ids[i]."""
        return torch.from_numpy(self._states.copy())

    def load_state(self, state: Tensor) -> None:
        """Continue after the step at which `state` was taken: int64 (num_streams, fields), the rows of all ranks.

        The mesh and the batch sizes may be others than they were. Raises UserError where the state is not of this data.
        """
        shape = (self.num_streams, self._states.shape[1])
        if state.dtype != torch.int64 or tuple(state.shape) != shape:
            raise UserError(
                f"the saved state of the data is {tuple(state.shape)} {state.dtype}, and data.num_streams = "
                f"{self.num_streams} and {len(self.source_names)} data.sources need {shape} int64: use those of the "
                "run that is resumed"
            )
        each = sequences_of_streams(state).tolist()
        handed_out = sum(each)
        expected = [len(range(stream, handed_out, self.num_streams)) for stream in range(self.num_streams)]
        if each != expected or handed_out % self._data_degree:
            raise UserError(
                f"the saved state of the data, {handed_out} sequences, is not the state after a step that can be "
                f"continued on {self._data_degree} data ranks"
            )
        if self._prefetcher is not None:
            self._prefetcher.close(timeout_s=None)  # it works on the streams that are set now
            self._prefetcher = None
        self._next = None
        own = state[list(self.stream_ids)].numpy()
        self._preparation.load_state(own, handed_out)
        self._producer.load_state(own, handed_out)
        self._note(handed_out, own, self._preparation.ended())

    def describe(self, state: Tensor) -> str:
        """Where the data stand in a state of all streams, in one line."""
        fields = state.unflatten(1, (len(self.source_names), -1))
        epochs = []
        for name, source in zip(self.source_names, fields.unbind(1), strict=True):
            first, last = int(source[:, _EPOCH].min()), int(source[:, _EPOCH].max())
            span = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            epochs.append(span if len(self.source_names) == 1 else f"{name}: {span}")
        return f"sequence {int(sequences_of_streams(state).sum()):,} ({', '.join(epochs)})"

    def restart(self) -> None:
        """Begin again, with the first sequence of all."""
        state = torch.zeros(self.num_streams, self._beginning.shape[1], dtype=torch.int64)
        state[list(self.stream_ids)] = self._beginning  # the rows of other ranks are not looked at
        self.load_state(state)

    def close(self) -> None:
        """End the thread and the processes. May be called at any time, and twice."""
        self._closed = True
        self._producer.close()  # first: the thread may wait for a worker
        if self._prefetcher is not None:
            self._prefetcher.close()


_EPOCH = SourceState._fields.index("epoch")
_BAD_ROWS = SourceState._fields.index("bad_rows")
_SEQUENCES = SourceState._fields.index("sequences")


def sequences_of_streams(state: Tensor) -> Tensor:
    """Of each row of a state of streams, how many sequences were handed out: int64 (streams,)."""
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
    logs: bool = True,
) -> Loader:
    """The loader of one rank; `section` is resolved (no -1). Indexes sources where that was not done before.

    vocab_size: the model's. logs: whether rows that are skipped are named in warnings: of the ranks that read the
    same, one does. Raises UserError for a source that is empty.
    """
    arguments = tokenizer.arguments if tokenizer else None
    assignment = Assignment(section, arguments, seq_len, vocab_size, global_batch_size, logs)
    return Loader(
        assignment,
        assignment.sources(tokenizer),
        local_batch_size=local_batch_size,
        data_rank=data_rank,
        data_degree=data_degree,
        num_workers=section.num_workers,
    )
