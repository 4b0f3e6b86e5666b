"""The sequences that pieces fill."""

from collections.abc import Sequence
from typing import Literal

from titanlite.data.sources.pieces import EMPTY_PIECE, TokenPiece

Packing = Literal["concatenate", "none"]
TooLong = Literal["truncate", "skip"]


def fitted(conversation: TokenPiece, seq_len: int, too_long: TooLong) -> TokenPiece:
    """The part of a conversation that a sequence of seq_len + 1 tokens has; EMPTY_PIECE if it has no target."""
    tokens, starts, trained = conversation
    if len(tokens) > seq_len + 1:
        if too_long == "skip":
            return EMPTY_PIECE
        tokens, trained = tokens[: seq_len + 1], trained if trained is None else trained[: seq_len + 1]
    has_target = len(tokens) > 1 and (trained is None or trained[1:].any())
    return TokenPiece(tokens, starts, trained) if has_target else EMPTY_PIECE


def num_sequences(pieces: Sequence[TokenPiece], seq_len: int, packing: Packing, too_long: TooLong | None) -> float:
    """The sequences that these pieces fill, in this order. too_long: of conversations; None: the pieces are documents.

    A fraction for documents that are concatenated.
    """
    if too_long is None:
        lengths = [len(piece.tokens) for piece in pieces]
        return (
            sum(lengths) / seq_len if packing == "concatenate" else sum(-(-max(0, n - 1) // seq_len) for n in lengths)
        )
    return num_packed([len(fitted(piece, seq_len, too_long).tokens) for piece in pieces], seq_len, packing)


def num_packed(lengths: Sequence[int], seq_len: int, packing: Packing) -> int:
    """The sequences that conversations fill in this order. lengths: of the parts that a sequence has; 0: none."""
    sequences, room = 0, 0
    for length in lengths:
        if length > room or (length and packing == "none"):
            sequences, room = sequences + 1, seq_len + 1
        room -= length
    return sequences
