"""Sources of text and tokens: what may be configured, and which files it means."""

import glob
import math
import os
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanlite.runtime.errors import Problem, require

Kind = Literal["text", "jsonl", "parquet", "hf", "tokens", "python-stdlib"]


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] table."""

    kind: Kind = "python-stdlib"
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
    weight: float = -1.0
    """Its share of the sequences, beside the weights of the other sources. Given for none of them: their sizes."""
    epochs: int = -1
    """How often it is read: a run ends when such a source has. -1: for ever."""


SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
    "python-stdlib": (".py",),
}
"""Per kind, the files that a folder stands for."""

KINDS_WITH: dict[str, tuple[str, ...]] = {
    "field": ("jsonl", "parquet", "hf"),
    "document": ("text",),
    "dtype": ("tokens",),
    "split": ("hf", "python-stdlib"),
    "subset": ("hf",),
    "revision": ("hf",),
    "path": ("text", "jsonl", "parquet", "hf", "tokens"),
}
"""Per key, the kinds that have it."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

HELD_OUT_EVERY = 20
"""python-stdlib: one file in so many belongs to the split "validation"."""


def source_name(source: SourceConfig) -> str:
    """What a source is called in messages."""
    if source.name:
        return source.name
    if source.kind == "python-stdlib":
        return f"python-stdlib ({source.split or 'train'})"
    return f"{source.kind} {source.path}"


def size_unit(source: SourceConfig) -> str:
    """What the size of its corpus is counted in; "" where it is not known."""
    if source.kind == "hf" and source.streaming:
        return ""
    return "tokens" if source.kind == "tokens" else "bytes"


def source_names(sources: Sequence[SourceConfig]) -> tuple[str, ...]:
    """What each of them is called, each by another name: of several of one name the later ones get a number."""
    names: list[str] = []
    for source in sources:
        name = source_name(source)
        same = (f"{name} {number}" if number > 1 else name for number in range(1, len(sources) + 1))
        names.append(next(candidate for candidate in same if candidate not in names))
    return tuple(names)


def find_files(source: SourceConfig) -> list[Path]:
    """The files that a source means, sorted by path; [] where there are none. Hidden files are not found.

    python-stdlib: all candidates of both splits; which of them are UTF-8 is known once they are read.
    """
    if source.kind == "python-stdlib":
        return _python_stdlib_files()
    path = os.path.expanduser(source.path)
    if os.path.isfile(path):
        return [Path(path).absolute()]
    if os.path.isdir(path):
        below = glob.iglob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
        found = [file for file in below if file.lower().endswith(SUFFIXES[source.kind])]
    else:
        found = glob.glob(path, recursive=True)
    return sorted({Path(file).absolute() for file in found if os.path.isfile(file)}, key=lambda file: file.as_posix())


def _python_stdlib_files() -> list[Path]:
    """The interpreter's own *.py without tests and installed packages, sorted by their path below the folder."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, names, file_names in os.walk(root):
        names[:] = [name for name in names if name not in ("site-packages", "dist-packages", "test", "__pycache__")]
        files += [Path(folder, name) for name in file_names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def in_split(source: SourceConfig, usable_files: Sequence[Path]) -> list[Path]:
    """Those of the python-stdlib files that are UTF-8 and not empty which belong to the source's split."""
    held_out = source.split == "validation"
    return [file for n, file in enumerate(usable_files) if (n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out]


def check_source(source: SourceConfig, key: str, *, looks_at_files: bool = True) -> list[Problem]:
    """Problems of the table at `key` ("data.sources.0"); looks_at_files: at which files there are, not into them."""
    problems: list[Problem] = []
    for name, kinds in KINDS_WITH.items():
        value = getattr(source, name)
        problems += require(
            not value or source.kind in kinds,
            f"{key}.{name}",
            value,
            f"only for kind = {' or '.join(repr(kind) for kind in kinds)}, and this is {source.kind!r}",
            f"leave {name} out, or change {key}.kind",
        )
    problems += require(
        source.epochs == -1 or source.epochs >= 1, f"{key}.epochs", source.epochs, "-1 or at least 1", "leave it out"
    )
    problems += require(
        source.weight == -1 or 0 < source.weight < math.inf,
        f"{key}.weight",
        source.weight,
        "a positive number",
        "write its share of the sequences, or remove the source",
    )
    problems += require(
        source.streaming or source.kind == "hf",
        f"{key}.streaming",
        source.streaming,
        f"only for kind = 'hf', and this is {source.kind!r}",
        f"leave streaming out, or change {key}.kind",
    )
    if source.kind == "python-stdlib":
        rule, remedy = '"train" or "validation"', "write one of the two, or leave it out"
        problems += require(source.split in ("", "train", "validation"), f"{key}.split", source.split, rule, remedy)
    if source.kind == "hf":
        return problems or _check_hub_name(source, key, looks_at_files=looks_at_files)
    if problems or not looks_at_files:
        return problems
    files = find_files(source) if source.path or source.kind == "python-stdlib" else []
    if source.kind == "tokens" and files:
        problems += _check_tokens(source, key, files)
    return problems or require(bool(files), *_no_files(source, key))


def hub_folder(source: SourceConfig) -> Path | None:
    """The folder of an hf source; None where its path is a name on the hub."""
    path = os.path.abspath(os.path.expanduser(source.path))
    return Path(path) if source.path and os.path.isdir(path) else None


def _check_hub_name(source: SourceConfig, key: str, *, looks_at_files: bool) -> list[Problem]:
    """Problems of what is written for an hf source; which datasets there are is for titanlite.data.hub to find out."""
    rule = 'a folder in the layout of the hub, or the name of a dataset on it, like "user/dataset"'
    if not source.path:
        return [Problem(f"{key}.path", source.path, f"{rule}; required for kind = 'hf'", "write which dataset it is")]
    if not looks_at_files:
        return []
    if hub_folder(source) is not None:
        remedy = f"leave it out: {source.path} is a folder, which has the files that it has"
        return require(not source.revision, f"{key}.revision", source.revision, "only for a name on the hub", remedy)
    full = Path(os.path.expanduser(source.path)).absolute()
    if full.is_file():
        remedy = 'write its folder, or read the file itself with kind = "jsonl" or "parquet"'
        return [Problem(f"{key}.path", source.path, rule, remedy)]
    remedy = f"there is no folder {full}: mend the path (relative to the current folder), or the name"
    return require(bool(HUB_NAME.fullmatch(source.path)), f"{key}.path", source.path, rule, remedy)


def _no_files(source: SourceConfig, key: str) -> tuple[str, str, str, str]:
    """key, value, rule and remedy of a source without files."""
    if source.kind == "python-stdlib":
        folder = sysconfig.get_paths()["stdlib"]
        return f"{key}.kind", source.kind, f"{folder} holds *.py files", "use a text, jsonl or parquet source instead"
    suffixes = " and ".join("*" + suffix for suffix in SUFFIXES[source.kind])
    rule = f"a file, a folder that holds {suffixes}, or a glob that matches files"
    if not source.path:
        return (
            f"{key}.path",
            source.path,
            f"{rule}; required for kind = {source.kind!r}",
            "write where your files are",
        )
    full = os.path.join(os.getcwd(), os.path.expanduser(source.path))
    return f"{key}.path", source.path, rule, f"nothing matches {full}: mend the path (relative to the current folder)"


def _check_tokens(source: SourceConfig, key: str, files: list[Path]) -> list[Problem]:
    raw = [file for file in files if file.suffix.lower() == ".bin"]
    other = [file for file in files if file.suffix.lower() not in SUFFIXES["tokens"]]
    if other:
        rule = ".npy or raw .bin files"
        return [
            Problem(f"{key}.path", source.path, rule, f"{other[0]} is neither: make it by titanlite.tools.tokenize")
        ]
    if raw and not source.dtype:
        remedy = f'write dtype = "uint16" or "uint32", whichever {raw[0].name} was written as'
        return [Problem(f"{key}.dtype", source.dtype, "required for .bin files", remedy)]
    if source.dtype and not raw:
        remedy = f"leave it out: {files[0].name} says it itself"
        return [Problem(f"{key}.dtype", source.dtype, "only for .bin files", remedy)]
    return []
