"""Sources of text and tokens: what may be configured, and which files it means."""

import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanlite.runtime.errors import Problem, require


@dataclass(frozen=True)
class SourceConfig:
    """One [[data.sources]] table."""

    kind: Literal["text", "jsonl", "parquet", "tokens", "python-stdlib"] = "python-stdlib"
    """What the files are. python-stdlib: the *.py of the running interpreter's standard library, no path needed."""
    path: str = ""
    """File, folder or glob (** for any depth); a folder means all files of the kind below it."""
    field: str = ""
    """jsonl, parquet: the field that holds the text; default "text"."""
    name: str = ""
    """Name in messages; default: the kind and the path."""
    document: Literal["", "file", "paragraph", "line"] = ""
    """text: what one document is; default "file". Paragraphs are parted by blank lines."""
    dtype: Literal["", "uint16", "uint32"] = ""
    """tokens: the type of the numbers in a raw little-endian .bin file; a .npy file says it itself."""
    split: Literal["", "train", "validation"] = ""
    """python-stdlib: which part of its files; default "train". Every 20th file is held out for "validation"."""


SUFFIXES: dict[str, tuple[str, ...]] = {
    "text": (".txt", ".md"),
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tokens": (".npy", ".bin"),
    "python-stdlib": (".py",),
}
"""Per kind, the files that a folder stands for."""

KINDS_WITH: dict[str, tuple[str, ...]] = {
    "field": ("jsonl", "parquet"),
    "document": ("text",),
    "dtype": ("tokens",),
    "split": ("python-stdlib",),
    "path": ("text", "jsonl", "parquet", "tokens"),
}
"""Per key, the kinds that have it."""

HELD_OUT_EVERY = 20
"""python-stdlib: one file in so many belongs to the split "validation"."""


def source_name(source: SourceConfig) -> str:
    """What a source is called in messages."""
    if source.name:
        return source.name
    if source.kind == "python-stdlib":
        return f"python-stdlib ({source.split or 'train'})"
    return f"{source.kind} {source.path}"


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
    if problems or not looks_at_files:
        return problems
    files = find_files(source) if source.path or source.kind == "python-stdlib" else []
    if source.kind == "tokens" and files:
        problems += _check_tokens(source, key, files)
    return problems or require(bool(files), *_no_files(source, key))


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
        return [Problem(f"{key}.path", source.path, rule, f"{other[0]} is neither: make it by titanlite.data.tokenize")]
    if raw and not source.dtype:
        remedy = f'write dtype = "uint16" or "uint32", whichever {raw[0].name} was written as'
        return [Problem(f"{key}.dtype", source.dtype, "required for .bin files", remedy)]
    if source.dtype and not raw:
        remedy = f"leave it out: {files[0].name} says it itself"
        return [Problem(f"{key}.dtype", source.dtype, "only for .bin files", remedy)]
    return []
