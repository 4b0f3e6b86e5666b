"""Datasets of the Hugging Face hub, and folders in its layout: which files a source means. Found by `datasets`."""

import json
import os
import re
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import GZIP_DAMAGE, json_text, open_lines
from titanlite.data.sources.parquet import text_type
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.cache import built_once, cache_folder, content_key
from titanlite.runtime.errors import ConfigError, Problem, require
from titanlite.runtime.retry import http_status, is_transient, reason

if TYPE_CHECKING:
    from datasets import DatasetBuilder

FORMAT_VERSION = 1

STREAMED_SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")
"""Files that can be streamed; what else `datasets` knows, it turns into Arrow files first."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DATASET_RULE = 'a folder in the layout of the hub, or the name of a dataset on it, like "user/dataset"'
FULL_COMMIT = re.compile("[0-9a-f]{40}")
CHECKED_ROWS = 100
"""JSON lines: so many rows of the first file are looked at for the field before a run starts."""


class HubFiles(NamedTuple):
    """The data files of one split, in order: paths, or hf:// URLs with the commit in them. commit: "" if local."""

    files: tuple[str, ...]
    commit: str


def hub_folder(source: SourceConfig) -> Path | None:
    """The folder of an hf source; None if its path is a name on the hub."""
    path = os.path.abspath(os.path.expanduser(source.path))
    return Path(path) if source.path and os.path.isdir(path) else None


def check_hub_name(source: SourceConfig, key: str) -> list[Problem]:
    """Problems of path and revision, without asking the hub which datasets it has."""
    rule = DATASET_RULE
    if hub_folder(source) is not None:
        remedy = f"leave it out: {source.path} is a folder, which has the files that it has"
        return require(not source.revision, f"{key}.revision", source.revision, "only for a name on the hub", remedy)
    full = Path(os.path.expanduser(source.path)).absolute()
    if full.is_file():
        remedy = 'write its folder, or read the file itself with kind = "jsonl" or "parquet"'
        return [Problem(f"{key}.path", source.path, rule, remedy)]
    remedy = f"there is no folder {full}: mend the path (relative to the current folder), or the name"
    return require(bool(HUB_NAME.fullmatch(source.path)), f"{key}.path", source.path, rule, remedy)


def check_hub(source: SourceConfig, key: str) -> list[Problem]:
    """Problems of an hf source whose path is a folder; what a name on the hub means is found out by `hub_files`."""
    if hub_folder(source) is None:
        return []
    try:
        _check_fields(source, key, _resolve(source, key))
    except ConfigError as error:
        return list(error.problems)
    return []


def hub_files(source: SourceConfig) -> HubFiles:
    """What the source means. Raises ConfigError. A commit of the hub is looked up once and kept in the cache folder."""
    if not FULL_COMMIT.fullmatch(source.revision):
        return _resolve(source, "data.sources")
    data = [os.environ.get("HF_ENDPOINT", ""), source.path, source.revision, source.subset, source_split(source)]
    checked = [source.field or "text", source.streaming]

    def build(into: Path) -> None:
        found = _resolve(source, "data.sources")
        _check_fields(source, "data.sources", found)
        (into / "files.json").write_text(json.dumps(found))

    folder = cache_folder() / "hub" / content_key(["hub", FORMAT_VERSION, data, checked])
    built = built_once(folder, f"the list of files of hf {source.path}", build)
    files, commit = json.loads((built / "files.json").read_text())
    return HubFiles(tuple(files), commit)


def source_split(source: SourceConfig) -> str:
    """The split that an hf source means."""
    return source.split or "train"


def open_file(url: str) -> IO[bytes]:
    """A path or an hf:// URL, open for reading. Raises OSError and what the hub's client raises."""
    if "://" not in url:
        return open(url, "rb")
    import fsspec

    opened: IO[bytes] = fsspec.open(url, "rb").open()
    return opened


def load_builder(source: SourceConfig, key: str = "data.sources") -> "DatasetBuilder":
    """The `datasets` builder of the source's subset. Raises ConfigError."""
    datasets = _datasets(key)
    folder = hub_folder(source)
    where = str(folder) if folder is not None else source.path
    try:
        return datasets.load_dataset_builder(where, source.subset or None, revision=source.revision or None)
    except Exception as error:  # the library raises many kinds
        raise ConfigError([_problem_of(error, source, key, where)]) from None


def _problem_of(error: Exception, source: SourceConfig, key: str, where: str) -> Problem:
    """What `datasets` means by an error."""
    if is_transient(error):
        rule = "a folder that exists, or a dataset on a hub that can be reached"
        remedy = "see whether this machine can, or download the dataset and write its folder"
        return Problem(f"{key}.path", source.path, rule, f"{reason(error)}: {remedy}")
    if isinstance(error, FileNotFoundError) or http_status(error) in (401, 403, 404):
        rule = "a folder in the hub's layout that holds data files, or the name of a dataset on the hub"
        private = "" if hub_folder(source) is not None else ", the revision, or HF_TOKEN where it is private"
        return Problem(f"{key}.path", source.path, rule, f"{reason(error)}: mend the path{private}")
    known = _known_subsets(where, source.revision)
    if known and source.subset not in known:
        remedy = f"write subset = {' or '.join(map(repr, known[:20]))}"
        return Problem(f"{key}.subset", source.subset, "one of the dataset's subsets", remedy)
    return Problem(f"{key}.path", source.path, "a dataset that `datasets` can read", reason(error))


def _datasets(key: str) -> Any:
    """The library, imported when it is needed: it takes a second, and is needed by this kind alone."""
    try:
        import datasets
    except ImportError:
        rule = "needs the Python package datasets"
        raise _refused(key, "kind", "hf", rule, 'pip install datasets, or "titanlite[hf]"') from None
    datasets.disable_progress_bars()
    return datasets


def _known_subsets(where: str, revision: str) -> list[str]:
    import datasets

    try:
        return list(datasets.get_dataset_config_names(where, revision=revision or None))
    except Exception:  # the first error is the one to tell of
        return []


def _resolve(source: SourceConfig, key: str) -> HubFiles:
    """Ask `datasets` for the files. Raises ConfigError."""
    builder = load_builder(source, key)
    data_files: dict[str, list[str]] = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    split = source_split(source)
    if split not in data_files:
        remedy = f"write split = {' or '.join(map(repr, data_files))}"
        raise _refused(key, "split", source.split, "one of the dataset's splits", remedy)
    files = tuple(str(file) for file in data_files[split])
    _require_inside(source, key, files)
    if source.streaming:
        other = [file for file in files if not file.lower().endswith(STREAMED_SUFFIXES)]
        rule = f"only for files of {', '.join(STREAMED_SUFFIXES)}"
        problems = require(not other, f"{key}.streaming", True, rule, f"streaming = false, for {(other or ' ')[0]}")
        if problems:
            raise ConfigError(problems)
    commit = "" if hub_folder(source) is not None else files[0].partition("@")[2].partition("/")[0]
    return HubFiles(files, commit)


def _require_inside(source: SourceConfig, key: str, files: tuple[str, ...]) -> None:
    """Raises ConfigError where a dataset's own list of files (in its README.md) leads out of the dataset."""
    folder = hub_folder(source)
    for file in files:
        if folder is not None:
            # Links are followed: a folder that the hub's own client has filled consists of them.
            inside = "://" not in file and Path(os.path.abspath(file)).is_relative_to(folder)
        else:
            inside = file.startswith(f"hf://datasets/{source.path}@") and ".." not in file.split("/")
        if not inside:
            rule = "a dataset whose files lie inside it"
            raise _refused(key, "path", source.path, rule, f"{file} does not: mend the README.md that names it")


def _check_fields(source: SourceConfig, key: str, found: HubFiles) -> None:
    """Raises ConfigError where the first file shows that there is no such text. What is damaged is a bad row, later."""
    file, field = found.files[0], source.field or "text"
    try:
        if file.lower().endswith(".parquet"):
            fault = _parquet_fault(file, field)
        elif file.lower().endswith(STREAMED_SUFFIXES):
            fault = _json_fault(file, field)
        else:
            fault = ""
    except OSError as error:
        raise _refused(key, "path", source.path, "files that can be read", f"{file}: {reason(error)}") from error
    if fault:
        raise _refused(key, "field", source.field, "a field of text", f"{file}: {fault}")


def _parquet_fault(file: str, field: str) -> str:
    """What is wrong with the column, "" if nothing is; also "" where the file cannot tell."""
    import pyarrow
    import pyarrow.parquet

    with open_file(file) as opened:
        try:
            schema = pyarrow.parquet.ParquetFile(opened).schema_arrow
        except (pyarrow.ArrowException, OSError):
            return ""
    try:
        text_type(schema, field)
    except BadRowError as bad:
        return str(bad)
    return ""


def _json_fault(file: str, field: str) -> str:
    """The first row's fault if none of the first rows has a text; "" otherwise, and for a file without rows."""
    faults = []
    with open_file(file) as opened, open_lines(opened, file) as lines:
        try:
            for line in islice(filter(bytes.strip, lines), CHECKED_ROWS):
                faults.append(_row_fault(line, field))
                if not faults[-1]:
                    return ""
        except GZIP_DAMAGE:
            return ""
    return faults[0] if faults else ""


def _row_fault(line: bytes, field: str) -> str:
    try:
        json_text(line, field)
    except BadRowError as bad:
        return str(bad)
    return ""


def _refused(key: str, name: str, value: Any, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(f"{key}.{name}", value, rule, remedy)])
