"""Resolution of an hf source to its data files by the `datasets` library."""

import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from titanlite.data.sources.base import cached_json, fault_problem
from titanlite.data.sources.config import SourceConfig
from titanlite.data.sources.jsonl import Jsonl, json_text, rows_fault
from titanlite.data.sources.parquet import column_fault
from titanlite.data.sources.pieces import BadRowError
from titanlite.runtime.errors import ConfigError, Problem, Rules, UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.logging import format_library
from titanlite.runtime.retry import http_status, is_transient, reason
from titanlite.runtime.waiting import waiting

if TYPE_CHECKING:
    from datasets import DatasetBuilder

FORMAT_VERSION = 1

STREAMED_SUFFIXES = (".parquet", ".json", *Jsonl.suffixes)
"""Files that can be streamed. `datasets` converts other formats to Arrow files first."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DATASET_RULE = 'a folder in the layout of the hub, or the name of a dataset on it, like "user/dataset"'
FULL_COMMIT = re.compile("[0-9a-f]{40}")


class HubFiles(NamedTuple):
    """The data files of a split, in order: paths, or hf:// URLs that include the commit. commit: "" if local."""

    files: tuple[str, ...]
    commit: str


def hub_folder(source: SourceConfig) -> Path | None:
    """The folder of an hf source; None if its path is a name on the hub."""
    path = os.path.abspath(source.path)
    return Path(path) if source.path and os.path.isdir(path) else None


def check_hub_name(source: SourceConfig, key: str) -> list[Problem]:
    """Problems of path and revision, without access to the hub."""
    rules = Rules(key, source)
    if hub_folder(source) is not None:
        rules.needs("revision", not source.revision, "a name on the hub: a local folder has no revisions")
        return rules.problems
    full = Path(source.path).absolute()
    remedy = f"there is no folder {full}: fix the path (relative to the current folder) or the dataset name"
    if full.is_file():
        remedy = 'write its folder, or read the file with kind = "jsonl", "parquet", "csv" or "arrow"'
    rules.require("path", not full.is_file() and HUB_NAME.fullmatch(source.path), DATASET_RULE, remedy)
    return rules.problems


def check_hub(source: SourceConfig, key: str) -> list[Problem]:
    """Problems of the files of an hf source whose path is a folder; [] for a name on the hub, see `hub_files`."""
    if hub_folder(source) is None:
        return []
    try:
        _check_fields(source, key, _resolve(source, key))
    except ConfigError as error:
        return list(error.problems)
    return []


def hub_files(source: SourceConfig, key: str = "data.sources") -> HubFiles:
    """The data files of the hf source at `key`. Raises ConfigError. The cache folder stores the files of a commit."""
    if not FULL_COMMIT.fullmatch(source.revision):
        return _resolve(source, key)
    data = [os.environ.get("HF_ENDPOINT", ""), source.path, source.revision, source.subset, source_split(source)]
    checked = [source.field or "text", source.streaming]

    def resolve() -> HubFiles:
        found = _resolve(source, key)
        _check_fields(source, key, found)
        return found

    facts = [FORMAT_VERSION, data, checked]
    files, commit = cached_json("hub", facts, f"the list of files of hf {source.path}", resolve)
    return HubFiles(tuple(files), commit)


def source_split(source: SourceConfig) -> str:
    """The split of an hf source; default "train"."""
    return source.split or "train"


def open_file(url: str) -> IO[bytes]:
    """Open a path or an hf:// URL for reading. Raises OSError and the errors of the hub's client."""
    if "://" not in url:
        return open_regular(url)
    import fsspec

    opened: IO[bytes] = fsspec.open(url, "rb").open()
    return opened


def load_builder(source: SourceConfig, key: str = "data.sources") -> "DatasetBuilder":
    """The `datasets` builder of the source's subset, whose files are all inside the dataset. Raises ConfigError."""
    datasets = import_datasets()
    folder = hub_folder(source)
    where = str(folder) if folder is not None else source.path
    with waiting(lambda: f"{key}: the description of {where}, on a disk or the hub: without a network, write a folder"):
        if folder is not None:
            _check_cards(source, key, folder)
        try:
            builder: DatasetBuilder = datasets.load_dataset_builder(
                where, source.subset or None, revision=source.revision or None
            )
        except Exception as error:  # the library raises many types
            raise ConfigError([_problem_of(error, source, key, where)]) from None
    for file in _files_of_all_splits(builder):
        if not _is_inside(file, source):
            raise _outside(source, key, file)
    return builder


def require_plain_members(builder: "DatasetBuilder") -> None:
    """Raise UserError if a local zip file has a member whose name `datasets` would take for a path to another file.

    "zip://a::/b.zip" is a chain: the member a of /b.zip. Raises OSError and the errors of `zipfile`, too.
    """
    for file in _files_of_all_splits(builder):
        if "://" in file:
            continue
        with open_file(file) as opened:
            names = zipfile.ZipFile(opened).namelist() if zipfile.is_zipfile(opened) else []
        for name in names:
            if "::" in name:
                raise UserError(
                    f"{file} contains {name!r}, which `datasets` takes for a path to another file: rename it"
                )


def _files_of_all_splits(builder: "DatasetBuilder") -> Iterator[str]:
    """A conversion reads all of them."""
    for files in (builder.config.data_files or {}).values():
        yield from map(str, files)


def _problem_of(error: Exception, source: SourceConfig, key: str, where: str) -> Problem:
    """Convert an error of `datasets` into a Problem."""
    if is_transient(error):
        rule = "an existing folder, or a dataset on a hub that can be reached"
        remedy = "check the network connection to the hub, or download the dataset and write its folder"
        return Problem(f"{key}.path", source.path, rule, f"{reason(error)}: {remedy}")
    if isinstance(error, FileNotFoundError) or http_status(error) in (401, 403, 404):
        rule = "a folder with data files in the hub's layout, or the name of a dataset on the hub"
        private = "" if hub_folder(source) is not None else ", the revision, or HF_TOKEN for a private dataset"
        return Problem(f"{key}.path", source.path, rule, f"{reason(error)}: fix the path{private}")
    known = _known_subsets(where, source.revision)
    if known and source.subset not in known:
        remedy = f"write subset = {' or '.join(map(repr, known[:20]))}"
        return Problem(f"{key}.subset", source.subset, "one of the dataset's subsets", remedy)
    remedy = f"fix the dataset, or use its files with kind = jsonl, parquet or text: {reason(error)}"
    return Problem(f"{key}.path", source.path, "a dataset that `datasets` can read", remedy)


def import_datasets() -> Any:
    """Import `datasets`, which takes a second, when it is needed: without progress bars and without its request to a
    server that counts uses of data, also of local files. Its lines may have names of a stranger."""
    import datasets

    datasets.disable_progress_bars()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    for library in ("datasets", "huggingface_hub"):
        format_library(library)
    return datasets


def _known_subsets(where: str, revision: str) -> list[str]:
    import datasets

    try:
        return list(datasets.get_dataset_config_names(where, revision=revision or None))
    except Exception:  # the caller reports the first error
        return []


def _resolve(source: SourceConfig, key: str) -> HubFiles:
    """List the files of the split with `datasets`. Raises ConfigError."""
    builder = load_builder(source, key)
    data_files: dict[str, list[str]] = {str(name): files for name, files in (builder.config.data_files or {}).items()}
    split = source_split(source)
    if split not in data_files:
        remedy = f"write split = {' or '.join(map(repr, data_files))}"
        raise _config_error(key, "split", source.split, "one of the dataset's splits", remedy)
    files = tuple(str(file) for file in data_files[split])
    if source.streaming:
        for file in files:
            if not file.lower().endswith(STREAMED_SUFFIXES):
                rule = f"only for {', '.join(STREAMED_SUFFIXES)} files"
                raise _config_error(key, "streaming", True, rule, f"write streaming = false, because of {file}")
    commit = "" if hub_folder(source) is not None else files[0].partition("@")[2].partition("/")[0]
    return HubFiles(files, commit)


def _check_cards(source: SourceConfig, key: str, folder: Path) -> None:
    """Raise ConfigError if README.md or .huggingface.yaml give `datasets` a name outside the folder.

    Before `datasets` resolves the names: it would send requests to URLs.
    """
    try:
        outside = names_outside(folder)
    except Exception as error:  # many types for text that is no card
        remedy = f"fix its README.md or .huggingface.yaml: {reason(error)}"
        raise _config_error(key, "path", source.path, "a dataset that `datasets` can read", remedy) from None
    for name in outside:
        if not isinstance(name, str):  # not shown: references of YAML can make it endlessly long
            remedy = (
                f"fix the data_files and data_dir of its README.md or .huggingface.yaml: one is a {type(name).__name__}"
            )
            raise _config_error(key, "path", source.path, "a dataset that `datasets` can read", remedy)
        raise _outside(source, key, name)


def names_outside(folder: Path) -> list[Any]:
    """What README.md and .huggingface.yaml of a local dataset give to `datasets` that is not the name of a file or
    folder inside of it. folder: absolute. Raises errors of many types for text that is no card."""
    return [name for name in _names_in_cards(folder) if not (isinstance(name, str) and _stays_inside(name, folder))]


def _names_in_cards(folder: Path) -> Iterator[Any]:
    """The names of files and folders that the configurations of a local dataset give to `datasets`."""
    import yaml
    from datasets import config
    from huggingface_hub import DatasetCard

    cards = []
    if (folder / config.REPOCARD_FILENAME).is_file():
        cards.append(DatasetCard.load(folder / config.REPOCARD_FILENAME).data.to_dict())
    if (folder / config.REPOYAML_FILENAME).exists():
        with open_regular(folder / config.REPOYAML_FILENAME) as file:
            cards.append(dict(yaml.safe_load(file.read().decode()) or {}))  # `datasets` reads a list of pairs, too
    for card in cards:
        for configuration in card.get("configs") or ():
            if isinstance(configuration, dict):  # `datasets` refuses others
                yield from _names_in(configuration)


def _names_in(configuration: dict[str, Any]) -> Iterator[Any]:
    """Only as deep as `datasets` reads: references of YAML can make a short text endlessly deep. Any can be no str."""
    data_files = configuration.get("data_files") or []
    for entry in data_files if isinstance(data_files, list) else [data_files]:
        paths = entry.get("path") if isinstance(entry, dict) else entry
        yield from paths if isinstance(paths, list) else [paths]
    yield configuration.get("data_dir") or ""


def _stays_inside(name: str, folder: Path) -> bool:
    """Whether `datasets` takes the name for a path in the folder: not for a URL, a chain of URLs or another path."""
    if "://" in name or "::" in name or urlsplit(name).scheme:
        return False
    # Lexically: links of the user to other disks are followed, and "link/.." leads to the parent of another folder.
    return ".." not in name.split("/") and Path(os.path.abspath(folder / name)).is_relative_to(folder)


def _is_inside(file: str, source: SourceConfig) -> bool:
    """Whether a file of the resolved list belongs to the dataset."""
    folder = hub_folder(source)
    if folder is not None:
        # abspath keeps symbolic links: folders written by the hub's client consist of links to files elsewhere.
        inside = "://" not in file and Path(os.path.abspath(file)).is_relative_to(folder)
    else:
        inside = file.startswith(f"hf://datasets/{source.path}@")
    return inside and "::" not in file and ".." not in file.split("/")


def _outside(source: SourceConfig, key: str, name: str) -> ConfigError:
    remedy = f"{name!r} is outside: fix the README.md or .huggingface.yaml that names it; no name may contain '::'"
    return _config_error(key, "path", source.path, "a dataset whose files are inside it", remedy)


def _check_fields(source: SourceConfig, key: str, found: HubFiles) -> None:
    """Raise ConfigError if the first file has no text in the field. A corrupted file gives bad rows later instead."""
    file, field = found.files[0], source.field or "text"
    fault: BadRowError | None = None
    try:
        with open_file(file) as opened:
            if file.lower().endswith(".parquet"):
                fault = column_fault(opened, field)
            elif file.lower().endswith(STREAMED_SUFFIXES):
                fault = rows_fault(opened, file, lambda line: json_text(line, field))
    except OSError as error:
        raise _config_error(key, "path", source.path, "readable files", f"{file}: {reason(error)}") from error
    if fault is not None and type(fault) is not BadRowError and (problem := fault_problem(source, key, file, fault)):
        raise ConfigError([problem])
    if fault is not None:
        raise _config_error(key, "field", field, "a field that contains text", f"{file}: {fault}")


def _config_error(key: str, name: str, value: Any, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(f"{key}.{name}", value, rule, remedy)])
