"""`--storage.KEY VALUE` of a command: how it reaches object stores."""

from collections.abc import Sequence
from typing import Any

from titanlite.config.load import parse
from titanlite.runtime.errors import Problem, raise_problems
from titanlite.storage.config import check_storage
from titanlite.storage.store import apply_settings
from titanlite.tools.command import read_options_and_overrides


def read_options_of_stores(kind: Any, argv: Sequence[str], command: str) -> Any:
    """As read_options; also takes `--storage.KEY VALUE`, and applies it. Raises ConfigError with all problems."""
    options, overrides, problems = read_options_and_overrides(kind, argv, command)
    raise_problems([*problems, *check_sections(overrides, ("storage",))])
    apply_storage(overrides)
    return options


def check_sections(overrides: Sequence[str], sections: Sequence[str]) -> list[Problem]:
    """Problems of overrides of other sections than those that the command takes."""
    keys = [word[2:].partition("=")[0] for word in overrides]
    rule, remedy = f"a key of {', '.join(sections)}", "leave it out"
    return [Problem(key, None, rule, remedy) for key in keys if key.partition(".")[0] not in sections]


def apply_storage(overrides: Sequence[str]) -> None:
    """Let this process reach stores as `--storage.KEY=VALUE` in overrides says; without any, as before, by its
    environment. Raises ConfigError."""
    if words := [word for word in overrides if word.startswith("--storage.")]:
        parsed = parse(words, imports=False)
        raise_problems([*parsed.problems, *check_storage(parsed.config.storage)])
        apply_settings(parsed.config.storage)
