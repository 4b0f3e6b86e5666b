"""Read a TOML file and a command line into one checked, frozen JobConfig."""

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.dropped import remove_dropped
from titanlite.checkpoint.manifest import Manifest
from titanlite.checkpoint.preflight import earlier_manifest
from titanlite.config.arguments import Arguments, Options, split_arguments
from titanlite.config.begun import pop_kept, read_kept, with_begun_model
from titanlite.config.check import (
    apply_stores,
    check_config,
    check_path_lengths,
    check_stores,
    one_rank,
    resolve_config,
)
from titanlite.config.conventions import bos_of_start, with_conventions
from titanlite.config.fields import SECTIONS, columns_of, fields_of, keys_of
from titanlite.config.files import CONFIG_FILE, Content, config_path, read_file, shipped_names
from titanlite.config.ineffective import ineffective
from titanlite.config.lengths import check_lengths, override_lengths
from titanlite.config.plugins import PLUGINS, import_plugins
from titanlite.config.schema import JobConfig
from titanlite.config.toml import COMMAND_LINE, tables_of
from titanlite.config.value_types import alternatives, missing_value, plain, row_type, text_of, value_from_text
from titanlite.config.values import read_values, unknown_column, unknown_key
from titanlite.data.sources.tokens import opened_once
from titanlite.metrics.config import LOG_FILE, METRICS_FILE, RUN_FILE
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.optim.optimizer import optimizers_of
from titanlite.runtime.errors import ConfigError, Problem, UsageError, UserError
from titanlite.runtime.text import counted
from titanlite.storage.config import check_storage

CONFIG_COPY = "config.toml"
"""The resolved configuration of a run, in its dump folder."""

Tables = dict[str, Any]
"""Section -> table of keys, as written and not checked yet. An entry may be no section, and its value no table."""


@dataclass(frozen=True)
class Parsed:
    """A configuration as given, read once.

    config: keys with a problem have their default. origins: full key that is given -> the file that sets it, or
    COMMAND_LINE; also of keys inside arrays of tables. options: of the command line. file_is_read: False if a TOML
    file could not be read. path: of the TOML file on the command line, as written. words: that name the file and the
    keys, `--section.key=value`.
    """

    config: JobConfig
    problems: list[Problem] = field(default_factory=list)
    origins: Mapping[str, str] = field(default_factory=dict)
    options: Options = field(default_factory=Options)
    file_is_read: bool = True
    path: str = ""
    words: tuple[str, ...] = ()


def load_config(argv: Sequence[str], *, world_size: int, device_type: str, **settings: Any) -> JobConfig:
    """Read, check and resolve a configuration. settings: of `resolve`. Raises ConfigError with all problems."""
    return resolve(parse(argv), world_size=world_size, device_type=device_type, **settings)


def parse(argv: Sequence[str], values: Mapping[str, Any] | None = None, *, imports: bool = True) -> Parsed:
    """Read the TOML file, the files that it extends, and the command line, after the plugins that they name.

    values: full key -> Python value, after argv; a list of tables replaces all tables of the key. imports: whether to
    import plugins.
    """
    values = dict(values or {})
    arguments = split_arguments(argv)
    problems = list(arguments.problems)
    words = tuple("=".join([f"--{key}", *([] if text is None else [text])]) for key, text in arguments.texts.items())
    names_file, path = CONFIG_FILE in arguments.texts, arguments.texts.pop(CONFIG_FILE, None)
    problems += [missing_value(CONFIG_FILE, "")] if names_file and path is None else []
    content = Content() if path is None else read_file(path, problems)
    tables: Tables = {
        name: dict(table) if isinstance(table, dict) else table
        for name, table in (content.tables if content else {}).items()
    }
    if path is not None and _is_copy(config_path(path)):  # maybe of an earlier version
        problems += remove_dropped(tables)
    if PLUGINS in values:
        put_value(tables, PLUGINS, values.pop(PLUGINS), None)  # the imported entries have digests
    if imports and (problem := import_plugins(tables, arguments.texts)):
        return Parsed(JobConfig(), [problem], file_is_read=False)
    given = {key for key, text in arguments.texts.items() if text not in ("-1", "-1.0")}
    override_lengths(_sections(tables), given | {key for key, value in values.items() if value != -1})
    origins = _origins(tables, content.files if content else {}, arguments, values)
    family = values.get("model.family", arguments.texts.get("model.family"))
    config = read_tables(tables, arguments.texts, values, problems, family)
    problems = [_with_file(problem, origins, path) for problem in problems]
    return Parsed(config, problems, origins, arguments.options, content is not None, path or "", words)


def _is_copy(path: Path) -> bool:
    """Whether the file is the copy in a run's folder, and not a user's own file of the same name."""
    of_runs = (RUN_FILE, METRICS_FILE, LOG_FILE, CheckpointConfig.folder)
    return path.name == CONFIG_COPY and any(path.with_name(name).exists() for name in of_runs)


def read_tables(
    tables: Tables,
    texts: Mapping[str, str | None],
    values: Mapping[str, Any],
    problems: list[Problem],
    family: Any = None,
) -> JobConfig:
    """The configuration of tables with the texts of a command line and Python values put into them; adds problems.

    family: of the model, if it is not that of the tables.
    """
    family = family or _sections(tables).get("model", {}).get("family", ModelConfig.family)
    family = family if isinstance(family, str) and family in FAMILIES else None
    kept = pop_kept(tables)
    found = [put_argument(tables, key, text, family) for key, text in texts.items()]
    found += [put_value(tables, key, value, family) for key, value in values.items()]
    problems += [problem for problem in found if problem]
    problems += check_lengths(_sections(tables))
    if family is not None and "model" in _sections(tables):
        tables["model"].setdefault("flavor", ModelConfig.flavor)  # a family may lack the default flavor
    read, of_values = read_values(tables, family)
    problems += of_values
    sections = {name: kind(**read.get(name, {})) for name, kind in SECTIONS.items() if name != "model"}
    return JobConfig(model=_model(read.get("model", {}), family, kept, problems), **sections)


def _model(
    values: Mapping[str, Any], family: str | None, table: Mapping[str, Any] | None, problems: list[Problem]
) -> ModelConfig:
    """The section [model]; adds problems of the kept hyper-parameters. table: see pop_kept."""
    if family is None:
        return ModelConfig()
    overrides = {key: value for key, value in values.items() if key not in ("family", "flavor")}
    flavor = values.get("flavor", next(iter(FAMILIES[family].flavors)))
    kept, of_kept = read_kept(table, family, flavor)
    problems += of_kept
    return ModelConfig(family, flavor, overrides, kept)


def _sections(tables: Tables) -> dict[str, dict[str, Any]]:
    """The entries that are sections, and tables."""
    return {name: table for name, table in tables.items() if name in SECTIONS and isinstance(table, dict)}


@opened_once()
def resolve(
    parsed: Parsed,
    *,
    world_size: int,
    device_type: str,
    checks_files: bool = True,
    any_layout: bool = False,
    reads_data: bool = True,
) -> JobConfig:
    """The configuration of a run: checked and resolved, the same on every rank. Raises ConfigError with all problems.

    checks_files: as for check_config. any_layout: check it for one rank, as with parallelism.layout = "auto"; a search
    chooses the layout later. reads_data: false before another call of this that does: files of data, models and
    tokenizers are not read or checked, and what follows from them is not resolved. With --strict, settings without
    effect are problems.
    """
    any_layout |= parsed.config.parallelism.layout == "auto"
    apply_stores(parsed.config)  # the checks read stores
    places = [*check_path_lengths(parsed.config, world_size), *check_storage(parsed.config.storage)]
    unreadable = [each for each in places if checks_files or each.key == "storage.endpoint"]  # it may have a password
    keys = {problem.key for problem in (*parsed.problems, *unreadable)}
    reads_stores = checks_files and not any(key.startswith("storage.") for key in keys)
    if reads_stores and reads_data:
        unreadable += [each for each in check_stores(parsed.config) if each.key not in keys]
    readable = reads_stores and not unreadable
    world_size = 1 if any_layout else world_size
    problems = [*parsed.problems, *unreadable]
    config = parsed.config
    if readable:
        config = keep_earlier(config)
        config = with_conventions(config) if reads_data else config
    if parsed.file_is_read:
        placed = one_rank(config) if any_layout else config
        facts: dict[str, Any] = {"world_size": world_size, "device_type": device_type}
        found = check_config(placed, **facts, checks_files=readable and reads_data)
        found = [_with_origin(problem, parsed.config, config) for problem in found]
        found = [_with_file(problem, parsed.origins, parsed.path) for problem in found]
        problems += without_consequences(found, parsed.problems)
    if readable and reads_data and config.data.add_bos == "auto" and not problems:
        try:
            bos_of_start(config)
        except UserError as error:  # no check reads the tokenizer of the model if the run has another one
            rule = "true or false, since a file that would tell cannot be read"
            remedy = f"write whether the model's documents began with BOS, or fix the file: {error}"
            problems.append(Problem("data.add_bos", "auto", rule, remedy))
    if problems:
        raise ConfigError(problems)
    config = resolve_config(config, world_size=world_size, device_type=device_type)
    if parsed.options.strict and reads_data and (problems := without_effect(parsed, config, world_size)):
        raise ConfigError(problems)
    return config


def check_and_resolve(config: JobConfig, *, world_size: int, device_type: str) -> JobConfig:
    """A configuration that was built or changed in Python, as `resolve` returns it. Raises ConfigError."""
    return resolve(reparsed(config), world_size=world_size, device_type=device_type)


def reparsed(config: JobConfig) -> Parsed:
    """A configuration that was built or changed in Python, for `resolve`."""
    problems: list[Problem] = []
    return Parsed(read_tables(tables_of(config), {}, {}, problems), problems)


def most_ranks(parsed: Parsed, world_size: int, *, device_type: str) -> int:
    """The largest number of ranks, up to world_size, that the configuration fits; world_size if it fits none, so that
    `resolve` raises its problems."""
    if check_path_lengths(parsed.config, world_size) or parsed.config.parallelism.layout == "auto":
        return world_size
    config = keep_earlier(parsed.config)
    sizes = range(world_size, 0, -1)
    fitting = (n for n in sizes if not check_config(config, world_size=n, device_type=device_type, checks_files=False))
    return next(fitting, world_size)


def without_effect(parsed: Parsed, config: JobConfig, world_size: int) -> list[Problem]:
    """A Problem for each given setting that has no effect. config: resolved from `parsed`."""
    found = ineffective(parsed.config, config, parsed.origins, world_size)
    named = [_with_file(problem, parsed.origins, parsed.path) for problem in found]
    other = "leave it out of {}, or extend another file"
    return [replace(each, remedy=other.format(each.file)) if each.file else each for each in named]


WITHOUT_STREAM_VERSION = 2
"""data.stream_version of stored runs that have no such key."""


WITHOUT_Z_LOSS = 0.0
"""loss.z_loss of stored runs that have no such key."""


def keep_earlier(config: JobConfig) -> JobConfig:
    """If the run has started before, replace automatic settings of its batches by the values of its first start.

    A batch size or number of streams of -1: that of the checkpoint to resume from; before there is one, with
    checkpoint.enable, that of the configuration in the dump folder: a start that is lost before its first save has the
    same batch again, on any number of ranks. data.document_mask and add_bos, which depend on the sources, the version
    of the streams, the dtype of Muon's orthogonalization, and with training.stages, of which later ones may be longer
    than all of the checkpoint, data.max_piece_bytes: those of the checkpoint. So are loss.z_loss, and hyper-parameters
    of the flavor.
    """
    training, data, optimizer = config.training, config.data, config.optimizer
    manifest = earlier_manifest(config.checkpoint, config.job.dump_folder)
    earlier: Mapping[str, Any] = {} if manifest is None else manifest.config
    if problems := remove_dropped({name: dict(table) for name, table in earlier.items()}):
        raise ConfigError(problems)
    of_data, of_training, of_optimizer, of_loss = _stored_values(earlier).values()
    if manifest is not None:
        config = replace(config, model=with_begun_model(config.model, manifest))
        stored = of_loss.get("z_loss", WITHOUT_Z_LOSS)
        config = replace(config, loss=replace(config.loss, z_loss=stored)) if config.loss.z_loss == -1 else config
    if earlier and data.document_mask == "auto":
        data = replace(data, document_mask=of_data.get("document_mask", False))
    if earlier and data.add_bos == "auto":
        data = replace(data, add_bos=of_data.get("add_bos", False))
    if earlier and data.max_piece_bytes == -1 and training.stages:
        data = replace(data, max_piece_bytes=of_data.get("max_piece_bytes", -1))
    if earlier and data.stream_version == -1:
        data = replace(data, stream_version=of_data.get("stream_version", WITHOUT_STREAM_VERSION))
    if earlier and optimizer.newton_schulz_dtype == "auto" and "Muon" in optimizers_of(optimizer):
        known = of_optimizer.get("newton_schulz_dtype", "auto")
        if known == "auto":  # of older versions
            known = "float64" if training.dtype == "float64" else "float32"
        optimizer = replace(optimizer, newton_schulz_dtype=known)
    copy = Path(config.job.dump_folder, CONFIG_COPY)
    if earlier:
        sequences, streams = of_training.get("global_batch_size", -1), of_data.get("num_streams", -1)
    elif config.checkpoint.enable and copy.is_file():
        kept = read_copy(copy.parent)
        sequences, streams = kept.training.global_batch_size, kept.data.num_streams
    else:
        return config
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=sequences)
    if data.num_streams == -1:
        data = replace(data, num_streams=streams)
    return replace(config, training=training, data=data, optimizer=optimizer)


_STORED = {
    "data": ("num_streams", "document_mask", "add_bos", "max_piece_bytes", "stream_version"),
    "training": ("global_batch_size",),
    "optimizer": ("newton_schulz_dtype",),
    "loss": ("z_loss",),
}
"""Keys that a run keeps, by section."""


def _stored_values(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The values of _STORED in the configuration of a manifest, by section. Raises ConfigError if one does not fit its
    key: another version wrote the file, or it was edited."""
    tables = {
        name: {key: config[name][key] for key in keys if key in config.get(name, {})} for name, keys in _STORED.items()
    }
    read, problems = read_values(tables, None)
    if problems:
        remedy = "this is in the checkpoint, of another version or edited: use that version, or another checkpoint"
        raise ConfigError([replace(problem, remedy=remedy) for problem in problems])
    return {name: read.get(name, {}) for name in _STORED}


def read_copy(dump_folder: Path) -> JobConfig:
    """The configuration that the last start of a run wrote; keys with a problem have their default, and so does the
    model of a plugin: none is imported."""
    return parse([f"--{CONFIG_FILE}", str(dump_folder / CONFIG_COPY)], imports=False).config


def config_from_values(
    values: Mapping[str, Mapping[str, Any]], argv: Sequence[str] = (), begun: Manifest | None = None
) -> JobConfig:
    """The configuration of a checkpoint's manifest, with overrides `--section.key value` from argv.

    values: by section. begun: a checkpoint of the run, see with_begun_model. Raises ConfigError if argv is invalid, or
    if a later version wrote a manifest with other keys.
    """
    arguments = split_arguments(argv)
    tables = {name: dict(table) for name, table in values.items()}
    model = tables.setdefault("model", {})
    model |= model.pop("overrides", {})
    tables.setdefault("data", {}).setdefault("stream_version", WITHOUT_STREAM_VERSION)
    tables["loss"] = {"z_loss": WITHOUT_Z_LOSS, **tables.get("loss", {})}
    problems = [*remove_dropped(tables), *arguments.problems]
    config = read_tables(tables, arguments.texts, {}, problems)
    if problems:
        raise ConfigError(problems)
    return config if begun is None else replace(config, model=with_begun_model(config.model, begun))


def _with_origin(problem: Problem, given: JobConfig, kept: JobConfig) -> Problem:
    """Explain a value that comes from the run's checkpoints, not from the user."""
    now = kept.data.num_streams
    if problem.key != "data.num_streams" or given.data.num_streams == now:
        return problem
    rule = f"{problem.rule}; the run's checkpoints were saved with {now}"
    return replace(problem, rule=rule, remedy="start fewer data ranks, or a new run")


def without_consequences(found: list[Problem], earlier: list[Problem]) -> list[Problem]:
    """The found problems, without those of keys that have a problem of type or range, or that mention such a key: a
    key with a problem has its default."""
    return [problem for problem in found if not _follows_from(problem, earlier)]


def _follows_from(problem: Problem, earlier: list[Problem]) -> bool:
    """Whether a problem is about a key that already has a problem, or mentions such a key (and thus its default), or a
    table with one."""
    section = problem.key.partition(".")[0]
    mentioned = set(re.findall(r"\w+(?:\.\w+)*", f"{problem.rule} {problem.remedy}"))
    for bad in (other.key for other in earlier):
        names = {bad, bad.rpartition(".")[2]} if bad.startswith(f"{section}.") else {bad}
        is_in_table = any("." in word and bad.startswith(f"{word}.") for word in mentioned)
        is_mentioned = is_in_table or ("." in bad and mentioned & names)
        if problem.key == bad or problem.key.startswith(f"{bad}.") or is_mentioned:
            return True
    return False


def _origins(
    tables: Tables, files: Mapping[str, str], arguments: Arguments, values: Mapping[str, Any]
) -> dict[str, str]:
    """The field `origins` of Parsed. The origin of `values` is COMMAND_LINE. tables: of the files, without the lengths
    that the command line replaces."""
    sections = _sections(tables)
    # of entries that are no sections
    origins = {name: file for key, file in files.items() if (name := key.partition(".")[0]) not in sections}
    for section, table in sections.items():
        for name, value in table.items():
            key = f"{section}.{name}"
            origins[key] = files.get(key, COMMAND_LINE)  # of job.plugins
            rows = value if isinstance(value, list) else []
            cells = ((index, column) for index, row in enumerate(rows) if isinstance(row, dict) for column in row)
            origins |= {f"{key}.{index}.{column}": origins[key] for index, column in cells}
    replaced = tuple(f"{key}." for key in values)
    kept = {key: file for key, file in origins.items() if not key.startswith(replaced)}
    return kept | dict.fromkeys([*arguments.texts, *values], COMMAND_LINE)


def _with_file(problem: Problem, origins: Mapping[str, str], path: str | None) -> Problem:
    """Name the file that sets a wrong value if it is not `path`, the file on the command line."""
    key = problem.key
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    file = origins.get(key, COMMAND_LINE)
    return problem if problem.file or file in (COMMAND_LINE, path) else replace(problem, file=file)


def put_argument(tables: Tables, key: str, text: str | None, family: str | None) -> Problem | None:
    """Put the value of one command-line key into `tables`, or return its Problem.

    text: None if the key has no value. family: of the model; None if unknown, then keys of [model] are not checked.
    """
    section, _, name = key.partition(".")
    if section in SECTIONS and not name:
        kinds = keys_of(section, family)
        example = next(key for key, kind in kinds.items() if not row_type(kind.type))
        remedy = missing_value(f"{section}.{example}", kinds[example].default).remedy
        remedy = remedy.removeprefix("write ").partition(";")[0]
        rule = "a section: give one of its keys at a time"
        return Problem(key, text, rule, f"write --{section}.KEY VALUE, for example {remedy}")
    name, *row_path = name.split(".")
    kinds = keys_of(section, family) if section in SECTIONS else {}
    if name not in kinds and family is None and section == "model":
        return None
    if name not in kinds:
        return unknown_key(key, text or "", family)
    kind = kinds[name]
    row = row_type(kind.type)
    if row and row_path:
        return _put_in_row(tables, key, text, row)
    if row_path:
        return unknown_key(key, text or "", family)
    if row:
        return Problem(key, text or "", "one key of one table at a time", f"write --{key}.0.KEY VALUE")
    if text is None and alternatives(kind.type)[0] is not bool:
        return missing_value(key, kind.default)
    _table(tables, section)[name] = value_from_text("true" if text is None else text, kind.type)
    return None


def _table(tables: Tables, section: str) -> dict[str, Any]:
    """The table of a section; an empty one that is dropped if the entry is no table, which has its own problem."""
    table = tables.setdefault(section, {})
    return table if isinstance(table, dict) else {}


def put_value(tables: Tables, key: str, value: Any, family: str | None) -> Problem | None:
    """Put the Python value of one full key into `tables`, or return its Problem; other parameters: put_argument."""
    section, _, name = key.partition(".")
    if section in SECTIONS and name in keys_of(section, family):
        _table(tables, section)[name] = plain(value)
        return None
    return put_argument(tables, key, text_of(value), family)  # a key of one table, or unknown


def _put_in_row(tables: Tables, key: str, text: str | None, row: type) -> Problem | None:
    """Put one value into an array of tables: key is SECTION.NAME.INDEX.COLUMN; INDEX = length appends a table."""
    section, name, index, *columns = key.split(".")
    if not columns:  # the index or the column is missing
        column = index if index in columns_of(row) else "KEY"
        number = index if index.isdecimal() else "0"
        remedy = f"write --{section}.{name}.{number}.{column} VALUE"
        return Problem(key, text or "", "one key of one table at a time", remedy)
    if len(columns) != 1 or columns[0] not in columns_of(row):
        return unknown_column(key, text or "", row)
    if text is None and columns_of(row)[columns[0]].type is not bool:
        return missing_value(key, columns_of(row)[columns[0]].default)
    text = "true" if text is None else text
    default = keys_of(section, None)[name].default
    rows = _table(tables, section).setdefault(name, [fields_of(row) for row in default])
    if not isinstance(rows, list) or not all(isinstance(each, dict) for each in rows):
        return None  # the file's value has its own problem
    if not (index.isdecimal() and index.isascii() and str(int(index)) == index and int(index) <= len(rows)):
        last = f"{section}.{name}.{len(rows)}.{columns[0]}"
        return Problem(
            key,
            text,
            f"an index from 0 to {len(rows)} ({counted(len(rows), 'table')} so far)",
            f"write --{last} to add a table",
        )
    if int(index) == len(rows):
        rows.append({})
    rows[int(index)][columns[0]] = value_from_text(text, columns_of(row)[columns[0]].type)
    return None


GETTING_STARTED = """\
a configuration is missing. To start:

  titanlite train quickstart    train a small Llama on your Python's standard library: minutes on a laptop
  titanlite train my.toml       train with your own TOML file; add --section.key VALUE to override its keys
  titanlite train --help        list all keys
"""


def read_command_line(argv: Sequence[str]) -> Parsed:
    """The configuration of a run as given. Raises UsageError.

    If argv asks for help, prints it, on rank 0, and exits with 0.
    """
    arguments = split_arguments(argv)
    if arguments.wants_help:
        if os.environ.get("RANK", "0") == "0":
            sys.argv[1:] = argv
            runpy.run_module("titanlite.config.help", run_name="__main__")  # imports tyro
        raise SystemExit(0)
    if not arguments.has_config:
        raise UsageError(*GETTING_STARTED.split("\n"), f"Shipped configurations: {', '.join(shipped_names())}")
    return parse(argv)
