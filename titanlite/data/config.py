"""The [data], [validation] and [tokenizer] sections."""

from dataclasses import dataclass
from typing import Literal

from titanlite.data.sources.config import SourceConfig
from titanlite.runtime.errors import Needs, ranged

MIN_PIECE_BYTES = 16
PIECE_BYTES_PER_POSITION = 64


@dataclass(frozen=True)
class DataConfig:
    """Training data and its order."""

    num_streams: int = ranged(-1, "leave it out", least=1, most=2**20, unset=-1)
    """Number of streams S. It decides the order of the tokens, on every mesh. -1: one per row of the global batch,
    resolved at the first start and kept in the checkpoints."""
    shuffle: bool = True
    """Whether to permute the pieces, differently in each epoch."""
    seed: int = ranged(0, "write a number from 0", least=0, most=2**63 - 1)
    """Seed of the permutation and of the mixture of sources."""
    max_piece_bytes: int = ranged(-1, "leave it out: -1 means 64 x training.seq_len", least=MIN_PIECE_BYTES, unset=-1)
    """Maximum size of a piece. Longer documents are cut into several pieces, at line ends if possible.
    -1: 64 x training.seq_len."""
    packing: Literal["concatenate", "none"] = "concatenate"
    """concatenate: fill each sequence with consecutive documents. none: start a sequence with each piece (a document or
    a part of a long one), pad and mask the rest of the piece's last sequence."""
    document_mask: bool = False
    """Whether attention stays inside a document and positions restart at each document."""
    add_bos: bool = False
    """Whether each document starts with the tokenizer's BOS token."""
    add_eos: bool = True
    """Whether each document ends with the tokenizer's EOS token, if it has one."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Bad rows: error stops the run at the step that needs the row; skip skips and counts the row."""
    max_bad_rows: int = ranged(100, "0 stops at the first bad row", least=0)
    """With on_bad_row = "skip": the run stops if more rows than this are bad."""
    num_workers: int = ranged(-1, "0 prepares data in a thread", least=0, unset=-1)
    """Processes per rank that tokenize and pack, at most one for each stream of the rank. 0: a thread of the training
    process. -1: 1 on CUDA if a source holds text, else 0."""
    ledger: bool = False
    """Whether to record the origin of each sequence in <dump_folder>/ledger."""
    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Corpora to train on: [[data.sources]] tables."""


NEEDS = {
    "seed": Needs(
        "data.shuffle = true or several data.sources", lambda section: section.shuffle or len(section.sources) > 1
    ),
    "max_bad_rows": Needs('data.on_bad_row = "skip"', lambda section: section.on_bad_row == "skip"),
}
"""See Needs."""


@dataclass(frozen=True)
class ValidationConfig:
    """Loss on held-out data: [[validation.sources]] tables, with the keys of [[data.sources]].

    Each source is read once, unshuffled; the other settings are those of [data].
    """

    enable: bool = False
    """Whether to validate after every interval-th step and after the last step."""
    interval: int = ranged(1000, "1 validates every step", least=1)
    """Steps between validations."""
    steps: int = ranged(-1, "leave it out", least=1, unset=-1)
    """Maximum batches of training.global_batch_size sequences per source; -1: all of each source."""
    sources: tuple[SourceConfig, ...] = ()
    """Corpora to validate on, each read once and unshuffled: [[validation.sources]] tables."""


VALIDATION_NEEDS = dict.fromkeys(
    ("interval", "steps", "sources"), Needs("validation.enable = true", lambda section: section.enable)
)
"""See Needs."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of text sources."""

    path: str = ""
    """A tokenizer.json or its folder. Empty: the tokenizer in the folder of the token files, if any (kind tokens), or
    one that is trained on the corpus (python-stdlib)."""
    bos: str = ""
    """Token that starts a document; default: from the tokenizer_config.json beside the tokenizer, if any."""
    eos: str = ""
    """Token that ends a document; default: from the tokenizer_config.json beside the tokenizer, if any."""
    chat_template: str = ""
    """Jinja file that turns messages into text; default: chat_template.jinja beside the tokenizer, or the one in its
    tokenizer_config.json, if any. Stored with the run, and exported."""
