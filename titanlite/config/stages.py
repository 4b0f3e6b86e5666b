"""Training stages: the configuration of each, by [[training.stages]], their rules, and lengths in tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from titanlite.config.lengths import UNSET
from titanlite.config.schema import JobConfig, StageConfig, TrainingConfig
from titanlite.data.kinds import source_names
from titanlite.data.steps import BatchStage, steps_until, tokens_until
from titanlite.optim.lengths import LENGTHS, steps_of
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.text import counted

SIZES = ("global_batch_size", "seq_len")
"""Keys of a stage that are keys of [training], too."""
ROPE = (
    *("rope_theta", "rope_scaling_factor", "rope_original_seq_len", "rope_low_freq_factor", "rope_high_freq_factor"),
    *("rope_beta_fast", "rope_beta_slow"),
)
"""Keys of a stage that are hyper-parameters of families."""


def stage_configs(config: JobConfig) -> list[JobConfig]:
    """The configuration of each stage, as of a run that has no other stage; the first one is [training] itself."""
    current = replace(config, training=replace(config.training, stages=()))
    found = [current]
    for row in config.training.stages:
        sizes, rope = given_in(row, SIZES), given_in(row, ROPE)
        data = current.data
        if row.weights:
            named = zip(source_names(data.sources), data.sources, strict=True)
            weighted = (replace(each, weight=row.weights.get(name, each.weight)) for name, each in named)
            data = replace(data, sources=tuple(weighted))
        model = current.model
        if known := {key: value for key, value in rope.items() if hasattr(config.hyper_parameters, key)}:
            model = replace(model, overrides={**model.overrides, **known})
        current = replace(current, training=replace(current.training, **sizes), data=data, model=model)
        found.append(current)
    return found


def given_in(row: StageConfig, keys: Sequence[str]) -> dict[str, Any]:
    """The values of those keys that a table has."""
    return {key: value for key in keys if (value := getattr(row, key)) != UNSET}


def batch_stages(config: JobConfig) -> tuple[BatchStage, ...]:
    """The steps of each stage. config: resolved."""
    found, has_weights = [], False
    given = [False, *(bool(row.weights) for row in config.training.stages)]
    for stage, is_given, each in zip(stage_sizes(config.training), given, stage_configs(config), strict=True):
        has_weights |= is_given
        weights = tuple(source.weight for source in each.data.sources) if has_weights else ()
        found.append(replace(stage, weights=weights))
    return tuple(found)


def stage_sizes(training: TrainingConfig) -> tuple[BatchStage, ...]:
    """The steps of each stage, without the weights of the sources. training: resolved."""
    found = [BatchStage(1, training.global_batch_size, training.seq_len)]
    for row in training.stages:
        found.append(replace(found[-1], from_step=row.from_step, **given_in(row, SIZES)))
    return tuple(found)


def resolve_starts(config: JobConfig) -> TrainingConfig:
    """[training] with from_tokens replaced by from_step. Needs a resolved global_batch_size."""
    training = config.training
    for index, row in enumerate(training.stages):
        if row.from_tokens != UNSET:
            earlier = batch_stages(replace(config, training=replace(training, stages=training.stages[:index])))
            row = replace(row, from_step=steps_until(earlier, row.from_tokens) + 1, from_tokens=UNSET)
            training = replace(training, stages=(*training.stages[:index], row, *training.stages[index + 1 :]))
    return training


def largest_batch(config: JobConfig) -> int:
    """The largest training.global_batch_size of all stages."""
    return max(each.training.global_batch_size for each in stage_configs(config))


def resolve_lengths(config: JobConfig) -> JobConfig:
    """Replace tokens, rounded up to full steps, and percentages by steps.

    Needs a resolved training.global_batch_size. The ratio of the decay remains: it counts back from the last step.
    """
    training = resolve_starts(config)
    stages = batch_stages(replace(config, training=training))
    if training.tokens != UNSET:
        training = replace(training, steps=steps_until(stages, training.tokens), tokens=UNSET)
    sections: dict[str, Any] = {"training": training}
    warmup = 0
    for name, keys in LENGTHS.items():
        section = getattr(config, name)
        for key in keys:
            count = _counting(stages, key, warmup, training.steps)
            length = getattr(section, key)
            if isinstance(length, str):
                length = max(0 if key == "warmup_steps" else 1, steps_of(length, count, training.steps))
                section = replace(section, **{key: length})
            warmup = length if key == "warmup_steps" else warmup
        sections[name] = section
    return replace(config, **sections)


def _counting(stages: Sequence[BatchStage], key: str, warmup: int, steps: int) -> Callable[[int], int]:
    """What counts the steps of a number of tokens: from the first step, after the warm-up, or up to the last step."""
    if key == "decay_steps":
        return lambda tokens: steps_until(stages, tokens_until(stages, warmup) + tokens) - warmup
    if key == "final_decay_steps":
        return lambda tokens: steps + 1 - steps_until(stages, max(tokens_until(stages, steps) - tokens, 0) + 1)
    return lambda tokens: steps_until(stages, tokens)


def stage_lines(config: JobConfig) -> Iterator[str]:
    """A line for each stage after the first one. config: resolved."""
    stages = batch_stages(config)
    for number, (row, stage) in enumerate(zip(config.training.stages, stages[1:], strict=True), 2):
        parts = [f"{counted(stage.global_batch_size, 'sequence')} of {stage.seq_len:,} tokens"]
        if row.weights:
            total = sum(row.weights.values())
            parts.append("mixture " + ", ".join(f"{name} {each / total:.2%}" for name, each in row.weights.items()))
        parts += [f"{key} {value:,}" for key, value in given_in(row, ROPE).items()]
        before = tokens_until(stages, stage.from_step - 1)
        yield f"stage {number} from step {stage.from_step:,} ({before:,} tokens): {'; '.join(parts)}"


def stage_facts(config: JobConfig) -> dict[str, Any]:
    """What checkpoints store about the stages, as JSON values: the keys that each table changes, and the batch of the
    first one. config: resolved."""
    facts: dict[str, Any] = {"from step 1": {"from_step": 1, "global_batch_size": config.training.global_batch_size}}
    for row in config.training.stages:
        given = given_in(row, (*SIZES, *ROPE))
        weights = [row.weights[name] for name in source_names(config.data.sources)] if row.weights else None
        facts[f"from step {row.from_step}"] = {"from_step": row.from_step, **given, "weights": weights}
    return facts


def check_stages(config: JobConfig, facts: JobConfig) -> list[Problem]:
    """Problems of the tables [[training.stages]] alone. facts: the configuration, resolved."""
    problems = _check_unread(config)
    names, last = source_names(config.data.sources), 1
    for index, (row, resolved) in enumerate(zip(config.training.stages, facts.training.stages, strict=True)):
        rules = Rules(f"training.stages.{index}", row)
        starts = (row.from_step != UNSET) + (row.from_tokens != UNSET)
        remedy = "write the first step of the stage" if not starts else "leave one of them out"
        rules.require("from_step", starts == 1, "given, or from_tokens; not both", remedy)
        given = given_in(row, (*SIZES, *ROPE)) or row.weights
        rule = f"the start of a change: {', '.join(SIZES)}, weights or keys of rotary embeddings"
        key = "from_step" if row.from_tokens == UNSET else "from_tokens"
        rules.require(key, given, rule, "write one of them, or remove the table")
        rule = f"later than the stage before, which begins at step {last:,}"
        if starts == 1 and resolved.from_step != UNSET:
            is_later = resolved.from_step > last
            rule = rule if row.from_tokens == UNSET else f"{rule}; it is step {resolved.from_step:,}"
            rules.require(key, is_later, rule, "order the tables by their first step")
            last = max(last, resolved.from_step)
        _check_stage_weights(rules, names)
        length = config.training.seq_len
        is_packable = config.data.packing != "best_fit" or row.seq_len in (UNSET, length)
        rule = f'training.seq_len = {length} with data.packing = "best_fit", which packs windows for one length'
        remedy = 'write packing = "concatenate", or train the stage as a new run from the weights of this one'
        rules.require("seq_len", is_packable, rule, remedy)
        for key in given_in(row, ROPE):
            rules.needs(key, hasattr(config.hyper_parameters, key), f"a family with model.{key}")
        problems += rules.problems
    return problems


def _check_stage_weights(rules: Rules, names: Sequence[str]) -> None:
    """A stage has weights for all sources or for none."""
    weights = rules.section.weights
    unknown, missing = [name for name in weights if name not in names], [name for name in names if name not in weights]
    rule = f"a weight for each source by its name: {', '.join(names)}"
    remedies = [f"remove {', '.join(unknown)}"] * bool(unknown)
    remedies += [f"add {', '.join(missing)}; 0 leaves a source out"] * bool(missing)
    remedy = ", and ".join(remedies)
    if weights and rules.require("weights", not unknown and not missing, rule, remedy):
        rules.require("weights", sum(weights.values()) > 0, "at least one weight above 0", "write its share")


def _check_unread(config: JobConfig) -> list[Problem]:
    """A source may have a weight of 0 if a stage reads it."""
    sources, rows = config.data.sources, config.training.stages
    found = []
    for index, (name, source) in enumerate(zip(source_names(sources), sources, strict=True)):
        rules = Rules(f"data.sources.{index}", source)
        is_read = source.weight != 0 or any(row.weights.get(name, 0) > 0 for row in rows)
        rule = "above 0, unless a table of training.stages has another weight for it"
        rules.require("weight", is_read, rule, "write its share of the sequences, or remove the source")
        found += rules.problems
    if not found and sources and all(source.weight == 0 for source in sources):
        found.append(Problem("data.sources.0.weight", 0, "above 0 for one of the sources", "write its share"))
    return found
