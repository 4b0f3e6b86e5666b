"""One source: a [[data.sources]] or [[validation.sources]] table."""

from dataclasses import dataclass
from typing import Literal

from titanlite.runtime.errors import ranged


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] table."""

    kind: str = "python-stdlib"
    """What the files are. hf: a dataset of the Hugging Face hub, or a folder in its layout. python-stdlib: the *.py of
    the running interpreter's standard library, no path needed."""
    path: str = ""
    """File, folder or glob (** for any depth); a folder means all files of the kind below it. hf: a folder, or a name
    on the hub like "user/dataset"."""
    field: str = ""
    """jsonl, parquet, hf: the field that holds the text; default "text"."""
    name: str = ""
    """Name in messages; default: the kind and the path."""
    document: Literal["", "file", "paragraph", "line"] = ""
    """text: what one document is; default "file". Paragraphs are parted by blank lines."""
    dtype: Literal["", "uint16", "uint32"] = ""
    """tokens: the type of the numbers in a raw little-endian .bin file; a .npy file says it itself."""
    split: str = ""
    """hf: which of the dataset's splits. python-stdlib: "train" or "validation", for which every 20th file is held out.
    Default "train"."""
    subset: str = ""
    """hf: which configuration of the dataset; default: its default one."""
    revision: str = ""
    """hf: branch, tag or commit on the hub; default: its main branch. What it is at the start holds for the run."""
    streaming: bool = True
    """hf: read the files where they lie, in blocks of rows; false: turn them into Arrow files on disk first."""
    weight: float = ranged(-1.0, "write its share of the sequences, or remove the source", above=0, unset=-1)
    """Its share of the sequences, beside the weights of the other sources. Given for none of them: their sizes."""
    epochs: int = ranged(-1, "leave it out", least=1, unset=-1)
    """How often it is read: a run ends when such a source has. -1: for ever."""
