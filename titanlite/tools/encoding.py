"""Tokens of the pieces of text sources, in this process."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from titanlite.data.config import DataConfig
from titanlite.data.corpus import TextCorpus, build_encoder
from titanlite.data.kinds import text_sources
from titanlite.data.sources.base import TextSource
from titanlite.data.sources.pieces import TokenPiece
from titanlite.data.tokenizer import Tokenizer

BATCH_PIECES = 256


def id_type(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype of token files (uint16 or uint32) that holds all ids."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


class TextEncoder:
    """Reads and encodes the pieces of text sources. corpus: the sources, which define the piece numbers."""

    def __init__(self, section: DataConfig, tokenizer: Tokenizer, sources: Sequence[TextSource] | None = None) -> None:
        """section: with max_piece_bytes resolved. sources: default: those of the section."""
        # Conversations are the only source of their section: token files have documents.
        encoder = build_encoder(section.sources[0], tokenizer, section)
        self.corpus = TextCorpus(sources or text_sources(section.sources), section.max_piece_bytes, encoder)

    def fetch(self, pieces: Sequence[int]) -> Iterator[TokenPiece | Exception]:
        """The tokens of each piece, or its error."""
        for begin in range(0, len(pieces), BATCH_PIECES):
            yield from self.corpus.fetch(pieces[begin : begin + BATCH_PIECES])
