"""The runs of a sweep: values on the command line, their combinations, one folder per run, the check of all."""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import tomli

from titanlite.config.arguments import split_arguments
from titanlite.config.fields import columns_of, fields_of, keys_of, setting_of, value_of
from titanlite.config.files import CONFIG_FILE
from titanlite.config.load import parse, read_copy, resolve
from titanlite.config.plugins import PLUGINS
from titanlite.config.schema import JobConfig
from titanlite.config.value_types import is_text, literal, row_type
from titanlite.runtime.errors import ConfigError, Problem, UsageError
from titanlite.runtime.plugins import plugin_digests
from titanlite.storage.address import is_address, place

T = TypeVar("T")

DUMP_FOLDER = "job.dump_folder"
MAX_RUNS = 1000
MAX_VALUE_CHARS = 40
"""Of a value in the name of a folder; a longer one is cut."""


@dataclass(frozen=True)
class Run:
    """One combination. name: of its folder. values: swept key -> value, as text. arguments: of `titanlite train`.
    config: resolved."""

    name: str
    values: Mapping[str, str]
    arguments: Sequence[str]
    config: JobConfig

    @property
    def folder(self) -> Path:
        """Its dump folder."""
        return Path(self.config.job.dump_folder)


def split_values(text: str) -> list[str]:
    """The values that commas separate. A comma in brackets or quotes belongs to a value."""
    values, depth, quote, start, position = [], 0, "", 0, 0
    while position < len(text):
        char = text[position]
        if quote:
            position += char == "\\" and quote == '"'
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            values.append(text[start:position].strip())
            start = position + 1
        position += 1
    return [*values, text[start:].strip()]


def combinations(config: str, overrides: Sequence[str], *, world_size: int, device_type: str) -> list[Run]:
    """The checked runs, the values of the last key varying fastest. config: path or shipped name. overrides:
    `--section.key VALUE[,VALUE ...]`, and `--strict`. Raises ConfigError with the problems of all runs."""
    arguments = split_arguments([f"--{CONFIG_FILE}={config}", *overrides])
    problems = list(arguments.problems)
    given = {key: text for key, text in arguments.texts.items() if key != CONFIG_FILE}
    common = parse([f"--{CONFIG_FILE}={config}"]).config
    values = {key: _values(key, text, common) for key, text in given.items()}
    swept = {key: found for key, found in values.items() if len(found) > 1}
    remedy = 'leave the last comma out, or write the value; an empty text is "" in quotes: \'""\''
    problems += [
        Problem(key, given[key], "a value on both sides of each comma", remedy)
        for key, found in swept.items()
        if "" in found and '""' not in split_values(given[key] or "")
    ]
    rule = "one value: each run has a folder below it, named by its values"
    if DUMP_FOLDER in swept:
        problems.append(Problem(DUMP_FOLDER, given[DUMP_FOLDER], rule, "keep one"))
    count = prod(map(len, swept.values()))
    if count > MAX_RUNS:
        problems.append(Problem("sweep", count, f"at most {MAX_RUNS} runs", "sweep over fewer values"))
    if problems:
        raise ConfigError(problems)
    if not swept:
        example = "titanlite sweep my.toml --optimizer.lr 1e-3,3e-4"
        raise UsageError(f"no key has several values: write them with commas between them, as in {example}")
    names = short_names(list(swept))
    chosen = [dict(zip(values, each, strict=True)) for each in product(*values.values())]
    labels = [", ".join(f"{names[key]} = {texts[key]}" for key in swept) for texts in chosen]
    strict = ["--strict"] if arguments.options.strict else []
    check = partial(_combination, config, names=names, switches=strict, world_size=world_size, device_type=device_type)
    runs = checked_runs({label: partial(check, texts) for label, texts in zip(labels, chosen, strict=True)})
    _require_different(runs)
    return runs


def checked_runs(makes: Mapping[str, Callable[[], T]]) -> list[T]:
    """What the functions return, by label. Raises ConfigError with the problems of all, each with the first label that
    has it, unless all have it."""
    made: list[T] = []
    found: dict[Problem, list[str]] = {}
    for label, make in makes.items():
        try:
            made.append(make())
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(replace(problem, value=_hashable(problem.value)), []).append(label)
    if found:
        raise ConfigError([_of_runs(problem, labels, len(makes)) for problem, labels in found.items()])
    return made


def _values(key: str, text: str | None, config: JobConfig) -> list[str]:
    """The values of one key. A text in quotes loses them, so that it can have commas."""
    if text is None:
        return ["true"]
    values = split_values(text)
    return [_unquoted(value) for value in values] if _is_text(key, config) else values


def _is_text(key: str, config: JobConfig) -> bool:
    """Whether the key takes strings. An unknown key does not."""
    section, _, name = key.partition(".")
    name, *row = name.split(".")
    try:
        keys = keys_of(section, config.model.family)
        if row and name in keys and (table := row_type(keys[name].type)):
            keys, name = columns_of(table), row[-1]
    except KeyError:
        return False
    return name in keys and is_text(keys[name].type)


def _unquoted(text: str) -> str:
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return text
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text
    return value if isinstance(value, str) else text


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Key -> its last part; the entire key if another key has the same last part."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def _combination(
    config: str,
    texts: Mapping[str, str],
    *,
    names: Mapping[str, str],
    switches: Sequence[str],
    world_size: int,
    device_type: str,
) -> Run:
    """The run of a combination, checked. Raises ConfigError."""
    parsed = parse_texts(config, texts)
    values = {key: _shown(value_of(parsed, key)) for key in names}
    name = "_".join(f"{names[key]}-{in_path(value)}" for key, value in values.items())
    arguments = arguments_of(config, texts, name, parsed, switches)
    return Run(name, values, arguments, resolve(parse(arguments), world_size=world_size, device_type=device_type))


def parse_texts(config: str, texts: Mapping[str, str]) -> JobConfig:
    """The configuration with these values, as text by key; not resolved. Raises ConfigError."""
    parsed = parse([f"--{CONFIG_FILE}={config}", *(f"--{key}={text}" for key, text in texts.items())])
    if parsed.problems:
        raise ConfigError(parsed.problems)
    return parsed.config


def arguments_of(
    config: str, texts: Mapping[str, str], name: str, parsed: JobConfig, switches: Sequence[str] = ()
) -> list[str]:
    """The arguments of `titanlite train` for a run in the folder `name` below the dump folder, and below the folder of
    checkpoints if this is in a store. parsed: of parse_texts."""
    plain = [f"--{key}={text}" for key, text in texts.items() if key != DUMP_FOLDER]
    arguments = [f"--{CONFIG_FILE}={config}", *plain, f"--{DUMP_FOLDER}={Path(parsed.job.dump_folder, name)}"]
    if is_address(checkpoints := parsed.checkpoint.folder):
        arguments = [each for each in arguments if not each.startswith("--checkpoint.folder=")]
        arguments.append(f"--checkpoint.folder={place(checkpoints) / name}")
    return [*arguments, *switches]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else literal(value)


def in_path(text: str) -> str:
    """A value as a part of a folder's name: with a hash, if it has other characters or is long."""
    name = re.sub(r"[^\w.+-]+", "-", text, flags=re.ASCII).strip("-.")[:MAX_VALUE_CHARS]
    return name if name == text else f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".strip("-")


def _hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _of_runs(problem: Problem, labels: Sequence[str], count: int) -> Problem:
    """The problem, with the runs that have it, unless all have."""
    if len(labels) == count:
        return problem
    others = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return replace(problem, rule=f"{problem.rule} (run {labels[0]}{others})")


def _require_different(runs: Sequence[Run]) -> None:
    """Raise ConfigError if two runs have the same values."""
    names = [run.name for run in runs]
    for key in runs[0].values:
        for value in dict.fromkeys(run.values[key] for run in runs):
            same = [run for run in runs if run.values[key] == value]
            if len(same) != len({run.name for run in same}):
                rule = "different values: two runs would have the same folder"
                raise ConfigError([Problem(key, value, rule, "write it once")])
    assert len(set(names)) == len(names)


def require_same_settings(run: Run, option: str = DUMP_FOLDER) -> None:
    """Raise ConfigError if the finished run in the folder had other settings: it would be skipped unnoticed.

    option: of the command, by which the folder was chosen. Dtypes that are "auto" may differ: the run may have been
    trained on another machine.
    """
    before, now = _settings(read_copy(run.folder)), _settings(run.config)
    given = _learned(parse(run.arguments, imports=False).config)
    changed = [key for key in now if before[key] != now[key] and given.get(key) != "auto"]
    texts = [f"{key} = {before[key]} (now {now[key]})" for key in changed]
    if texts:
        rule = f"a folder without a finished run of other settings; it has one with {', '.join(texts)}"
        remedy = f"choose another --{option}, or remove the folder"
        raise ConfigError([Problem(DUMP_FOLDER, str(run.folder), rule, remedy)])


def _settings(config: JobConfig) -> dict[str, Any]:
    """Full key -> value of the keys that decide what is learned, and the code that they name. A start resolves the
    revision of a source."""
    sources = tuple(replace(source, revision="") for source in config.data.sources)
    config = replace(config, data=replace(config.data, sources=sources))
    return _learned(config) | {PLUGINS: plugin_digests(config.job.plugins)}


def _learned(config: JobConfig) -> dict[str, Any]:
    """Those that the configuration gives: a run that has begun keeps the values of its flavor."""
    config = replace(config, model=replace(config.model, kept={}))
    found = {
        f"{section}.{key}": value
        for section, values in fields_of(config).items()
        for key, value in fields_of(values).items()
    }
    return {key: value for key, value in found.items() if setting_of(key).affects in ("numbers", "facts")}
