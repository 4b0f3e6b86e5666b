"""Sources of text and tokens: where documents come from, and what makes a row bad."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] table."""

    kind: Literal["text", "jsonl", "parquet", "tokens", "python-stdlib"] = "python-stdlib"
    """What the files are. python-stdlib: the *.py of the running interpreter's standard library, no path needed."""
    path: str = ""
    """File, folder or glob; a folder means all files of the kind below it."""
    field: str = ""
    """jsonl, parquet: the field that holds the text; default "text"."""
    name: str = ""
    """Name in messages; default: the kind and the path."""
    document: Literal["", "file", "paragraph", "line"] = ""
    """text: what one document is; default "file"."""
    dtype: Literal["", "uint16", "uint32"] = ""
    """tokens: the type of the numbers in a raw .bin file."""
    split: Literal["", "train", "validation"] = ""
    """python-stdlib: which part of its files; default "train"."""
