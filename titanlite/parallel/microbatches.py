"""How the rows that a data rank computes in an optimizer step are divided into batches and microbatches."""

from dataclasses import dataclass

from titanlite.data.deal import most_sequences
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.pipeline import fits_schedule


@dataclass(frozen=True)
class Microbatches:
    """The rows of an optimizer step, of which up to `sequences` are sequences and the others filler.

    size: rows of a microbatch. per_batch: microbatches of a batch, which is one pass through the schedule of a
    pipeline; 1 without a pipeline. batches: of the step. filler_share: of the rows of all data ranks.
    """

    size: int
    per_batch: int
    batches: int
    sequences: int
    filler_share: float

    @property
    def microbatches(self) -> int:
        return self.per_batch * self.batches

    @property
    def rows_per_batch(self) -> int:
        return self.size * self.per_batch


def divide_step(
    section: ParallelismConfig,
    data_degree: int,
    *,
    global_batch_size: int,
    local_batch_size: int,
    num_streams: int,
    bit_equal: bool = False,
) -> Microbatches:
    """The microbatches of each of `data_degree` data ranks.

    Microbatches have at most local_batch_size rows, with a pipeline parallelism.pp_microbatch_size, and are equally
    large. Pipeline stages reduce their gradients at the end of each batch: with gradient_sync "every", a batch has at
    most local_batch_size sequences, otherwise all of the step. bit_equal: microbatches have exactly this number of
    rows, which stay together.
    """
    together = rows_together(section, local_batch_size) if bit_equal else 1
    sequences = most_sequences(global_batch_size, num_streams, data_degree, together)
    is_whole = section.pp > 1 and section.gradient_sync != "every"
    batches = 1 if is_whole else -(-sequences // local_batch_size)
    per_batch, of_batch = 1, -(-sequences // batches)
    if section.pp > 1:
        per_batch = -(-of_batch // section.pp_microbatch_size)
        while not fits_schedule(section, per_batch):
            per_batch += 1
    size = together if bit_equal else -(-of_batch // per_batch)
    batches = -(-sequences // (per_batch * size))
    filler_share = 1 - global_batch_size / (per_batch * size * batches * data_degree)
    return Microbatches(size, per_batch, batches, sequences, filler_share)


def rows_together(section: ParallelismConfig, local_batch_size: int) -> int:
    """Rows of a microbatch with training.bit_equal: the unit of computation."""
    return section.pp_microbatch_size if section.pp > 1 else local_batch_size
