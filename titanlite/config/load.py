"""From a TOML file and a command line to one checked, frozen JobConfig; and back to TOML."""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from titanlite.checkpoint.preflight import earlier_config
from titanlite.config.arguments import split_arguments
from titanlite.config.check import check_config, resolve_config
from titanlite.config.describe import help_text
from titanlite.config.names import SECTIONS, kinds_of, row_type
from titanlite.config.schema import JobConfig
from titanlite.config.tables import build_section, fields_of, put_argument, sections_of
from titanlite.config.values import literal
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import ConfigError, Problem

CONFIG_FILE = "job.config_file"


@dataclass(frozen=True)
class Parsed:
    """config: keys with a problem have their default. file_is_read: whether the TOML file, if any, could be read."""

    config: JobConfig
    problems: list[Problem]
    file_is_read: bool


def load_config(argv: Sequence[str], *, world_size: int, device_type: str, looks_at_files: bool = True) -> JobConfig:
    """The configuration of a run: read, checked and resolved, the same on every rank.

    looks_at_files: as for check_config.
    Prints the help (on the first rank) and exits with 0 where it is asked for. Raises ConfigError with all problems.
    """
    parsed = _parse(argv)
    if split_arguments(argv).wants_help:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(parsed.config))
        raise SystemExit(0)
    problems = list(parsed.problems)
    config = keep_earlier(parsed.config) if looks_at_files else parsed.config
    if parsed.file_is_read:
        found = check_config(config, world_size=world_size, device_type=device_type, looks_at_files=looks_at_files)
        found = [_with_origin(problem, parsed.config, config) for problem in found]
        problems += [problem for problem in found if not _stands_on(problem, parsed.problems)]
    if problems:
        raise ConfigError(problems)
    return resolve_config(config, world_size=world_size, device_type=device_type)


def keep_earlier(config: JobConfig) -> JobConfig:
    """With what the first start of the run has put in place of -1, where there is a checkpoint of it to go on from."""
    earlier = earlier_config(config.checkpoint, config.job.dump_folder)
    if not earlier:
        return config
    training, data = config.training, config.data
    if training.global_batch_size == -1:
        training = replace(training, global_batch_size=earlier["training"]["global_batch_size"])
    if data.num_streams == -1:
        data = replace(data, num_streams=earlier["data"]["num_streams"])
    return replace(config, training=training, data=data)


def parse_config(argv: Sequence[str]) -> tuple[JobConfig, list[Problem]]:
    """The configuration as given, and the problems with names and types; keys with a problem have their default."""
    parsed = _parse(argv)
    return parsed.config, parsed.problems


def config_from_values(values: Mapping[str, Mapping[str, Any]], argv: Sequence[str] = ()) -> JobConfig:
    """The configuration that a checkpoint's manifest holds, by section; argv: `--section.key value` on top of it.

    Raises ConfigError where it is of another form, as one that a later titanlite has written may be, and for argv.
    """
    arguments = split_arguments(argv)
    tables = {name: dict(table) for name, table in values.items()}
    tables["job"].pop("config_file", None)
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


def dump_config(config: JobConfig) -> str:
    """TOML that gives `config` again when it is read; job.config_file, which says where from, is left out."""
    lines: list[str] = []
    for section in SECTIONS:
        values = getattr(config, section)
        table = fields_of(values)
        if isinstance(values, ModelConfig):
            table |= table.pop("overrides")
        if section == "job":
            del table["config_file"]
        lines += ["", f"[{section}]"]
        rows = {key: value for key, value in table.items() if value and row_type(kinds_of(type(values)).get(key))}
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
    """Of a value that nobody has written, but that an earlier start has kept: where it is from, and what fits it."""
    values = {
        "training.global_batch_size": (given.training.global_batch_size, kept.training.global_batch_size),
        "data.num_streams": (given.data.num_streams, kept.data.num_streams),
    }
    before, now = values.get(problem.key, (None, None))
    if before == now:
        return problem
    rule = f"{problem.rule}; the run's checkpoints say {now}"
    return replace(problem, rule=rule, remedy="use a mesh and a local_batch_size that fit it, or start a new run")


def _stands_on(problem: Problem, earlier: list[Problem]) -> bool:
    """Whether a part's problem is with a key that could not be read, or speaks of one and so of its default."""
    section = problem.key.partition(".")[0]
    said = set(re.findall(r"\w+(?:\.\w+)*", f"{problem.rule} {problem.remedy}"))
    for bad in (other.key for other in earlier):
        names = {bad, bad.rpartition(".")[2]} if bad.startswith(f"{section}.") else {bad}
        if problem.key == bad or problem.key.startswith(f"{bad}.") or ("." in bad and said & names):
            return True
    return False


def _parse(argv: Sequence[str]) -> Parsed:
    arguments = split_arguments(argv)
    problems = list(arguments.problems)
    path = arguments.texts.get(CONFIG_FILE)
    content = {} if path is None else _read_file(path, problems)
    tables = sections_of(content or {}, problems)
    family = arguments.texts.get("model.family") or tables.get("model", {}).get("family", ModelConfig.family)
    family = family if isinstance(family, str) and family in FAMILIES else None
    found = [put_argument(tables, key, text, family) for key, text in arguments.texts.items()]
    problems += [problem for problem in found if problem]
    sections = {name: build_section(name, tables.get(name, {}), family, problems) for name in SECTIONS}
    return Parsed(JobConfig(**sections), problems, content is not None)


def _read_file(path: str, problems: list[Problem]) -> dict[str, Any] | None:
    """What the file says; None where it cannot be read, and why goes to `problems`."""
    try:
        content = tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        folder = Path(path).parent
        close = get_close_matches(path, [str(file) for file in folder.glob("*.toml")], 1) if folder.is_dir() else []
        remedy = f"did you mean {close[0]}?" if close else "give the path of a TOML file"
        problems.append(Problem(CONFIG_FILE, path, f"a TOML file that can be read ({reason})", remedy))
        return None
    except UnicodeDecodeError as error:
        problems.append(Problem(CONFIG_FILE, path, "a file in UTF-8", f"save it as UTF-8: byte {error.start} is not"))
        return None
    except (ValueError, RecursionError) as error:
        problems.append(Problem(CONFIG_FILE, path, "valid TOML", f"mend the file: {error}"))
        return None
    if isinstance(content.get("job"), dict) and "config_file" in content["job"]:
        value = content["job"].pop("config_file")
        problems.append(Problem(CONFIG_FILE, value, "on the command line only", f"remove it from {path}"))
    return content
