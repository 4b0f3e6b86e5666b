"""Packing of pieces into sequences: how many tokens each has, and best fit, in windows of consecutive pieces.

Best fit: Ding et al., "Fewer truncations improve language modeling", arXiv 2404.10830.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Packing = Literal["concatenate", "best_fit", "none"]

WINDOW_SEQUENCES = 128
"""Sequences of tokens in a packing window. More leave less padding, about 0.7 / WINDOW_SEQUENCES; but a stream has a
window in memory, and tokenizes it again when a run resumes."""

MAX_WINDOW_PIECES = 2**14
"""Maximum pieces in a packing window, which bounds the memory for many short ones."""


class Span(NamedTuple):
    """Tokens [begin, begin + length) of a piece of a packing window."""

    piece: int
    begin: int
    length: int


def cut_spans(piece: int, length: int, seq_len: int) -> Iterator[Span]:
    """The parts of a piece of `length` tokens, of at most seq_len + 1 at stride seq_len, as each token but the first is
    a target of one part. A piece of a single token has no target, and no part."""
    for begin in range(0, length - 1, seq_len):
        yield Span(piece, begin, min(seq_len + 1, length - begin))


def best_fit(lengths: Sequence[int], seq_len: int) -> list[list[Span]]:
    """Pack the pieces of a window into sequences of at most seq_len + 1 tokens. Cuts pieces that are longer.

    The longest part first, each into the sequence with the least room that is enough for it; of several, the first one.
    n parts in m sequences: O(n log n), and moves of up to m pointers in a sorted list for each part.

    The order of the sequences is that of their longest parts, so that it does not depend on lengths if that of the
    pieces does not; in a sequence, parts are in the order of the pieces.
    """
    spans = [span for piece, length in enumerate(lengths) for span in cut_spans(piece, length, seq_len)]
    spans.sort(key=lambda span: -span.length)
    sequences: list[list[Span]] = []
    rooms: list[tuple[int, int]] = []  # sorted: the room of a sequence, and its index
    for span in spans:
        at = bisect_left(rooms, (span.length, 0))
        if at < len(rooms):
            room, index = rooms.pop(at)
        else:
            room, index = seq_len + 1, len(sequences)
            sequences.append([])
        sequences[index].append(span)
        if room - span.length > 1:  # parts have at least two tokens
            insort(rooms, (room - span.length, index))
    return [sorted(sequence) for sequence in sorted(sequences)]


def window_lengths(lengths: Sequence[int], seq_len: int) -> Iterator[Sequence[int]]:
    """Divide the lengths of consecutive pieces into packing windows."""
    begin, tokens = 0, 0
    for end, length in enumerate(lengths, 1):
        tokens += length
        if tokens >= WINDOW_SEQUENCES * seq_len or end - begin == MAX_WINDOW_PIECES or end == len(lengths):
            yield lengths[begin:end]
            begin, tokens = end, 0


def packed_lengths(lengths: Sequence[int], seq_len: int, packing: Packing, *, cuts: bool) -> list[int]:
    """Tokens of each sequence that pieces of these lengths fill, in this order, at most seq_len + 1.

    cuts: whether pieces may be cut; conversations may not, and have the lengths of the parts that a sequence has.
    """
    if packing == "best_fit":
        windows = (best_fit(window, seq_len) for window in window_lengths(lengths, seq_len))
        return [sum(span.length for span in sequence) for window in windows for sequence in window]
    if packing == "none":
        return [span.length for length in lengths for span in cut_spans(0, length, seq_len)]
    if cuts:
        return [span.length for span in cut_spans(0, sum(lengths), seq_len)]
    packed: list[int] = []
    for length in filter(None, lengths):
        if not packed or packed[-1] + length > seq_len + 1:
            packed.append(0)
        packed[-1] += length
    return packed


def num_sequences(lengths: Sequence[int], seq_len: int, packing: Packing, *, cuts: bool) -> float:
    """The sequences that a source fills whose pieces have lengths like these. See packed_lengths.

    A fraction for documents that are concatenated, and for a sample of less than a packing window.
    """
    tokens = sum(lengths)
    if packing == "concatenate" and cuts:
        return tokens / seq_len
    copies = -(-WINDOW_SEQUENCES * seq_len // tokens) if packing == "best_fit" and tokens else 1
    return len(packed_lengths([*lengths] * copies, seq_len, packing, cuts=cuts)) / copies
