"""Read a TOML file together with the files that it extends; remember which file sets each key."""

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import tomli

from titanlite.config.lengths import LENGTHS, UNSET, override_lengths
from titanlite.runtime.errors import Problem
from titanlite.runtime.json_files import JsonError, check_depth, read_regular
from titanlite.runtime.plugins import split_entry
from titanlite.runtime.text import ascii_form

CONFIG_FILE = "job.config_file"
"""The option for the file, beside the first argument; and its name in problems. Not a key."""

EXTENDS = "extends"
"""The key at the top of a file that names the files it extends."""

SHIPPED = Path(__file__).parents[1] / "configs"
"""The configurations that come with titanlite; their names without .toml are valid wherever a path is."""

MAX_FILES = 16
"""Files in a chain of files that extend each other."""


@dataclass(frozen=True)
class Content:
    """The entries of a file, merged with those of its bases, without `extends`.

    tables: as written; not checked. files: full key -> the file that sets it; for an entry that is no table, its name.
    """

    tables: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def read_file(path: str, problems: list[Problem]) -> Content | None:
    """The content of a file and its bases; None if one of them cannot be read (adds the reason to `problems`)."""
    return _read(path, path, (), {}, problems)


def _read(
    name: str, path: str, chain: tuple[str, ...], known: dict[str, Content], problems: list[Problem]
) -> Content | None:
    """As read_file. chain: the files that lead to `path`; the last one calls it `name`. known: content by path."""
    if path in known:
        return known[path]
    content = _parse_file(name, path, chain, problems)
    if content is None:
        return None
    bases = content.pop(EXTENDS, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base and "\0" not in base for base in bases):
        rule, remedy = "the path of a TOML file, or an array of paths", f'write for example {EXTENDS} = "base.toml"'
        problems.append(Problem(EXTENDS, bases, rule, remedy, path))
        return None
    _plugins_beside(content, config_path(path).absolute().parent)
    merged = Content()
    for base in bases:
        found = _read(base, beside(config_path(path).parent, base), (*chain, path), known, problems)
        if found is None:
            return None
        merged = _overridden(merged, found)
    known[path] = _overridden(merged, Content(content, dict.fromkeys(_keys(content), path)))
    return known[path]


def _overridden(base: Content, over: Content) -> Content:
    """The content of both; a table is merged by key, and any other value of `over` replaces that of `base`.

    A length in `over` also replaces the same length by another key, as on the command line.
    """
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in base.tables.items()}
    parts = {key: key.partition(".") for keys in LENGTHS for key in keys}
    lengths = {key for key, (name, _, part) in parts.items() if _table(over.tables, name).get(part, UNSET) != UNSET}
    override_lengths({name: table for name, table in tables.items() if isinstance(table, dict)}, lengths)
    for name, table in over.tables.items():
        below = tables.get(name)
        tables[name] = below | table if isinstance(table, dict) and isinstance(below, dict) else table
    files = base.files | over.files
    return Content(tables, {key: files[key] for key in _keys(tables)})


def _keys(tables: Mapping[str, Any]) -> list[str]:
    """The full keys in the tables of a file; for an entry that is no table, its name."""
    keys: list[str] = []
    for name, table in tables.items():
        keys += [f"{name}.{key}" for key in table] if isinstance(table, dict) else [name]
    return keys


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tables.get(name)
    return table if isinstance(table, dict) else {}


def beside(folder: Path, base: str) -> str:
    """The path of a configuration that a file in `folder` names: beside it, or else a shipped one."""
    path = folder / os.path.expanduser(base)
    return str(SHIPPED / f"{base}.toml" if base in shipped_names() and not path.is_file() else path)


def _plugins_beside(content: Mapping[str, Any], folder: Path) -> None:
    """Make paths in job.plugins, which are relative to the file in `folder`, absolute."""
    job = _table(content, "job")
    if isinstance(job.get("plugins"), list):
        content["job"]["plugins"] = [
            str(folder / os.path.expanduser(item))
            if isinstance(item, str) and split_entry(item)[0].endswith(".py")
            else item
            for item in job["plugins"]
        ]


def _parse_file(name: str, path: str, chain: tuple[str, ...], problems: list[Problem]) -> dict[str, Any] | None:
    """The entries of one file, as in _read."""

    def refuse(rule: str, remedy: str) -> None:
        if chain:
            problems.append(Problem(EXTENDS, name, f"{rule} ({path})", remedy, chain[-1]))
        else:
            problems.append(Problem(CONFIG_FILE, name, rule, remedy))

    if not path or "\0" in path:
        refuse("the path of a TOML file", f"give the path of a TOML file, or one of {', '.join(shipped_names())}")
        return None
    places = [os.path.realpath(config_path(file)) for file in (*chain, path)]
    if places[-1] in places[:-1]:
        refuse(f"no cycle: {' > '.join([*chain, path])}", f"remove {EXTENDS} from one of these files")
        return None
    if len(chain) >= MAX_FILES:
        refuse(f"at most {MAX_FILES} files in a chain", "merge some of the files")
        return None
    try:
        text = read_regular(config_path(path))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        refuse(f"a readable TOML file ({reason}), or one of {', '.join(shipped_names())}", _similar(name, path))
        return None
    except JsonError as error:
        refuse(f"a TOML file; it {error}", "save it as a file, and give the file's path: every rank reads the file")
        return None
    except ValueError as error:
        refuse("the path of a TOML file", f"fix the path: {error}")
        return None
    try:
        content = tomli.loads(text.decode("utf-8-sig"))
        check_depth(content)
    except UnicodeDecodeError as error:
        refuse("a file in UTF-8", f"save it as UTF-8: byte {error.start} is not")
    except JsonError as error:
        refuse(f"valid TOML; it {error}", "fix the file: its tables are too deep")
    except RecursionError:
        refuse("valid TOML", "fix the file: its arrays or tables are too deep")
    except tomli.TOMLDecodeError as error:
        refuse("valid TOML", f"fix the file: {error}{_look_alike(error)}")
    except ValueError as error:
        refuse("valid TOML", f"fix the file: {error}")
    else:
        return content
    return None


def _look_alike(error: tomli.TOMLDecodeError) -> str:
    """A sentence about the character that looks like ASCII and is not, in the line of the error; "" without one. Before
    the place of the error it is a quote, which did not end a text."""
    begin = error.pos - error.colno + 1
    line = error.doc[begin:].partition("\n")[0]
    column = error.colno - 1
    later = [n for n in range(column, len(line)) if "#" not in line[column:n] and ascii_form(line[n]) != line[n]]
    earlier = [n for n in range(column) if line[n] not in "\"'" and ascii_form(line[n]) in ("'", '"')]
    for n in [*later[:1], *earlier[-1:]]:
        form = ascii_form(line[n])
        instead = {"": "remove it", " ": "type a space"}.get(form, f"type {form}")
        name = f"{unicodedata.name(line[n], 'a character')} (U+{ord(line[n]):04X})"
        return f". {name} at line {error.lineno}, column {n + 1}: {instead}"
    return ""


def _similar(name: str, path: str) -> str:
    """The remedy of a file that does not exist. name: as written; of the file `path`."""
    folder = config_path(path).parent
    # os.path: no error for long names
    files = [file for file in folder.glob("*.toml") if file.is_file()] if os.path.isdir(folder) else []
    known = {shipped: shipped for shipped in shipped_names()}
    known |= {file.stem: str(Path(name).with_name(file.name)) for file in files}
    close = get_close_matches(Path(path).stem, known, 1)
    return f"did you mean {known[close[0]]}?" if close else "give the path of a TOML file"


def shipped_names() -> list[str]:
    """Names of the configurations that come with titanlite."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def config_path(name: str) -> Path:
    """The TOML file that `name` means: a path, or the name of a shipped configuration if no such file exists."""
    path = Path(os.path.expanduser(name))
    return SHIPPED / f"{name}.toml" if name in shipped_names() and not path.is_file() else path
