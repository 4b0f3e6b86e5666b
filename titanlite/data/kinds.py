"""The kinds of sources: one line of the table each."""

import os
from collections.abc import Sequence

from titanlite.data.sources.base import Source, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.hf import HuggingFace
from titanlite.data.sources.jsonl import Jsonl
from titanlite.data.sources.parquet import Parquet
from titanlite.data.sources.python_stdlib import PythonStdlib
from titanlite.data.sources.text import Text
from titanlite.data.sources.tokens import MANIFEST, Tokens
from titanlite.runtime.errors import Problem

KINDS: dict[str, type[Source]] = {
    Text.kind: Text,
    Jsonl.kind: Jsonl,
    Parquet.kind: Parquet,
    HuggingFace.kind: HuggingFace,
    Tokens.kind: Tokens,
    PythonStdlib.kind: PythonStdlib,
}


def open_source(config: SourceConfig) -> Source:
    """The source of a table, as its kind reads it."""
    return KINDS[config.kind](config)


def text_sources(configs: Sequence[SourceConfig]) -> list[TextSource]:
    """The sources of tables that all are of text which can be indexed."""
    opened = [open_source(config) for config in configs]
    assert all(isinstance(source, TextSource) for source in opened)
    return [source for source in opened if isinstance(source, TextSource)]


def source_names(configs: Sequence[SourceConfig]) -> tuple[str, ...]:
    """What each of them is called, each by another name: of several of one name the later ones get a number."""
    names: list[str] = []
    for config in configs:
        name = open_source(config).name
        same = (f"{name} {number}" if number > 1 else name for number in range(1, len(configs) + 1))
        names.append(next(candidate for candidate in same if candidate not in names))
    return tuple(names)


def source_from_path(path: str, key: str) -> SourceConfig | Problem:
    """The source of a file, a folder or a glob, of the one kind that the files are. key: of a problem with that."""
    expanded = os.path.expanduser(path)
    if os.path.isfile(os.path.join(expanded, MANIFEST)):
        return SourceConfig(Tokens.kind, path)
    known = [kind for kind in KINDS.values() if kind.needs_path and kind.suffixes]
    if os.path.isdir(expanded):
        kinds = [kind for kind in known if kind(SourceConfig(kind.kind, path)).files()]
    else:
        files = [str(file).lower() for file in Text(SourceConfig(Text.kind, path)).files()]
        if not files:
            remedy = f"nothing matches {os.path.join(os.getcwd(), expanded)}: mend the path"
            return Problem(key, path, "a file, a folder or a glob that matches files", remedy)
        kinds = [kind for kind in known if any(file.endswith(kind.suffixes) for file in files)]
    if len(kinds) == 1:
        return SourceConfig(kinds[0].kind, path)
    rule = f"files of one kind: {', '.join(suffix for kind in known for suffix in kind.suffixes)}"
    remedy = "name those of one kind by a glob" if kinds else "say their kind by the keys of a source, kind and path"
    found = " and ".join(kind.kind for kind in kinds) or "none of them"
    return Problem(key, path, f"{rule}; these are {found}", remedy)
