"""The names of all keys with the types of their values, and what an unknown name was probably meant to be."""

import dataclasses
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from titanlite.config.schema import JobConfig
from titanlite.data.config import SourceConfig
from titanlite.data.kinds import KINDS
from titanlite.models.family import ModelConfig
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import Problem

# Names that users of other trainers know.
MOVED = {
    "training.batch_size": "training.local_batch_size",
    "training.seed": "debug.seed",
    "training.dataset": "data.sources.0.kind",
    "training.dataset_path": "data.sources.0.path",
    "parallelism.data_parallel_replicate_degree": "parallelism.dp_replicate",
    "parallelism.data_parallel_shard_degree": "parallelism.dp_shard",
    "parallelism.tensor_parallel_degree": "parallelism.tp",
    "parallelism.pipeline_parallel_degree": "parallelism.pp",
    "optimizer.learning_rate": "optimizer.lr",
    "model.name": "model.family",
    "model.tokenizer_path": "tokenizer.path",
}


def kinds_of(section_type: Any) -> dict[str, Any]:
    """Field -> type of its values, of a dataclass."""
    hints = get_type_hints(section_type)
    if section_type is SourceConfig:
        hints["kind"] = Literal[tuple(KINDS)]
    return {field.name: hints[field.name] for field in dataclasses.fields(section_type)}


SECTIONS: Mapping[str, type] = kinds_of(JobConfig)


def section_kinds(section: str, family: str | None) -> dict[str, Any]:
    """Key -> type of one section. [model] also has the hyper-parameters of `family`; None: of no family."""
    kinds = kinds_of(SECTIONS[section])
    if SECTIONS[section] is ModelConfig:
        del kinds["overrides"]
        kinds["family"] = Literal[tuple(FAMILIES)]
        if family is not None:
            kinds["flavor"] = Literal[tuple(FAMILIES[family].flavors)]
            kinds |= kinds_of(FAMILIES[family].config_type)
    return kinds


def row_type(kind: Any) -> type | None:
    """The dataclass of one table where a key holds an array of tables, else None."""
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    return item if isinstance(item, type) and dataclasses.is_dataclass(item) else None


def full_keys(family: str | None) -> list[str]:
    """All keys as the command line has them; of an array of tables, those of the first."""
    keys = []
    for section in SECTIONS:
        for name, kind in section_kinds(section, family).items():
            row = row_type(kind)
            keys += [f"{section}.{name}.0.{column}" for column in kinds_of(row)] if row else [f"{section}.{name}"]
    return keys


def unknown_key(key: str, value: Any, family: str | None) -> Problem:
    """The Problem of a key that does not exist."""
    section, _, name = key.partition(".")
    meant = suggest(key, full_keys(family))
    if name and section in SECTIONS:
        rule = f"a key of [{section}]"
        valid = "its keys: " + ", ".join(section_kinds(section, family))
    else:
        rule, valid = "a key of a section", "the sections: " + ", ".join(SECTIONS)
    return Problem(key, value, rule, f"did you mean {' or '.join(meant)}?" if meant else valid)


def suggest(key: str, known: Collection[str]) -> list[str]:
    """The known keys that `key` was probably meant to be; all of them equally likely, mostly one or none."""
    if key in MOVED:
        return [MOVED[key]]
    folded = _fold(key)
    prefix, _, name = folded.rpartition(".")
    if folded in known:
        return [folded]
    elsewhere = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    siblings = [candidate.rpartition(".")[2] for candidate in known if candidate.rpartition(".")[0] == prefix]
    if siblings:
        return elsewhere or [f"{prefix}.{close}" for close in close_names(name, siblings)]
    return get_close_matches(folded, known, 1, 0.75) or elsewhere


def close_names(name: str, known: Collection[str]) -> list[str]:
    """The known name that `name` is most alike, if any; letter case and hyphens do not count."""
    folded = {_fold(candidate): candidate for candidate in known}
    return [folded[match] for match in get_close_matches(_fold(name), folded, 1)]


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
