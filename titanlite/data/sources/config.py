"""Configuration of one source: a [[data.sources]] or [[validation.sources]] table."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from titanlite.runtime.settings import Affects, setting

CHAT = "chat"
"""The kind of sources of conversations."""

CONVERSATION_FIELDS = ("messages", "conversations")
"""Fields of a row that hold the turns of a conversation."""


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] table."""

    AFFECTS: ClassVar[Affects] = "facts"

    kind: str = "python-stdlib"
    """Type of the source. hf: a dataset of the Hugging Face hub, or a folder in its layout. python-stdlib: the *.py
    files of the running interpreter's standard library, without a path."""
    path: str = setting("", per_node=True, is_path=True)
    """File, folder or glob (** for any depth), or its address in an object store, like s3://bucket/folder. A folder
    includes all files of the kind below it. hf: a folder, or a name on the hub like "user/dataset"."""
    field: str = ""
    """jsonl, parquet, csv, arrow, hf: field (column) of the text; default "text"."""
    name: str = setting("", per_node=True)
    """Name in messages; default: the kind and the path."""
    document: Literal["", "file", "paragraph", "line"] = ""
    """text: unit of one document; default "file". Blank lines separate paragraphs."""
    dtype: Literal["", "uint16", "uint32"] = ""
    """tokens: type of the ids in raw little-endian files, which do not contain it."""
    eos: int = setting(-1, "leave it out", least=0, unset=-1)
    """tokens: id that separates documents, in files that do not record where documents start, for data.document_mask.
    -1: not known."""
    split: str = ""
    """hf: split of the dataset. python-stdlib: "train" or "validation", which is every 20th file. Default "train"."""
    subset: str = ""
    """hf: configuration of the dataset; default: the dataset's default configuration."""
    revision: str = ""
    """hf: branch, tag or commit on the hub; default: the main branch. Resolved to a commit at the first start."""
    streaming: bool = True
    """hf: whether to stream the files in blocks of rows; false: convert them to Arrow files on disk first."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """chat: turns whose tokens count in the loss."""
    too_long: Literal["truncate", "skip"] = "truncate"
    """chat: conversations of more than training.seq_len + 1 tokens: truncate keeps their beginning, skip leaves them
    out. Both count them."""
    weight: float = setting(-1.0, "write its share of the sequences, or remove the source", least=0, unset=-1)
    """Share of the sequences, relative to the weights of the other sources. Default: proportional to the sizes. 0: only
    stages that give it a weight read it."""
    epochs: int = setting(-1, "leave it out", least=1, unset=-1)
    """Number of epochs; the run ends when a finite source is exhausted. -1: no limit."""

    @property
    def is_chat(self) -> bool:
        """Whether it holds conversations, not documents."""
        return self.kind == CHAT
