"""How streams are dealt to data ranks: stream s of S belongs to data rank floor(s / R) mod D, for any D up to S / R.

R is 1, except in runs with training.bit_equal, in which a microbatch has R sequences that stay together on every mesh.
Sequence n of a run is of stream n mod S, so that the ranks may have different numbers of sequences in a step. All
compute the same number of rows, at least the largest number of sequences that any rank has in any step; the rows that a
rank has no sequences for are filler.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np


def streams_of(data_rank: int, num_streams: int, data_degree: int, together: int = 1) -> Sequence[int]:
    """The streams of a data rank, ascending. together: R."""
    if together == 1:
        return range(data_rank, num_streams, data_degree)
    return [stream for stream in range(num_streams) if stream // together % data_degree == data_rank]


@lru_cache(maxsize=64)
def most_sequences(global_batch_size: int, num_streams: int, data_degree: int, together: int = 1) -> int:
    """The largest number of sequences that a data rank has in any step.

    A step takes G sequences from any one on: steps before may have had other sizes. together: R, which divides G and S.
    Raises ValueError if there are more ranks than streams.
    """
    if together > 1:
        return together * most_sequences(global_batch_size // together, num_streams // together, data_degree)
    if not 1 <= data_degree <= num_streams:
        raise ValueError(f"{num_streams} streams cannot be dealt to {data_degree} data ranks")
    if num_streams % data_degree == 0:
        return -(-global_batch_size // data_degree)
    rounds, rest = divmod(global_batch_size, num_streams)
    # Beside full rounds of the streams, a step takes `rest` of them, from the first one of its first sequence.
    # Those of rank 0 are the most: the streams of another rank lie at the same distances, or are one less.
    begins = np.arange(num_streams)
    streams = np.arange(2 * num_streams) % num_streams
    before = np.concatenate(([0], np.cumsum(streams % data_degree == 0)))  # of rank 0, up to each stream
    in_rest = int((before[begins + rest] - before[begins]).max())
    return rounds * len(streams_of(0, num_streams, data_degree)) + in_rest
