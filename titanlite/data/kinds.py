"""Which kind of source files are, as their names say."""

import os

from titanlite.data.sources import SUFFIXES, SourceConfig, find_files
from titanlite.data.token_files import MANIFEST
from titanlite.runtime.errors import Problem


def source_from_path(path: str, key: str) -> SourceConfig | Problem:
    """The source of a file, a folder or a glob, of the one kind that the files are. key: of a problem with that."""
    expanded = os.path.expanduser(path)
    if os.path.isfile(os.path.join(expanded, MANIFEST)):
        return SourceConfig("tokens", path)
    known = [kind for kind in SUFFIXES if kind != "python-stdlib"]
    if os.path.isdir(expanded):
        kinds = [kind for kind in known if find_files(SourceConfig(kind, path))]
    else:
        files = [str(file).lower() for file in find_files(SourceConfig("text", path))]
        if not files:
            remedy = f"nothing matches {os.path.join(os.getcwd(), expanded)}: mend the path"
            return Problem(key, path, "a file, a folder or a glob that matches files", remedy)
        kinds = [kind for kind in known if any(file.endswith(SUFFIXES[kind]) for file in files)]
    if len(kinds) == 1:
        return SourceConfig(kinds[0], path)
    rule = f"files of one kind: {', '.join(suffix for kind in known for suffix in SUFFIXES[kind])}"
    remedy = "name those of one kind by a glob" if kinds else "say their kind by the keys of a source, kind and path"
    return Problem(key, path, f"{rule}; these are {' and '.join(kinds) or 'none of them'}", remedy)
