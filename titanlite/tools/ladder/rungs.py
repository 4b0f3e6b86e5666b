"""The runs of a ladder, as its file describes them: sizes, tokens, learning rate, batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from titanlite.config.arguments import split_arguments
from titanlite.config.check import one_rank
from titanlite.config.files import CONFIG_FILE, beside, config_path, read_file
from titanlite.config.lengths import UNSET
from titanlite.config.load import parse, resolve
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages
from titanlite.config.value_types import text_of
from titanlite.data.steps import tokens_until
from titanlite.models.decoder import idle_parameters
from titanlite.models.registry import FAMILIES, full_parameters
from titanlite.runtime.errors import ConfigError, Problem, raise_problems
from titanlite.tools.sweep.combinations import MAX_RUNS, Run, arguments_of, checked_runs, in_path, parse_texts

TARGET = "target"
RULES = ("fixed", "deepseek")
BATCH, LR = "training.global_batch_size", "optimizer.lr"
COMMON = ("job", "data", "tokenizer", "validation", "loss")
"""Sections that are the same in all runs: otherwise their losses are of different data, or the folders differ."""
COMMON_KEYS = ("training.seq_len", "training.steps", "training.tokens", "training.stages", "model.vocab_size")
OWN = ("name", "tokens", "tokens_per_parameter")
"""Keys of a rung that are no sections."""


@dataclass(frozen=True)
class Rung:
    """A run of a ladder. parameters: of the blocks, without embeddings, the last norm and the output layer, and without
    experts that a token does not use. tokens: that it is trained on. flops: of its training."""

    name: str
    run: Run
    parameters: int
    tokens: int
    flops: int


@dataclass(frozen=True)
class Ladder:
    """The runs to fit, and the one to predict."""

    rungs: Sequence[Rung]
    target: Rung


def read_ladder(path: str, overrides: Sequence[str], *, world_size: int, device_type: str) -> Ladder:
    """The checked runs of a file. overrides: `--section.key value` for all runs, and --strict. Raises ConfigError with
    the problems of all runs."""
    arguments = split_arguments(overrides)
    problems: list[Problem] = []
    content = read_file(path, problems)
    of_file = [replace(each, key="argument LADDER") if each.key == CONFIG_FILE else each for each in problems]
    raise_problems([*arguments.problems, *of_file])
    assert content is not None, "it has a problem"
    tables = content.tables
    raise_problems(_check(tables))
    rule = tables.get("rule", "fixed")
    config = beside(config_path(path).parent, tables["config"])
    common = _texts(tables.get("common", {})) | {key: text or "true" for key, text in arguments.texts.items()}
    shared = parse_texts(config, common)
    raise_problems([*_check_shared(shared), *_check_lengths(common), *_check_rule(rule, common)])
    strict = ["--strict"] if arguments.options.strict else []
    make = partial(_rung, config, common, shared, rule=rule, switches=strict, device_type=device_type)
    counts = [len(row["tokens"]) if isinstance(row.get("tokens"), list) else 1 for row in tables["rungs"]]
    if sum(counts) > MAX_RUNS:
        raise ConfigError([Problem("rungs", sum(counts), f"at most {MAX_RUNS} runs", "write fewer rungs or tokens")])
    makes = {
        f"rung {row['name']}, {tokens:,} tokens": partial(make, row["name"], own, tokens, world_size=world_size)
        for row in tables["rungs"]
        for own, tokens in _runs_of(row, config, common)
    }
    ((own, tokens),) = _runs_of(tables[TARGET], config, common)
    makes[TARGET] = partial(make, TARGET, own, tokens, world_size=None)
    *rungs, last = checked_runs(makes)
    return Ladder(rungs, last)


def _check(tables: Mapping[str, Any]) -> list[Problem]:
    """Problems of the file that are not those of a configuration."""
    found = []
    known = ("config", "rule", "common", "rungs", TARGET)
    for key in tables:
        if key in known:
            continue
        close = get_close_matches(key, known, n=1)
        remedy = "write keys of all runs below common, as in common.training.seq_len = 256"
        remedy = f"did you mean {close[0]}?" if close else remedy
        found.append(Problem(key, None, f"one of {', '.join(known)}", remedy))
    config, rows, rule = tables.get("config"), tables.get("rungs"), tables.get("rule", "fixed")
    if not isinstance(config, str):
        found.append(Problem("config", config, "the TOML file of the runs", 'write for example config = "quickstart"'))
    if rule not in RULES:
        found.append(Problem("rule", rule, f"one of {', '.join(RULES)}", "see docs/ladder.md"))
    if not isinstance(tables.get("common", {}), dict):
        found.append(Problem("common", tables["common"], "a table", "write [common]"))
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        return [*found, Problem("rungs", None, "tables [[rungs]], one per size", "see docs/ladder.md")]
    if not isinstance(tables.get(TARGET), dict):
        return [*found, Problem(TARGET, None, "a table [target]: the run to predict", "see docs/ladder.md")]
    names = [row.get("name") for row in rows]
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        is_name = isinstance(name, str) and name == in_path(name) and name not in ("", TARGET)
        if not is_name or names.index(name) < number:
            rule = "a name of letters, digits and ._+- that no other rung has: folders begin with it"
            found.append(Problem(f"rungs.{number}.name", name, rule, 'write for example name = "small"'))
        found += _check_row(f"rungs.{number}", row, several=True)
    return found + _check_row(TARGET, tables[TARGET], several=False)


def _check_row(table: str, row: Mapping[str, Any], *, several: bool) -> list[Problem]:
    found = []
    given = [key for key in OWN[1:] if key in row]
    example = "tokens_per_parameter = [10, 20, 40]" if several else "tokens_per_parameter = 20"
    if len(given) != 1:
        found.append(Problem(table, None, f"one of {' and '.join(OWN[1:])}", f"write for example {example}"))
    for key in given:
        values = row[key] if several and isinstance(row[key], list) else [row[key]]
        numbers = all(type(value) in (int, float) and 0 < value < 2**63 for value in values)
        if not values or not numbers or len({*values}) < len(values):
            rule = "a positive number" + ", or an array of different ones" * several
            found.append(Problem(f"{table}.{key}", row[key], rule, f"write for example {example}"))
    for key, text in _texts({name: value for name, value in row.items() if name not in OWN}).items():
        if "." not in key:
            rule, remedy = (
                "a key of the table, or one of a run with its section",
                "write for example model.n_layers = 4",
            )
            found.append(Problem(f"{table}.{key}", text, rule, remedy))
        elif key.startswith(tuple(f"{name}." for name in COMMON)) or key in COMMON_KEYS:
            rule = "a key that may differ between the runs of a ladder: losses must be of the same data"
            remedy = "write it below common, or in the configuration"
            found.append(Problem(f"{table}.{key}", text, rule, remedy))
    return found


def _texts(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """The values of nested tables as text, by full key."""
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            found |= _texts(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(text_of(value))
    return found


def _check_shared(config: JobConfig) -> list[Problem]:
    """Problems of the configuration that all runs share; not resolved."""
    found = []
    if not config.validation.enable:
        rule, remedy = "true: the law is fitted to validation losses", "enable it below common, or in the configuration"
        found.append(Problem("validation.enable", False, rule, remedy))
    if config.training.global_batch_size == UNSET:
        rule = "a number: the batch must not depend on the machine"
        found.append(Problem(BATCH, UNSET, rule, "write it below common, or in the configuration"))
    return found


def _check_lengths(common: Mapping[str, str]) -> list[Problem]:
    """Problems of lengths that are given for all runs."""
    rule, remedy = "left out: each rung says its tokens", "write tokens or tokens_per_parameter in [[rungs]]"
    return [Problem(key, common[key], rule, remedy) for key in ("training.steps", "training.tokens") if key in common]


def _check_rule(rule: str, common: Mapping[str, str]) -> list[Problem]:
    """Problems of a learning rate for all runs, in place of which the rule would set its own."""
    if rule == "fixed" or LR not in common:
        return []
    remedy = 'write it in a rung, which wins over the rule, or rule = "fixed"'
    return [Problem(LR, common[LR], f'left out with rule = "{rule}", which sets it for each run', remedy)]


def _runs_of(row: Mapping[str, Any], config: str, common: Mapping[str, str]) -> list[tuple[dict[str, str], int]]:
    """(own keys as text, tokens) of each run of a rung. Raises ConfigError."""
    own = _texts({key: value for key, value in row.items() if key not in OWN})
    tokens, factor = row.get("tokens"), 1
    if tokens is None:
        tokens, factor = row["tokens_per_parameter"], parameters_of(parse_texts(config, {**common, **own}))
    counts = [round(each * factor) for each in (tokens if isinstance(tokens, list) else [tokens])]
    if len({*counts}) < len(counts):
        rule, remedy = "different numbers of tokens, rounded: two runs would have the same folder", "write each once"
        raise ConfigError([Problem(f"rung {row['name']}", tokens, rule, remedy)])
    return [(own, count) for count in counts]


def parameters_of(config: JobConfig) -> int:
    """The number of parameters of the blocks that a token uses."""
    try:
        parameters, structure = full_parameters(config.model)
    except RuntimeError as error:
        raise ConfigError(
            [Problem("model", None, f"a model that can be built: {error}", "use smaller sizes")]
        ) from None
    in_blocks = tuple(f"{block}." for block in structure.blocks)
    count = sum(value.numel() for name, value in parameters.items() if name.startswith(in_blocks))
    return count - idle_parameters(config.hyper_parameters)


def _rung(
    config: str,
    common: Mapping[str, str],
    shared: JobConfig,
    name: str,
    own: Mapping[str, str],
    tokens: int,
    *,
    rule: str,
    switches: Sequence[str],
    world_size: int | None,
    device_type: str,
) -> Rung:
    """The checked run. shared: of `config` and `common`. world_size: None: the run is for another machine. Raises
    ConfigError."""
    streams = shared.data.num_streams if shared.data.num_streams != UNSET else shared.training.global_batch_size
    texts = {**common, "training.tokens": str(tokens), "data.num_streams": str(streams)}
    parsed = parse_texts(config, {**texts, **own})
    parameters = parameters_of(parsed)
    if rule == "deepseek":
        lr, batch = deepseek(6 * parameters * tokens)
        sequences = 2 ** max(round(math.log2(batch / shared.training.seq_len)), 0)
        texts |= {LR: f"{lr:.3g}", BATCH: str(sequences)}
    parsed = parse_texts(config, {**texts, **own})
    texts |= {**own, **_same_validation(shared, parsed.training.global_batch_size)}
    folder = name if name == TARGET else f"{name}_D-{tokens}"
    arguments = arguments_of(config, texts, folder, parsed, switches)
    parsed_run = parse(arguments)
    if world_size is None:
        parsed_run = replace(parsed_run, config=one_rank(parsed_run.config))
    checked = resolve(parsed_run, world_size=world_size or 1, device_type=device_type)
    trained = tokens_until(batch_stages(checked), checked.training.steps)
    family = FAMILIES[checked.model.family]
    flops = trained * family.flops_per_token(checked.hyper_parameters, checked.training.seq_len)
    values = {
        "rung": name,
        "N": f"{parameters:,}",
        "D": f"{trained:,}",
        "lr": f"{checked.optimizer.lr:.3g}",
        "batch": str(checked.training.global_batch_size),
    }
    return Rung(name, Run(folder, values, arguments, checked), parameters, trained, flops)


def _same_validation(shared: JobConfig, batch: int) -> dict[str, str]:
    """validation.steps of a run with another batch: the same sequences as in the shared configuration."""
    if shared.validation.steps == UNSET or batch < 1:
        return {}
    sequences = shared.validation.steps * shared.training.global_batch_size
    if sequences % batch:
        rule = f"the {sequences} sequences of a validation are a multiple of the batch of each run; a run has {batch}"
        remedy = "choose validation.steps accordingly, or -1 for all sequences"
        raise ConfigError([Problem("validation.steps", shared.validation.steps, rule, remedy)])
    return {"validation.steps": str(sequences // batch)}


def deepseek(flops: float) -> tuple[float, float]:
    """(learning rate, tokens of a batch) for a training of so many FLOPs: the power laws of section 3.1 of DeepSeek-AI,
    "DeepSeek LLM: Scaling Open-Source Language Models with Longtermism" (2024)."""
    return 0.3118 * flops**-0.1250, 0.2920 * flops**0.3271
