"""Import of the plugins that a configuration names: of one that the user gives, or of a saved run with permission."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titanlite.config.value_types import Key, explain, value_from_text, value_type
from titanlite.runtime.errors import Problem, UserError
from titanlite.runtime.plugins import PluginError, load_plugins, missing_plugins
from titanlite.runtime.settings import Setting
from titanlite.storage.address import Place

PLUGINS = "job.plugins"
_KEY = Key(tuple[str, ...], ("my_package.model",), Setting(is_path=True))


def import_plugins(tables: dict[str, Any], texts: dict[str, str | None]) -> Problem | None:
    """Import the plugins of the command line, or of the file; put their entries with digests into `tables`.

    Removes them from `texts`, the keys of the command line.
    """
    text = texts.get(PLUGINS)
    job: Any = tables.get("job", {})
    if not isinstance(job, dict):
        return None  # has its own problem
    value = job.get("plugins", []) if text is None else value_from_text(text, tuple[str, ...])
    try:
        value = TypeAdapter(value_type(_KEY)).validate_python(value)
    except ValidationError as error:
        details = error.errors()[0]
        return explain(PLUGINS, details["input"], _KEY, details["type"])
    try:
        entries = load_plugins(value)
    except PluginError as error:
        return Problem(PLUGINS, error.entry, error.rule, error.remedy)
    texts.pop(PLUGINS, None)
    if entries:
        tables.setdefault("job", {})["plugins"] = list(entries)
    return None


def import_plugins_of(values: Mapping[str, Mapping[str, Any]], where: Place, *, allowed: bool) -> None:
    """Import the plugins of a saved configuration, and those of installed packages.

    where: what was saved with it. allowed: whether the user allows the import of code that a file names. Raises
    UserError if it is needed and not allowed.
    """
    load_plugins(())
    entries = [str(entry) for entry in values.get("job", {}).get("plugins", [])]
    if (missing := missing_plugins(entries)) and not allowed:
        names = ", ".join(map(repr, missing))  # quoted: a name may read like a sentence of titanlite
        raise UserError(
            f"{where} needs code that job.plugins of its run names: {names}; to import it, if you trust it, add "
            "--allow-import"
        )
    load_plugins(entries)
