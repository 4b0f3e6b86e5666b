"""Batches for one data-parallel rank, prepared ahead of the trainer in the background."""

from dataclasses import dataclass
from typing import Literal

from titanlite.data.sources import SourceConfig


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
