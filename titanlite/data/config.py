"""The [data], [validation] and [tokenizer] sections: what is trained on, and in which order."""

from dataclasses import dataclass
from typing import Literal

from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.errors import ranged

MIN_PIECE_BYTES = 16
PIECE_BYTES_PER_POSITION = 64


@dataclass(frozen=True)
class DataConfig:
    """What is trained on, and in which order."""

    num_streams: int = ranged(-1, "leave it out", least=1, unset=-1)
    """Canonical streams S: the order of the tokens follows from it, whatever the mesh. -1: one per row of the
    global batch, resolved at the first start and kept by its checkpoints."""
    shuffle: bool = True
    """Whether pieces are permuted, anew in each epoch."""
    seed: int = ranged(0, "write a number from 0", least=0, most=2**63 - 1)
    """Seed of the permutation, and of the choice among sources."""
    max_piece_bytes: int = ranged(-1, "leave it out: -1 means 64 x training.seq_len", least=MIN_PIECE_BYTES, unset=-1)
    """Longer documents are cut into pieces of at most this size, at line ends where there are any.
    -1: 64 x training.seq_len."""
    packing: Literal["concatenate", "none"] = "concatenate"
    """concatenate: documents one after the other fill each sequence. none: each document starts a sequence, and the
    rest of its last one is padded and masked."""
    document_mask: bool = False
    """Whether attention stays inside a document and positions restart at each."""
    add_bos: bool = False
    """Whether each document starts with the tokenizer's BOS token."""
    add_eos: bool = True
    """Whether each document ends with the tokenizer's EOS token, where it has one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A row that cannot be used: error stops at the step that consumes it, skip counts it and goes on."""
    max_bad_rows: int = ranged(100, "0 stops at the first bad row", least=0)
    """skip: the run stops once more rows than this were bad."""
    num_workers: int = ranged(0, "0 prepares data in a thread", least=0)
    """Processes of each rank that tokenize and pack, beside the one that trains; 0: a thread of that one."""
    ledger: bool = False
    """Whether <dump_folder>/ledger says of each sequence where it came from."""
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """The corpora, trained on together: [[data.sources]] tables."""


@dataclass(frozen=True)
class ValidationConfig:
    """The loss on data that is not trained on: [[validation.sources]] tables, with the keys of [[data.sources]].

    Each of them is read once, in its own order; all else is as [data] says.
    """

    enable: bool = False
    """Whether there is validation: after every interval-th step, and after the last one."""
    interval: int = ranged(1000, "1 validates every step", least=1)
    """Steps between validations."""
    steps: int = ranged(-1, "leave it out", least=1, unset=-1)
    """Of each source at most so many batches of training.global_batch_size sequences; -1: the whole of it."""
    sources: tuple[SourceConfig, ...] = ()
    """The corpora, each read once and in its order: [[validation.sources]] tables."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer turns text into tokens."""

    path: str = ""
    """A tokenizer.json or its folder. Empty: none (tokens), or one trained on the corpus (python-stdlib)."""
    bos: str = ""
    """Text of the token that starts a document; default: from a tokenizer_config.json beside it, else none."""
    eos: str = ""
    """Text of the token that ends a document; default: from a tokenizer_config.json beside it, else none."""
