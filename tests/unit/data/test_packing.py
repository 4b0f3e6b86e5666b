"""The lengths of conversations in sequences, and the number of sequences."""

import numpy as np
import pytest

from titanlite.data.sources.pieces import AT_BEGIN, TokenPiece
from titanlite.data.streams import TooLong, fitted_length, num_packed, num_sequences


def piece(length: int, *trained: int) -> TokenPiece:
    """trained: places of the tokens that are trained on; none are given: all."""
    places = np.arange(length)
    return TokenPiece(places, AT_BEGIN, np.isin(places, trained) if trained else None)


@pytest.mark.parametrize(
    ("conversation", "truncated", "skipped"),
    [
        (piece(0), 0, 0),
        (piece(1), 0, 0),  # the first token is no target
        (piece(2), 2, 2),
        (piece(5, 0), 0, 0),
        (piece(5, 0, 1), 5, 5),
        (piece(8, 7), 8, 8),
        (piece(9, 8), 9, 9),
        (piece(10), 9, 0),
        (piece(10, 8), 9, 0),
        (piece(10, 9), 0, 0),  # the only target is cut
    ],
)
def test_a_conversation_has_a_target_in_a_sequence_of_9_tokens(
    conversation: TokenPiece, truncated: int, skipped: int
) -> None:
    ways: tuple[TooLong, TooLong] = ("truncate", "skip")
    assert [fitted_length(conversation, 8, way) for way in ways] == [truncated, skipped]


def test_conversations_fill_sequences_in_order() -> None:
    assert num_packed([3, 3, 0, 4, 9, 1], 8, "concatenate") == 4  # 3 + 3, 4, 9, 1 of at most 9
    assert num_packed([3, 3, 0, 4, 9, 1], 8, "none") == 5
    assert num_packed([5, 4, 9], 8, "concatenate") == 2
    assert num_packed([0, 0], 8, "concatenate") == 0
    pieces = [piece(5), piece(12), piece(4)]
    assert num_sequences(pieces, 8, "concatenate", "truncate") == 3
    assert num_sequences(pieces, 8, "concatenate", "skip") == 1


def test_documents_fill_a_fraction_of_a_sequence_or_one_each() -> None:
    pieces = [piece(0), piece(1), piece(9), piece(10)]
    assert num_sequences(pieces, 8, "concatenate", None) == 20 / 8
    assert num_sequences(pieces, 8, "none", None) == 0 + 0 + 1 + 2
    assert num_sequences(pieces, 1, "none", None) == 0 + 0 + 8 + 9
