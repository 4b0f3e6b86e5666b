"""Read a TOML file and a command line into one checked, frozen JobConfig."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from titanlite.checkpoint.dropped import remove_dropped
from titanlite.checkpoint.preflight import earlier_config
from titanlite.config.arguments import Arguments, missing_value, split_arguments
from titanlite.config.check import check_config, check_path_lengths, one_rank, resolve_config, with_model_tokenizer
from titanlite.config.fields import (
    SECTIONS,
    alternatives,
    fields_of,
    literal,
    read_value,
    row_type,
    section_types,
    types_of,
    value_from_text,
)
from titanlite.config.files import CONFIG_FILE, Content, read_file
from titanlite.config.ineffective import ineffective
from titanlite.config.keys import close_names, unknown_column, unknown_key
from titanlite.config.lengths import check_lengths, override_lengths
from titanlite.config.plugins import PLUGINS, import_plugins
from titanlite.config.schema import JobConfig
from titanlite.config.toml import COMMAND_LINE
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.text import counted

CONFIG_COPY = "config.toml"
"""The resolved configuration of a run, in its dump folder."""

Tables = dict[str, dict[str, Any]]
"""Section -> key -> value as written. Sections exist and are tables; keys and values are not checked yet."""


@dataclass(frozen=True)
class Parsed:
    """config: keys with a problem have their default. file_is_read: False if a TOML file could not be read.

    origins: full key that is given -> the file that sets it, or COMMAND_LINE; also of keys inside arrays of tables.
    path: of the file on the command line.
    """

    config: JobConfig
    problems: list[Problem]
    file_is_read: bool = True
    origins: Mapping[str, str] = field(default_factory=dict)
    is_strict: bool = False
    path: str | None = None


def load_config(
    argv: Sequence[str],
    *,
    world_size: int,
    device_type: str,
    checks_files: bool = True,
    any_layout: bool = False,
    values: Mapping[str, Any] | None = None,
) -> JobConfig:
    """The configuration of a run: read, checked and resolved, the same on every rank.

    checks_files: as for check_config. any_layout: check it for one rank, as with parallelism.layout = "auto"; a search
    chooses the layout later. With --strict, settings without effect are problems. values: full key -> Python value,
    after argv; a list of tables replaces all tables of the key. Raises ConfigError with all problems.
    """
    return _checked(
        _parse(argv, values),
        world_size=world_size,
        device_type=device_type,
        checks_files=checks_files,
        any_layout=any_layout,
    )


def check_and_resolve(config: JobConfig, *, world_size: int, device_type: str) -> JobConfig:
    """A configuration that was built or changed in Python, as load_config returns it. Raises ConfigError."""
    return _checked(
        Parsed(config, []), world_size=world_size, device_type=device_type, checks_files=True, any_layout=False
    )


def _checked(parsed: Parsed, *, world_size: int, device_type: str, checks_files: bool, any_layout: bool) -> JobConfig:
    any_layout |= parsed.config.parallelism.layout == "auto"
    world_size = 1 if any_layout else world_size
    too_long = check_path_lengths(parsed.config) if checks_files else []
    problems = [*parsed.problems, *too_long]
    config = parsed.config
    if checks_files and not too_long:
        config = with_model_tokenizer(keep_earlier(config))
    if parsed.file_is_read:
        readable = checks_files and not too_long
        placed = one_rank(config) if any_layout else config
        found = check_config(placed, world_size=world_size, device_type=device_type, checks_files=readable)
        found = [_with_origin(problem, parsed.config, config) for problem in found]
        found = [_with_file(problem, parsed.origins, parsed.path) for problem in found]
        problems += [problem for problem in found if not _follows_from(problem, parsed.problems)]
    if problems:
        raise ConfigError(problems)
    config = resolve_config(config, world_size=world_size, device_type=device_type)
    if parsed.is_strict and (problems := _without_effect(parsed, config, world_size)):
        raise ConfigError(problems)
    return config


def most_ranks(argv: Sequence[str], world_size: int, *, device_type: str) -> int:
    """The largest number of ranks, up to world_size, that the configuration fits; world_size if it fits none, so that
    load_config raises its problems."""
    parsed = _parse(argv)
    if check_path_lengths(parsed.config) or parsed.config.parallelism.layout == "auto":
        return world_size
    config = keep_earlier(parsed.config)
    sizes = range(world_size, 0, -1)
    fitting = (n for n in sizes if not check_config(config, world_size=n, device_type=device_type, checks_files=False))
    return next(fitting, world_size)


def given_keys(argv: Sequence[str]) -> set[str]:
    """Full keys that the TOML file, its bases or the command line set. argv: valid for load_config."""
    return set(origins_of(argv))


def origins_of(argv: Sequence[str]) -> Mapping[str, str]:
    """Full key that is given -> the file that sets it, or COMMAND_LINE."""
    return _parse(argv).origins


def settings_without_effect(
    argv: Sequence[str], config: JobConfig, world_size: int, values: Mapping[str, Any] | None = None
) -> list[Problem]:
    """A Problem for each given setting that has no effect. config: of argv and values, by load_config."""
    return _without_effect(_parse(argv, values), config, world_size)


def _without_effect(parsed: Parsed, config: JobConfig, world_size: int) -> list[Problem]:
    found = ineffective(parsed.config, config, parsed.origins, world_size)
    named = [_with_file(problem, parsed.origins, parsed.path) for problem in found]
    other = "leave it out of {}, or extend another file"
    return [replace(each, remedy=other.format(each.file)) if each.file else each for each in named]


def keep_earlier(config: JobConfig) -> JobConfig:
    """If the run has started before, replace automatic settings of its batches by the values of its first start.

    A batch size or number of streams of -1: that of the checkpoint to resume from; before there is one, with
    checkpoint.enable, that of the configuration in the dump folder: a start that is lost before its first save has the
    same batch again, on any number of ranks. data.document_mask, which depends on the sources: that of the checkpoint.
    """
    training, data = config.training, config.data
    earlier = earlier_config(config.checkpoint, config.job.dump_folder)
    if problems := remove_dropped({name: dict(table) for name, table in earlier.items()}):
        raise ConfigError(problems)
    if earlier and data.document_mask == "auto":
        data = replace(data, document_mask=earlier["data"].get("document_mask", False))
    copy = Path(config.job.dump_folder, CONFIG_COPY)
    if earlier:
        sequences, streams = earlier["training"]["global_batch_size"], earlier["data"]["num_streams"]
    elif config.checkpoint.enable and copy.is_file():
        kept = read_copy(copy.parent)
        sequences, streams = kept.training.global_batch_size, kept.data.num_streams
    else:
        return config
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=sequences)
    if data.num_streams == -1:
        data = replace(data, num_streams=streams)
    return replace(config, training=training, data=data)


def parse_config(argv: Sequence[str]) -> tuple[JobConfig, list[Problem]]:
    """The configuration as given, and its problems with names and types; keys with a problem have their default."""
    parsed = _parse(argv)
    return parsed.config, parsed.problems


def read_copy(dump_folder: Path) -> JobConfig:
    """The configuration that the last start of a run wrote; keys with a problem have their default, and so does the
    model of a plugin: none is imported."""
    return _parse([f"--{CONFIG_FILE}", str(dump_folder / CONFIG_COPY)], imports=False).config


def config_from_values(values: Mapping[str, Mapping[str, Any]], argv: Sequence[str] = ()) -> JobConfig:
    """The configuration of a checkpoint's manifest, with overrides `--section.key value` from argv.

    values: by section. Raises ConfigError if argv is invalid, or if a later version wrote a manifest with other keys.
    """
    arguments = split_arguments(argv)
    tables = {name: dict(table) for name, table in values.items()}
    tables.get("metrics", {}).pop("enable_tensorboard", None)  # of version 0.1
    model = tables["model"]
    tables["model"] = model | model.pop("overrides", {})
    problems = [*remove_dropped(tables), *arguments.problems]
    family = model.get("family", ModelConfig.family)
    family = family if family in FAMILIES else None
    known = sections_of(tables, problems)
    found = [put_argument(known, key, text, family) for key, text in arguments.texts.items()]
    problems += [problem for problem in found if problem]
    sections = {name: build_section(name, table, family, problems) for name, table in known.items()}
    if problems:
        raise ConfigError(problems)
    return JobConfig(**sections)


def _with_origin(problem: Problem, given: JobConfig, kept: JobConfig) -> Problem:
    """Explain a value that comes from the run's checkpoints, not from the user."""
    now = kept.data.num_streams
    if problem.key != "data.num_streams" or given.data.num_streams == now:
        return problem
    rule = f"{problem.rule}; the run's checkpoints were saved with {now}"
    return replace(problem, rule=rule, remedy="start fewer data ranks, or a new run")


def _follows_from(problem: Problem, earlier: list[Problem]) -> bool:
    """Whether a problem is about a key that already has a problem, or mentions such a key (and thus its default)."""
    section = problem.key.partition(".")[0]
    mentioned = set(re.findall(r"\w+(?:\.\w+)*", f"{problem.rule} {problem.remedy}"))
    for bad in (other.key for other in earlier):
        names = {bad, bad.rpartition(".")[2]} if bad.startswith(f"{section}.") else {bad}
        if problem.key == bad or problem.key.startswith(f"{bad}.") or ("." in bad and mentioned & names):
            return True
    return False


def _parse(argv: Sequence[str], values: Mapping[str, Any] | None = None, *, imports: bool = True) -> Parsed:
    values = dict(values or {})
    arguments = split_arguments(argv)
    problems = list(arguments.problems)
    names_file, path = CONFIG_FILE in arguments.texts, arguments.texts.pop(CONFIG_FILE, None)
    problems += [missing_value(CONFIG_FILE, "")] if names_file and path is None else []
    content = Content() if path is None else read_file(path, problems)
    tables = sections_of(content.tables if content else {}, problems)
    if path is not None and Path(path).name == CONFIG_COPY:  # maybe of an earlier version
        problems += remove_dropped(tables)
    if PLUGINS in values:
        put_value(tables, PLUGINS, values.pop(PLUGINS), None)  # the imported entries have digests
    if imports and (problem := import_plugins(tables, arguments.texts)):
        return Parsed(JobConfig(), [problem], file_is_read=False)
    family = arguments.texts.get("model.family") or tables.get("model", {}).get("family", ModelConfig.family)
    family = values.get("model.family", family)
    family = family if isinstance(family, str) and family in FAMILIES else None
    given = {key for key, text in arguments.texts.items() if text not in ("-1", "-1.0")}
    override_lengths(tables, given | {key for key, value in values.items() if value != -1})
    origins = _origins(tables, content.files if content else {}, arguments, values)
    found = [put_argument(tables, key, text, family) for key, text in arguments.texts.items()]
    found += [put_value(tables, key, value, family) for key, value in values.items()]
    problems += [problem for problem in found if problem]
    problems += check_lengths(tables)
    sections = {name: build_section(name, tables.get(name, {}), family, problems) for name in SECTIONS}
    problems = [_with_file(problem, origins, path) for problem in problems]
    return Parsed(JobConfig(**sections), problems, content is not None, origins, arguments.options.strict, path)


def _origins(
    tables: Tables, files: Mapping[str, str], arguments: Arguments, values: Mapping[str, Any]
) -> dict[str, str]:
    """The field `origins` of Parsed. The origin of `values` is COMMAND_LINE. tables: of the files, without the lengths
    that the command line replaces."""
    # of entries that are no sections
    origins = {name: file for key, file in files.items() if (name := key.partition(".")[0]) not in tables}
    for section, table in tables.items():
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


def sections_of(tables: Mapping[str, Any], problems: list[Problem]) -> Tables:
    """The sections among a file's top-level entries; adds a problem for every other entry."""
    sections: Tables = {}
    for name, value in tables.items():
        if name in SECTIONS and isinstance(value, dict):
            sections[name] = dict(value)
        elif name in SECTIONS:
            problems.append(Problem(name, value, "a table of keys", f"write [{name}] and its keys below it"))
        elif isinstance(value, dict):
            close = close_names(name, SECTIONS)
            remedy = f"did you mean [{close[0]}]?" if close else "the sections: " + ", ".join(SECTIONS)
            problems.append(Problem(name, value, "a section of the configuration", remedy))
        else:
            problems.append(unknown_key(name, value, ModelConfig.family))
    return sections


def put_argument(tables: Tables, key: str, text: str | None, family: str | None) -> Problem | None:
    """Put the value of one command-line key into `tables`, or return its Problem.

    text: None if the key has no value. family: of the model; None if unknown, then keys of [model] are not checked.
    """
    section, _, name = key.partition(".")
    if section in SECTIONS and not name:
        example = next(key for key, kind in section_types(section, family).items() if not row_type(kind))
        remedy = missing_value(f"{section}.{example}", _default(section, example, family)).remedy
        remedy = remedy.removeprefix("write ").partition(";")[0]
        rule = "a section: give one of its keys at a time"
        return Problem(key, text, rule, f"write --{section}.KEY VALUE, for example {remedy}")
    name, *row_path = name.split(".")
    value_type = section_types(section, family).get(name) if section in SECTIONS else None
    row = row_type(value_type)
    if row and row_path:
        return _put_in_row(tables, key, text, row)
    if value_type is None and family is None and section == "model":
        return None
    if value_type is None or row_path:
        return unknown_key(key, text or "", family)
    if row:
        return Problem(key, text or "", "one key of one table at a time", f"write --{key}.0.KEY VALUE")
    if text is None and alternatives(value_type)[0] is not bool:
        return missing_value(key, _default(section, name, family))
    text = "true" if text is None else text
    tables.setdefault(section, {})[name] = value_from_text(text, value_type)
    return None


def put_value(tables: Tables, key: str, value: Any, family: str | None) -> Problem | None:
    """Put the Python value of one full key into `tables`, or return its Problem; other parameters: put_argument."""
    section, _, name = key.partition(".")
    if section in SECTIONS and name in section_types(section, family):
        tables.setdefault(section, {})[name] = _plain(value)
        return None
    return put_argument(tables, key, text_of(value), family)  # a key of one table, or unknown


def text_of(value: Any) -> str | None:
    """A Python value as it is written on the command line; None for a value that no key has."""
    value = _plain(value)
    try:
        return value if isinstance(value, str) else literal(value)
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    """The value as TOML has it: paths as strings, tuples as lists, numbers of numpy as those of Python."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def build_section(section: str, table: Mapping[str, Any], family: str | None, problems: list[Problem]) -> Any:
    """Build the section's dataclass; a key with a problem keeps its default."""
    types = section_types(section, family)
    if section == "model":
        table = {"flavor": ModelConfig.flavor, **table}  # a family may lack the default flavor
    values: dict[str, Any] = {}
    for name, value in table.items():
        key = f"{section}.{name}"
        if name not in types:
            if section != "model" or family is not None:
                problems.append(unknown_key(key, value, family))
            continue
        row = row_type(types[name])
        found: Any
        if row:
            found = _build_rows(key, value, row, problems)
        else:
            found = read_value(key, value, types[name], _default(section, name, family))
        if isinstance(found, Problem):
            problems.append(found)
        else:
            values[name] = found
    return _build_model(values, family) if section == "model" else SECTIONS[section](**values)


def _build_model(values: dict[str, Any], family: str | None) -> ModelConfig:
    if family is None:
        return ModelConfig()
    flavor = values.pop("flavor", next(iter(FAMILIES[family].flavors)))
    return ModelConfig(values.pop("family", family), flavor, values)


def _put_in_row(tables: Tables, key: str, text: str | None, row: type) -> Problem | None:
    """Put one value into an array of tables: key is SECTION.NAME.INDEX.COLUMN; INDEX = length appends a table."""
    section, name, index, *columns = key.split(".")
    if not columns:  # the index or the column is missing
        column = index if index in types_of(row) else "KEY"
        number = index if index.isdecimal() else "0"
        remedy = f"write --{section}.{name}.{number}.{column} VALUE"
        return Problem(key, text or "", "one key of one table at a time", remedy)
    if len(columns) != 1 or columns[0] not in types_of(row):
        return unknown_column(key, text or "", row)
    if text is None and types_of(row)[columns[0]] is not bool:
        return missing_value(key, getattr(row, columns[0]))
    text = "true" if text is None else text
    rows = tables.setdefault(section, {}).setdefault(name, [fields_of(row) for row in _default(section, name, None)])
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
    rows[int(index)][columns[0]] = value_from_text(text, types_of(row)[columns[0]])
    return None


def _build_rows(key: str, value: Any, row: type, problems: list[Problem]) -> tuple[Any, ...] | Problem:
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        return Problem(key, value, "an array of tables", f"write [[{key}]] and its keys below it")
    built = []
    for index, table in enumerate(value):
        values = {}
        for name, given in table.items():
            path = f"{key}.{index}.{name}"
            if name not in types_of(row):
                problems.append(unknown_column(path, given, row))
                continue
            found = read_value(path, given, types_of(row)[name], getattr(row, name))
            if isinstance(found, Problem):
                problems.append(found)
            else:
                values[name] = found
        built.append(row(**values))
    return tuple(built)


def _default(section: str, name: str, family: str | None) -> Any:
    """The default of a key. For a hyper-parameter: its value in the family's first flavor."""
    if section == "model" and name not in types_of(ModelConfig) and family is not None:
        return getattr(next(iter(FAMILIES[family].flavors.values())), name)
    return getattr(SECTIONS[section](), name)
