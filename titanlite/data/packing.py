"""The sequences that pieces fill."""

from collections.abc import Sequence
from typing import Literal

from titanlite.data.sources.pieces import TokenPiece

Packing = Literal["concatenate", "none"]
TooLong = Literal["truncate", "skip"]


def fitted_length(conversation: TokenPiece, seq_len: int, too_long: TooLong) -> int:
    """How many first tokens of a conversation a sequence of seq_len + 1 tokens has; 0 if they have no target."""
    tokens, _, trained = conversation
    if len(tokens) > seq_len + 1 and too_long == "skip":
        return 0
    length = min(len(tokens), seq_len + 1)
    has_target = length > 1 and (trained is None or trained[1:length].any())
    return length if has_target else 0


def num_sequences(pieces: Sequence[TokenPiece], seq_len: int, packing: Packing, too_long: TooLong | None) -> float:
    """The sequences that these pieces fill, in this order. too_long: of conversations; None: the pieces are documents.

    A fraction for documents that are concatenated.
    """
    if too_long is None:
        lengths = [len(piece.tokens) for piece in pieces]
        return (
            sum(lengths) / seq_len if packing == "concatenate" else sum(-(-max(0, n - 1) // seq_len) for n in lengths)
        )
    return num_packed([fitted_length(piece, seq_len, too_long) for piece in pieces], seq_len, packing)


def num_packed(lengths: Sequence[int], seq_len: int, packing: Packing) -> int:
    """The sequences that conversations fill in this order. lengths: of the parts that a sequence has; 0: none."""
    sequences, room = 0, 0
    for length in lengths:
        if length > room or (length and packing == "none"):
            sequences, room = sequences + 1, seq_len + 1
        room -= length
    return sequences
