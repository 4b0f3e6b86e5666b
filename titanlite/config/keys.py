"""Names of all keys, and what a key that does not exist was meant to be."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from titanlite.checkpoint.dropped import DROPPED
from titanlite.config.fields import SECTIONS, columns_of, keys_of, row_type
from titanlite.config.files import EXTENDS
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem


def full_keys(family: str | None) -> list[str]:
    """All keys in the spelling of the command line, with index 0 for arrays of tables (data.sources.0.path).

    family: of the model; None leaves the hyper-parameters out.
    """
    keys = []
    for section in SECTIONS:
        for name, key in keys_of(section, family).items():
            row = row_type(key.type)
            keys += [f"{section}.{name}.0.{column}" for column in columns_of(row)] if row else [f"{section}.{name}"]
    return keys


def unknown_key(key: str, value: Any, family: str | None) -> Problem:
    """The Problem of a key that does not exist."""
    section, _, name = key.partition(".")
    if EXTENDS in (key, name):
        remedy = f'write {EXTENDS} = "base.toml" above the first [section] of the TOML file'
        return Problem(key, value, "a key at the top of a TOML file", remedy)
    others = [other for other in FAMILIES if name in keys_of("model", other)]
    if section == "model" and others:
        rule = f"a key of [model] with family = {family!r}; {name} is a hyper-parameter of {', '.join(others)}"
        return Problem(key, value, rule, "leave it out, or choose another model.family")
    meant = [] if key in DROPPED else suggest(key, full_keys(family))
    if name and section in SECTIONS:
        rule = f"a key of [{section}]"
        valid = "use one of its keys: " + ", ".join(keys_of(section, family))
    else:
        rule, valid = "a key of a section", "use a key of one of the sections: " + ", ".join(SECTIONS)
    valid = DROPPED[key].remedy if key in DROPPED else valid
    return Problem(key, value, rule, f"did you mean {' or '.join(meant)}?" if meant else valid)


def unknown_column(key: str, value: Any, row: type) -> Problem:
    """The Problem of a key that no table of the array has."""
    table, _, name = key.rpartition(".")
    close = close_names(name, columns_of(row))
    array = table.rpartition(".")[0]
    dropped = DROPPED.get(f"{array}.{name}")
    remedy = f"did you mean {table}.{close[0]}?" if close else "its keys: " + ", ".join(columns_of(row))
    remedy = dropped.remedy if dropped else remedy
    return Problem(key, value, f"a key of one [[{array}]] table", remedy)


def suggest(key: str, known: Collection[str]) -> list[str]:
    """The known keys most similar to `key`: usually one or none, several if equally likely."""
    folded = _fold(key)
    prefix, _, name = folded.rpartition(".")
    if folded in known:
        return [folded]
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
