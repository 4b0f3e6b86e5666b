"""Read a TOML file and a command line into one checked, frozen JobConfig; write it back as TOML."""

import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from titanlite.checkpoint.preflight import earlier_config
from titanlite.config.check import check_config, check_path_lengths, one_rank, resolve_config
from titanlite.config.fields import (
    SECTIONS,
    fields_of,
    literal,
    read_value,
    row_type,
    section_types,
    types_of,
    value_from_text,
)
from titanlite.config.lengths import check_lengths, override_lengths
from titanlite.config.other_names import KEYS, NAMES
from titanlite.config.schema import JobConfig
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.json_files import JsonError, check_depth, read_regular
from titanlite.runtime.plugins import PluginError, load_plugins, missing_plugins, split_entry
from titanlite.runtime.text import counted

CONFIG_FILE = "job.config_file"
PLUGINS = "job.plugins"
CONFIG_COPY = "config.toml"
"""The resolved configuration of a run, in its dump folder."""

SHIPPED = Path(__file__).parents[1] / "configs"
"""The configurations that come with titanlite; their names without .toml are valid wherever a path is."""

HELP = ("--help", "-h")

Tables = dict[str, dict[str, Any]]
"""Section -> key -> value as written. Sections exist and are tables; keys and values are not checked yet."""


@dataclass(frozen=True)
class Parsed:
    """config: keys with a problem have their default. file_is_read: False if the TOML file could not be read."""

    config: JobConfig
    problems: list[Problem]
    file_is_read: bool


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
    chooses the layout later. values: full key -> Python value, after argv; a list of tables replaces all tables of the
    key. Raises ConfigError with all problems.
    """
    return _checked(
        _parse(argv, values or {}),
        world_size=world_size,
        device_type=device_type,
        checks_files=checks_files,
        any_layout=any_layout,
    )


def check_and_resolve(config: JobConfig, *, world_size: int, device_type: str) -> JobConfig:
    """A configuration that was built or changed in Python, as load_config returns it. Raises ConfigError."""
    return _checked(
        Parsed(config, [], True), world_size=world_size, device_type=device_type, checks_files=True, any_layout=False
    )


def _checked(parsed: Parsed, *, world_size: int, device_type: str, checks_files: bool, any_layout: bool) -> JobConfig:
    any_layout |= parsed.config.parallelism.layout == "auto"
    world_size = 1 if any_layout else world_size
    too_long = check_path_lengths(parsed.config) if checks_files else []
    problems = [*parsed.problems, *too_long]
    config = keep_earlier(parsed.config) if checks_files and not too_long else parsed.config
    if parsed.file_is_read:
        readable = checks_files and not too_long
        placed = one_rank(config) if any_layout else config
        found = check_config(placed, world_size=world_size, device_type=device_type, checks_files=readable)
        found = [_with_origin(problem, parsed.config, config) for problem in found]
        problems += [problem for problem in found if not _follows_from(problem, parsed.problems)]
    if problems:
        raise ConfigError(problems)
    return resolve_config(config, world_size=world_size, device_type=device_type)


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
    """Full keys that the TOML file or the command line sets. argv: valid for load_config."""
    arguments = split_arguments(argv)
    path = arguments.texts.get(CONFIG_FILE)
    content = _read_file(path, []) if path is not None else None
    tables = {name: table for name, table in (content or {}).items() if isinstance(table, dict)}
    return {f"{section}.{key}" for section, table in tables.items() for key in table} | arguments.texts.keys()


def keep_earlier(config: JobConfig) -> JobConfig:
    """If the run has started before, replace a batch size or number of streams of -1 by the value of its first start.

    That of the checkpoint to resume from; before there is one, with checkpoint.enable, that of the configuration in the
    dump folder: a start that is lost before its first save has the same batch again, on any number of ranks.
    """
    training, data = config.training, config.data
    copy = Path(config.job.dump_folder, CONFIG_COPY)
    if earlier := earlier_config(config.checkpoint, config.job.dump_folder):
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
    tables["job"].pop("config_file", None)
    tables.get("metrics", {}).pop("enable_tensorboard", None)  # of version 0.1
    model = tables["model"]
    tables["model"] = model | model.pop("overrides", {})
    problems = list(arguments.problems)
    family = model.get("family", ModelConfig.family)
    known = sections_of(tables, problems)
    found = [put_argument(known, key, text, family) for key, text in arguments.texts.items()]
    problems += [problem for problem in found if problem]
    sections = {name: build_section(name, table, family, problems) for name, table in known.items()}
    if problems:
        raise ConfigError(problems)
    return JobConfig(**sections)


def import_plugins_of(values: Mapping[str, Mapping[str, Any]], where: Path, *, allowed: bool) -> None:
    """Import the plugins of a saved configuration, and those of installed packages.

    where: what was saved with it. allowed: whether the user allows the import of code that a file names. Raises
    UserError if it is needed and not allowed.
    """
    load_plugins(())
    entries = [str(entry) for entry in values.get("job", {}).get("plugins", [])]
    if (missing := missing_plugins(entries)) and not allowed:
        raise UserError(
            f"{where} needs code that job.plugins of its run names: {', '.join(missing)}; to import it, if you trust "
            "it, add --allow-import"
        )
    load_plugins(entries)


def dump_config(config: JobConfig) -> str:
    """TOML that reads back as `config`, without job.config_file."""
    lines: list[str] = []
    for section in SECTIONS:
        values = getattr(config, section)
        table = fields_of(values)
        if isinstance(values, ModelConfig):
            table |= table.pop("overrides")
        if section == "job":
            del table["config_file"]
        lines += ["", f"[{section}]"]
        rows = {key: value for key, value in table.items() if value and row_type(types_of(type(values)).get(key))}
        lines += [f"{key} = {literal(value)}" for key, value in table.items() if key not in rows]
        for key, tables in rows.items():
            for row in tables:
                lines += ["", f"[[{section}.{key}]]"]
                defaults = fields_of(type(row)())
                values = fields_of(row).items()
                given = {name: value for name, value in values if name == "kind" or value != defaults[name]}
                lines += [f"{name} = {literal(value)}" for name, value in given.items()]
    return "\n".join(lines[1:]) + "\n"


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
    path = arguments.texts.get(CONFIG_FILE)
    content = {} if path is None else _read_file(path, problems)
    tables = sections_of(content or {}, problems)
    if PLUGINS in values:
        put_value(tables, PLUGINS, values.pop(PLUGINS), None)  # the imported entries have digests
    if imports and (problem := _import_plugins(tables, arguments.texts)):
        return Parsed(JobConfig(), [problem], False)
    family = arguments.texts.get("model.family") or tables.get("model", {}).get("family", ModelConfig.family)
    family = values.get("model.family", family)
    family = family if isinstance(family, str) and family in FAMILIES else None
    override_lengths(tables, arguments.texts | {key: text_of(value) for key, value in values.items()})
    found = [put_argument(tables, key, text, family) for key, text in arguments.texts.items()]
    found += [put_value(tables, key, value, family) for key, value in values.items()]
    problems += [problem for problem in found if problem]
    problems += check_lengths(tables)
    sections = {name: build_section(name, tables.get(name, {}), family, problems) for name in SECTIONS}
    return Parsed(JobConfig(**sections), problems, content is not None)


def _import_plugins(tables: Tables, texts: dict[str, str | None]) -> Problem | None:
    """Import the plugins of the command line, or of the file; put their entries with digests into `tables`.

    Removes them from `texts`, the keys of the command line.
    """
    text = texts.get(PLUGINS)
    value = tables.get("job", {}).get("plugins", []) if text is None else value_from_text(text, tuple[str, ...])
    entries = read_value(PLUGINS, value, tuple[str, ...], ("my_package.model",))
    if isinstance(entries, Problem):
        return entries
    try:
        entries = load_plugins(entries)
    except PluginError as error:
        return Problem(PLUGINS, error.entry, error.rule, error.remedy)
    texts.pop(PLUGINS, None)
    if entries:
        tables.setdefault("job", {})["plugins"] = list(entries)
    return None


def _read_file(path: str, problems: list[Problem]) -> dict[str, Any] | None:
    """The file's content; None if it cannot be read (adds the reason to `problems`)."""
    if not path:
        remedy = f"give the path of a TOML file, or one of {', '.join(shipped_names())}"
        problems.append(Problem(CONFIG_FILE, path, "the path of a TOML file", remedy))
        return None
    try:
        content = tomllib.loads(read_regular(config_path(path)).decode("utf-8-sig"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        folder = Path(path).parent
        # os.path: no error for long names
        files = [file for file in folder.glob("*.toml") if file.is_file()] if os.path.isdir(folder) else []
        known = {name: name for name in shipped_names()} | {file.stem: str(file) for file in files}
        close = get_close_matches(Path(path).stem, known, 1)
        remedy = f"did you mean {known[close[0]]}?" if close else "give the path of a TOML file"
        problems.append(
            Problem(
                CONFIG_FILE, path, f"a readable TOML file ({reason}), or one of {', '.join(shipped_names())}", remedy
            )
        )
        return None
    except JsonError as error:
        remedy = "save it as a file, and give the file's path: every rank reads the file"
        problems.append(Problem(CONFIG_FILE, path, f"a TOML file; it {error}", remedy))
        return None
    except UnicodeDecodeError as error:
        problems.append(Problem(CONFIG_FILE, path, "a file in UTF-8", f"save it as UTF-8: byte {error.start} is not"))
        return None
    except RecursionError:
        problems.append(Problem(CONFIG_FILE, path, "valid TOML", "fix the file: its arrays or tables are too deep"))
        return None
    except ValueError as error:
        problems.append(Problem(CONFIG_FILE, path, "valid TOML", f"fix the file: {error}"))
        return None
    try:
        check_depth(content)
    except JsonError as error:
        problems.append(Problem(CONFIG_FILE, path, f"valid TOML; it {error}", "fix the file: its tables are too deep"))
        return None
    job = content.get("job")
    if isinstance(job, dict) and isinstance(job.get("plugins"), list):
        beside = config_path(path).absolute().parent
        job["plugins"] = [_beside(entry, beside) for entry in job["plugins"]]
    if isinstance(content.get("job"), dict) and "config_file" in content["job"]:
        value = content["job"].pop("config_file")
        problems.append(Problem(CONFIG_FILE, value, "on the command line only", f"remove it from {path}"))
    return content


def _beside(entry: Any, folder: Path) -> Any:
    """An entry of job.plugins, in which the path of a .py file is relative to `folder`."""
    is_file = isinstance(entry, str) and split_entry(entry)[0].endswith(".py")
    return str(folder / entry) if is_file else entry


def shipped_names() -> list[str]:
    """Names of the configurations that come with titanlite."""
    return sorted(file.stem for file in SHIPPED.glob("*.toml"))


def config_path(name: str) -> Path:
    """The TOML file that `name` means: a path, or the name of a shipped configuration if no such file exists."""
    path = Path(name)
    return SHIPPED / f"{name}.toml" if name in shipped_names() and not path.is_file() else path


@dataclass(frozen=True)
class Arguments:
    """The parsed command line.

    texts: key -> text, in the given order; None if a key has no value. Repeated keys are left out.
    problems: unexpected arguments and repeated keys. has_config: whether a configuration is given, maybe twice.
    """

    texts: dict[str, str | None]
    wants_help: bool
    problems: tuple[Problem, ...]
    has_config: bool


def split_arguments(argv: Sequence[str]) -> Arguments:
    """Split `--section.key value` and `--section.key=value`; hyphens in keys count as underscores.

    A value after a space does not start with `--`. A switch without a value is true.

    One argument may be the configuration itself: the first one, a path ending in .toml, or a shipped name.
    """
    texts: dict[str, list[str | None]] = {}
    problems: list[Problem] = []
    wants_help = False
    position = 0
    while position < len(argv):
        word = argv[position]
        position += 1
        if word in HELP:
            wants_help = True
        elif _may_be_path(word) and (position == 1 or word.endswith(".toml") or word in shipped_names()):
            texts.setdefault(CONFIG_FILE, []).append(word)
        elif not word.startswith("--") or word == "--":
            problems.append(_unexpected(word))
            if word.startswith("-") and "." in word and position < len(argv) and not _is_flag(argv[position]):
                position += 1  # the value of a key with one hyphen
        else:
            key, equals, text = word[2:].partition("=")
            key = re.sub(r"(?<=\w)-(?=\w)", "_", key)
            value: str | None = text if equals else None
            if not equals and position < len(argv) and not _is_flag(argv[position]):
                value = argv[position]
                position += 1
            texts.setdefault(key, []).append(value)
    problems += [_repeated(key, given) for key, given in texts.items() if len(given) > 1]
    once = {key: given[0] for key, given in texts.items() if len(given) == 1}
    return Arguments(once, wants_help, tuple(problems), CONFIG_FILE in texts)


def missing_value(key: str, default: Any) -> Problem:
    """The Problem of a known key without a value; the remedy has the default as an example."""
    if isinstance(default, str):
        remedy = f"write --{key} {default or 'TEXT'}; for a value that starts with --, write --{key}=--VALUE"
    else:
        remedy = f"write --{key} {literal(default)}"
    return Problem(key, None, "needs a value", remedy)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in HELP


def _may_be_path(word: str) -> bool:
    return not word.startswith("-") and "=" not in word


def _unexpected(word: str) -> Problem:
    rule = "every argument is CONFIG, a --section.key or its value"
    if word.startswith("-") and "." in word.strip("-."):
        remedy = f"write -{word}"
    elif "=" in word and "." in word.partition("=")[0]:
        remedy = f"write --{word}"
    else:
        remedy = """remove it, or write --section.key VALUE; an array is one argument: '["a", "b"]'"""
    return Problem(f"argument {word!r}", None, rule, remedy)


def _repeated(key: str, given: list[str | None]) -> Problem:
    values = [text if text is not None else "" for text in given]
    choices = " or ".join(f"--{key}={text}" for text in dict.fromkeys(values))
    return Problem(key, values, "given once on the command line", f"keep one: {choices}")


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
    if text is None and value_type is not bool:
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
    """The value as TOML has it: paths as strings, tuples as lists."""
    if isinstance(value, PurePath):
        return str(value)
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
        return _unknown_column(key, text or "", row)
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
                problems.append(_unknown_column(path, given, row))
                continue
            found = read_value(path, given, types_of(row)[name], getattr(row, name))
            if isinstance(found, Problem):
                problems.append(found)
            else:
                values[name] = found
        built.append(row(**values))
    return tuple(built)


def _unknown_column(key: str, value: Any, row: type) -> Problem:
    table, _, name = key.rpartition(".")
    close = close_names(name, types_of(row))
    remedy = f"did you mean {table}.{close[0]}?" if close else "its keys: " + ", ".join(types_of(row))
    array = table.rpartition(".")[0]
    return Problem(key, value, f"a key of one [[{array}]] table", remedy)


def _default(section: str, name: str, family: str | None) -> Any:
    """The default of a key. For a hyper-parameter: its value in the family's first flavor."""
    if section == "model" and name not in types_of(ModelConfig) and family is not None:
        return getattr(next(iter(FAMILIES[family].flavors.values())), name)
    return getattr(SECTIONS[section](), name)


def full_keys(family: str | None) -> list[str]:
    """All keys in the spelling of the command line, with index 0 for arrays of tables (data.sources.0.path).

    family: of the model; None leaves the hyper-parameters out.
    """
    keys = []
    for section in SECTIONS:
        for name, value_type in section_types(section, family).items():
            row = row_type(value_type)
            keys += [f"{section}.{name}.0.{column}" for column in types_of(row)] if row else [f"{section}.{name}"]
    return keys


def unknown_key(key: str, value: Any, family: str | None) -> Problem:
    """The Problem of a key that does not exist."""
    section, _, name = key.partition(".")
    meant = suggest(key, full_keys(family))
    if name and section in SECTIONS:
        rule = f"a key of [{section}]"
        valid = "use one of its keys: " + ", ".join(section_types(section, family))
    else:
        rule, valid = "a key of a section", "use a key of one of the sections: " + ", ".join(SECTIONS)
    return Problem(key, value, rule, f"did you mean {' or '.join(meant)}?" if meant else valid)


def suggest(key: str, known: Collection[str]) -> list[str]:
    """The known keys most similar to `key`: usually one or none, several if equally likely."""
    folded = _fold(key)
    prefix, _, name = folded.rpartition(".")
    if folded in known:
        return [folded]
    if other := KEYS.get(folded) or NAMES.get(name):
        return [other]
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    elsewhere = [candidate for candidate in elsewhere if candidate.startswith(f"{prefix}.")] or elsewhere
    siblings = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == prefix]
    if siblings:
        return elsewhere or [f"{prefix}.{close}" for close in close_names(name, siblings)]
    return get_close_matches(folded, known, 1, 0.75) or elsewhere


def close_names(name: str, known: Collection[str]) -> list[str]:
    """The known name most similar to `name`, if any, ignoring case and hyphens."""
    folded = {_fold(candidate): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(_fold(name), folded, 1)]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
