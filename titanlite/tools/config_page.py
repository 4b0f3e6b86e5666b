"""docs/config.md, made from the sections themselves: `python -m titanlite.tools.config_page > docs/config.md`."""

from collections.abc import Iterable, Sequence

from titanlite.config.describe import Key, describe_config, field_texts, kind_in_a_word
from titanlite.config.fields import kinds_of, literal
from titanlite.config.schema import JobConfig
from titanlite.models.family import Family
from titanlite.models.registry import FAMILIES

INTRODUCTION = """\
# Configuration

<!-- Made by `python -m titanlite.tools.config_page > docs/config.md`; change the sections' source, not this file. -->

A run is one TOML file and what the command line adds to it:

```
torchrun --nproc-per-node 2 -m titanlite.train --job.config_file configs/quickstart.toml --training.steps 50
```

**Precedence.** Defaults < TOML < command line. The result, with every `-1` and `"auto"` that decides numbers replaced
by its value, is written to `<dump_folder>/config.toml` and can be given as `--job.config_file` again.

**Command line.** `--section.key value` or `--section.key=value`, with the names of the TOML. Values are written as in
TOML, strings without quotes: `--optimizer.lr 1e-3`, `--data.shuffle false`, `--job.description "a first run"`,
`--optimizer.weight_decay_skip '["*norm*"]'`. A value that itself starts with `--` needs the form with `=`. `--help`
shows all keys with the values in force; together with a TOML file, that file's.

**Strictness.** Unknown sections and keys, values of a wrong type (`"false"` for a boolean, `1.5` for an integer,
`nan` or `inf` anywhere) and values out of range are errors, in TOML and on the command line alike; an integer may
stand where a number is wanted. All problems are reported at once, each with key, value, rule and remedy; nothing is
started, and the exit code is 2. A value that the command line replaces is not looked at.
"""

SOURCES = """\
One table per source. On the command line tables are counted from 0: `--data.sources.0.path X` changes the first table
(without any in the TOML: the default one), and the number after the last adds one:

```toml
[[data.sources]]
kind = "jsonl"
path = "corpus/*.jsonl"

[[data.sources]]
kind = "text"
path = "notes"
document = "paragraph"
```
"""

VALIDATION_SOURCES = """\
One table per source, with the keys of `[[data.sources]]`; none by default. On the command line
`--validation.sources.0.kind X` adds the first.
"""

ARRAYS = {"data.sources": SOURCES, "validation.sources": VALIDATION_SOURCES}
"""What is to be said about each array of tables."""

MODEL = """\
`family` chooses the architecture and `flavor` one of its sizes; any hyper-parameter of the family may stand beside
them and replaces the flavor's value: `flavor = "8B"` with `n_layers = 4`.
"""


def document() -> str:
    """The text of docs/config.md."""
    lines = [INTRODUCTION]
    for section in describe_config(JobConfig()):
        if section.name == "model":
            own = [key for key in section.keys if key.name in ("family", "flavor")]
            lines += ["## [model]", "", section.text, "", MODEL, *_table(own), ""]
            for family in FAMILIES.values():
                lines += _family(family)
        elif "." in section.name:
            lines += [
                f"### [[{section.name.rpartition('.')[0]}]]",
                "",
                ARRAYS[section.name.rpartition(".")[0]],
                *_table(section.keys),
                "",
            ]
        else:
            lines += [f"## [{section.name}]", "", section.text, "", *_table(section.keys), ""]
    return "\n".join(lines).rstrip() + "\n"


def _family(family: Family) -> list[str]:
    """The hyper-parameters of a family, and the table of its flavors."""
    names = list(kinds_of(family.config_type))
    texts = field_texts(family.config_type)
    meanings = [
        (f"`{name}`", _choices(kind_in_a_word(kind)), _cell(texts.get(name, "")))
        for name, kind in kinds_of(family.config_type).items()
    ]
    values = [
        (f"`{name}`", *(f"`{literal(getattr(flavor, name))}`" for flavor in family.flavors.values())) for name in names
    ]
    return [
        f'### family = "{family.name}"',
        "",
        *_rows(("key", "values", "meaning"), meanings),
        "",
        "Its flavors:",
        "",
        *_rows(("key", *(f'"{name}"' for name in family.flavors)), values),
        "",
    ]


def _table(keys: Iterable[Key]) -> list[str]:
    cells = [(f"`{key.name}`", _choices(key.kind), f"`{key.value}`", _cell(key.text)) for key in keys]
    return _rows(("key", "values", "default", "meaning"), cells)


def _rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _choices(kind: str) -> str:
    return kind.strip("{}").replace(",", ", ") if kind.startswith("{") else kind


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    print(document(), end="")
