"""Check and resolve a configuration. Each part checks its own section; this module passes it facts of the others."""

import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from titanlite.checkpoint.config import check_checkpoint
from titanlite.checkpoint.preflight import check_start, imported_from
from titanlite.config.fields import SECTIONS, TABLES
from titanlite.config.lengths import UNSET
from titanlite.config.schema import JobConfig, JobSection, TrainingConfig
from titanlite.config.stages import check_stages, largest_batch, resolve_lengths, stage_configs
from titanlite.data.bpe import kept_tokenizer
from titanlite.data.check import check_data, check_tokenizer, check_validation
from titanlite.data.config import PIECE_BYTES_PER_POSITION
from titanlite.data.kinds import KINDS, open_source
from titanlite.data.order import STREAM_VERSION
from titanlite.data.sources.stored import apply_cache_bytes
from titanlite.data.tokenizer_files import TOKENIZER_JSON
from titanlite.generation.config import check_samples
from titanlite.hf.folder import PREFIX
from titanlite.hf.source import check_source
from titanlite.metrics.config import (
    EXPERTS_FILE,
    LOG_FILE,
    METRICS_FILE,
    MLFLOW_FOLDER,
    RUN_FILE,
    SAMPLES_FILE,
    TENSORBOARD_FOLDER,
    WANDB_FOLDER,
    check_metrics,
)
from titanlite.models.head import check_terms
from titanlite.models.losses import CROSS_ENTROPY
from titanlite.models.registry import check_model, full_model, full_parameters, meta_model
from titanlite.optim.optimizer import OWN, optimizers_of
from titanlite.optim.qk_clip import check_qk_clip
from titanlite.optim.registry import check_optimizer, check_parameters
from titanlite.optim.schedule import check_schedules
from titanlite.parallel.compile import check_compile, compiles_blocks
from titanlite.parallel.context import check_context
from titanlite.parallel.exact import MAX_SUMMANDS
from titanlite.parallel.float8 import check_float8
from titanlite.parallel.mesh import ParallelismConfig, check_experts, check_parallelism, data_degree, resolve_degrees
from titanlite.parallel.microbatches import rows_together
from titanlite.parallel.pipeline import check_pipeline, splits_backward
from titanlite.parallel.recompute import check_activation_checkpoint
from titanlite.parallel.tensor import form_problems
from titanlite.precision import DTYPES, DtypeName, check_precision
from titanlite.profiling.config import check_profiling
from titanlite.ranks.job_lock import JOB_LOCK_FILE
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.plugins import is_of_program
from titanlite.storage.address import address_problem, is_address
from titanlite.storage.store import apply_settings

OUTPUTS = (
    *("config.toml", "tokenizer", METRICS_FILE, RUN_FILE, SAMPLES_FILE, EXPERTS_FILE, LOG_FILE),
    *("ledger", "records", "traces", "memory_snapshots", TENSORBOARD_FOLDER),
)
"""Files and folders that a run writes into job.dump_folder, of which a new run renames those of an earlier one."""
FOLDERS_OF_LOGGERS = (WANDB_FOLDER, MLFLOW_FOLDER)
OWN_FILES = (*OUTPUTS, JOB_LOCK_FILE, "faults", *FOLDERS_OF_LOGGERS)
"""All of them, in addition to checkpoint.folder."""
BELOW_ONE = ("beta1", "beta2", "momentum")
"""Keys of optimizers that must be below 1 also in the dtype of the arithmetic."""
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 3800
"""Linux allows 4,095; the rest is for names inside a folder."""


def apply_stores(config: JobConfig) -> None:
    """Let this process, and those that it starts, read stores as the configuration says."""
    apply_settings(config.storage)
    apply_cache_bytes(config.data.cache_bytes)


def check_config(config: JobConfig, *, world_size: int, device_type: str, checks_files: bool = True) -> list[Problem]:
    """All problems of a configuration with valid names and types, for this number of processes.

    checks_files: also check that data, tokenizer and output folder exist on this machine.
    """
    apply_stores(config)
    degree = data_degree(config.parallelism, world_size)  # 0: unknown, which is another problem
    facts = resolve_config(config, world_size=world_size, device_type=device_type) if degree else config
    return [
        *(_check_places(config) if checks_files else ()),
        *_check_sources(config, largest_batch(facts), degree, checks_files=checks_files),
        *_check_registered(config),
        *check_terms(config.loss),
        *check_layout(config, world_size),
        *_check_optimizer(config),
        *check_schedules(facts.lr_schedule, facts.optimizer),
        *_check_precision(facts),
        *_check_bit_equal(facts, degree),
        *check_stages(config, facts),
        *_check_each_stage(facts, world_size, degree),
        *check_checkpoint(config.checkpoint, device_type, taken=OWN_FILES),
        *check_metrics(config.metrics),
        *check_profiling(config.profiling, world_size=world_size, device_type=device_type, steps=facts.training.steps),
    ]


def _check_registered(config: JobConfig) -> list[Problem]:
    """Problems of names in registries that are empty without a plugin. Of others, they are the choices of the key."""
    rule, remedy = "names that a plugin registers; job.plugins has none with any", "add the plugin to job.plugins"
    return [
        Problem(f"{name}.{key}", value, rule, remedy)
        for name, kind in SECTIONS.items()
        for key, tables in TABLES.get(kind, {}).items()
        if not any(tables) and (value := getattr(getattr(config, name), key))
    ]


def _check_places(config: JobConfig) -> list[Problem]:
    """Problems of the output folder, the tokenizer, and the checkpoint or model folder that the run starts from."""
    family, model = config.family, config.hyper_parameters
    folder, sections = config.job.dump_folder, (config.tokenizer, config.data, config.validation)
    problems = check_job(config.job)
    problems += check_tokenizer(*sections, vocab_size=model.vocab_size, model=start_model(config))
    problems += check_start(config.checkpoint, folder)
    if imported := imported_from(config.checkpoint, folder):
        accepts_rope = "rope" in config.checkpoint.accept_changes
        problems += check_source(imported, family, model, accepts_rope=accepts_rope)
    return problems


def _check_sources(config: JobConfig, global_batch_size: int, degree: int, *, checks_files: bool) -> list[Problem]:
    """Problems of the keys of [data] and [validation]. degree: number of data-parallel ranks."""
    model = config.hyper_parameters
    has_text = any(open_source(source).holds == "text" for source in config.data.sources)
    # Without files, token files may have a tokenizer.
    has_kept = not checks_files or kept_tokenizer(config.data.sources) is not None
    has_tokenizer = bool(config.tokenizer.path) or has_text or has_kept
    facts: dict[str, Any] = {"vocab_size": model.vocab_size, "checks_files": checks_files}
    return [
        *check_data(config.data, global_batch_size=global_batch_size, data_degree=degree, **facts),
        *check_validation(config.validation, config.data, has_tokenizer=has_tokenizer, **facts),
        *check_samples(config.samples, has_tokenizer=has_tokenizer),
    ]


def _check_optimizer(config: JobConfig) -> list[Problem]:
    """Problems of [optimizer]; those that depend on the parameters only for a valid model."""
    section, training, layout = config.optimizer, config.training, config.parallelism
    problems = check_optimizer(section)
    # else no model is built, which takes half a second
    depends = section.groups or section.state_dtype != "auto" or training.dtype == "bfloat16" or section.qk_clip
    depends = depends or getattr(config.hyper_parameters, "transfers", False)
    if not depends or check_model(config.model, seq_len=training.seq_len, tp=layout.tp, pp=layout.pp):
        return problems
    if section.qk_clip:
        problems += check_qk_clip(section, full_model(config.model))
    return problems + check_parameters(section, *full_parameters(config.model), DTYPES[training.dtype])


def _check_precision(facts: JobConfig) -> list[Problem]:
    """Problems of numbers that vanish or overflow in the dtype that uses them. facts: the configuration, resolved."""
    optimizer, training = facts.optimizer, facts.training
    of_parameters = {
        "optimizer.lr": optimizer.lr,
        "optimizer.eps": optimizer.eps,
        "optimizer.weight_decay": optimizer.weight_decay,
        "training.max_norm": training.max_norm,
    }
    betas = {f"optimizer.{key}": getattr(optimizer, key) for key in BELOW_ONE}
    for index, group in enumerate(optimizer.groups):
        of_parameters[f"optimizer.groups.{index}.weight_decay"] = group.weight_decay
        betas[f"optimizer.groups.{index}.beta2"] = group.beta2
    computed = training.dtype if training.mixed_precision_param == "auto" else training.mixed_precision_param
    model = facts.hyper_parameters
    return [
        *check_precision(of_parameters, betas, training.dtype),
        *check_precision({"model.norm_eps": model.norm_eps} if hasattr(model, "norm_eps") else {}, {}, computed),
    ]


def _check_bit_equal(facts: JobConfig, degree: int) -> list[Problem]:
    """Problems of keys that bit_equal needs. facts: the configuration, resolved. degree: of data ranks or 0."""
    training, layout = facts.training, facts.parallelism
    if not training.bit_equal:
        return []
    rules, data = Rules("training", training), Rules("data", facts.data)
    why = "with training.bit_equal"
    rows = rows_together(layout, training.local_batch_size)
    key = "training.local_batch_size" if layout.pp == 1 else "parallelism.pp_microbatch_size"
    for name in ("dtype", "mixed_precision_param"):
        narrow = getattr(training, name) != "float64"
        rules.require(name, narrow, f"float32 or bfloat16 {why}, which adds in float64", "leave it out")
    wide = training.mixed_precision_reduce == "float64"
    rules.require("mixed_precision_reduce", wide, f"float64 {why}", "leave it out")
    rule = f"a number of sequences {why}, which computes with exactly this number of them at once"
    rules.require("local_batch_size", training.local_batch_size != -1, rule, "set it, for example to 1")
    of_layout = Rules("parallelism", layout)
    rule = f"given by the degrees {why}: a search would choose the sequences of a microbatch, which affect the bits"
    of_layout.require("layout", layout.layout != "auto", rule, "set the degrees, see titanlite plan")
    rules.problems += of_layout.problems
    plugins = sorted(optimizers_of(facts.optimizer) - OWN)
    of_optimizer = Rules("optimizer", facts.optimizer)
    rule = f"one of {', '.join(sorted(OWN))} {why}: an update must not depend on where a shard ends"
    of_optimizer.require("name", not plugins, rule, "choose one of them")
    rules.problems += of_optimizer.problems
    if rows < 1 or not degree or rules.problems:
        return rules.problems
    if rules.divides("global_batch_size", key, rows):
        most = MAX_SUMMANDS * rows
        rule = f"at most {most:,} {why} and {key} = {rows}: a sum of {MAX_SUMMANDS:,} gradients is exact"
        rules.require("global_batch_size", training.global_batch_size <= most, rule, f"raise {key}")
    if data.divides("num_streams", key, rows):
        rule = f"at least {rows} x {degree} data ranks = {rows * degree} {why}: {key} sequences stay together"
        data.require("num_streams", facts.data.num_streams >= rows * degree, rule, f"lower {key}, or use fewer ranks")
    return rules.problems + data.problems


def _check_each_stage(facts: JobConfig, world_size: int, degree: int) -> list[Problem]:
    """Problems of the sizes of later stages, with the key of the table that sets the size, or of [training].

    facts: the configuration, resolved.
    """
    if not facts.training.stages:
        return []
    rules = Rules("parallelism", facts.parallelism)
    rule = "given by the degrees with training.stages: a search compares layouts for one size of a step"
    remedy = "set the degrees; to compare layouts, search without the tables, with the sizes of one stage"
    rules.require("layout", facts.parallelism.layout == "given", rule, remedy)
    by_stage = [[*check_layout(each, world_size), *_check_bit_equal(each, degree)] for each in stage_configs(facts)]
    known = [(problem.key, problem.value) for problem in by_stage[0]]
    found = rules.problems
    for index, problems in enumerate(by_stage[1:]):
        for problem in problems:
            if (problem.key, problem.value) not in known:
                known.append((problem.key, problem.value))
                found.append(_of_stage(problem, facts, index))
    return found


def _of_stage(problem: Problem, facts: JobConfig, index: int) -> Problem:
    """A problem of the table of training.stages, up to `index`, that sets the value."""
    section, _, name = problem.key.partition(".")
    tables = [row for row in range(index + 1) if getattr(facts.training.stages[row], name, UNSET) != UNSET]
    if section not in ("training", "model") or not tables:
        return replace(problem, rule=f"{problem.rule} (in stage {index + 2}, of training.stages.{index})")
    key = f"training.stages.{tables[-1]}.{name}"
    return replace(problem, key=key, remedy=problem.remedy.replace(problem.key, key))


@cache  # a search asks for each layout
def _form_problems(family_name: str, hyper_parameters: Any, tp: int) -> list[str]:
    return form_problems(meta_model(family_name, hyper_parameters), tp)


def check_layout(config: JobConfig, world_size: int) -> list[Problem]:
    """Problems between model, batch and parallelisms, which a search of layouts checks for each."""
    section, training = config.parallelism, config.training
    family, model = config.family, config.hyper_parameters
    problems = check_model(config.model, seq_len=training.seq_len, tp=section.tp, pp=section.pp)
    of_mesh = check_parallelism(section, world_size)
    if not problems:
        rules = Rules("parallelism", section, problems)
        structure = family.structure(model)
        faults = _form_problems(family.name, model, section.tp) if section.tp > 1 else []
        rule = f"1 with the family {family.name!r}: {', '.join(faults[:1])}"
        rules.require("tp", not faults, rule, "use dp_shard or pp, or the layers of titanlite.models.parts")
        problems += check_context(section, model, training.seq_len)
        problems += [] if of_mesh else check_experts(section, getattr(model, "n_experts", 1), world_size)
        layout = replace(section, dp_shard=resolve_degrees(section, world_size)["dp_shard"])
        problems += check_pipeline(layout, structure, bit_equal=training.bit_equal)
        if config.float8.recipe != "none" and not problems:
            problems += check_float8(config.float8, full_model(config.model), structure, section, training.seq_len)
    compiled, backend = compiles_blocks(config.compile, model), config.compile.backend
    return [
        *problems,
        *check_training(training, section),
        *of_mesh,
        *check_activation_checkpoint(
            config.activation_checkpoint,
            compiled=compiled,
            backend=backend,
            tp=section.tp,
            pp_schedule=section.pp_schedule,
            splits_backward=splits_backward(section),
        ),
        *check_compile(config.compile),
    ]


def one_rank(config: JobConfig) -> JobConfig:
    """The configuration without parallelism, for checks of what any layout needs."""
    alone = replace(config.parallelism, layout="auto", pp=1, dp_replicate=1, dp_shard=1, cp=1, tp=1, ep=1)
    return replace(config, parallelism=alone)


def start_model(config: JobConfig) -> str:
    """The folder, or the name on the hub, of the model in Hugging Face's format that the run starts from; or ""."""
    text = config.checkpoint.initial_load_path
    return text.removeprefix(PREFIX) if text.startswith(PREFIX) else ""


def with_model_tokenizer(config: JobConfig) -> JobConfig:
    """The configuration with the tokenizer of the model folder that the run starts from, if it needs one and names
    none: the weights know no other."""
    folder, sources = start_model(config), config.data.sources
    if config.tokenizer.path or not folder or not Path(folder, TOKENIZER_JSON).is_file():
        return config
    if kept_tokenizer(sources) or all(open_source(source).holds == "tokens" for source in sources):
        return config
    return replace(config, tokenizer=replace(config.tokenizer, path=folder))


def resolve_config(config: JobConfig, *, world_size: int, device_type: str) -> JobConfig:
    """Replace every -1, "auto" and number of tokens, except training.local_batch_size, which does not affect numbers.

    The layout must fit `world_size`. Layout keys are not replaced: they may differ between starts.
    """
    training, data, optimizer = config.training, config.data, config.optimizer
    degree = data_degree(config.parallelism, world_size)
    # Never choose less than the parameters' precision: a float64 run computes in float64 on every device.
    mixed = device_type == "cuda" and training.dtype != "float64"
    if training.global_batch_size == -1:  # local_batch_size = -1 needs a global batch size; `inspect` does not check it
        training = replace(training, global_batch_size=max(training.local_batch_size, 1) * degree)
    if training.mixed_precision_param == "auto":
        training = replace(training, mixed_precision_param="bfloat16" if mixed else training.dtype)
    if training.mixed_precision_reduce == "auto":
        reduce = "float64" if training.bit_equal else "float32" if mixed else training.dtype
        training = replace(training, mixed_precision_reduce=reduce)
    if optimizer.newton_schulz_dtype == "auto" and "Muon" in optimizers_of(optimizer):
        wide: DtypeName = "float64" if training.dtype == "float64" else "float32"
        is_short = training.mixed_precision_param == "bfloat16"
        optimizer = replace(optimizer, newton_schulz_dtype="bfloat16" if is_short else wide)
    debug = config.debug
    if training.bit_equal and device_type == "cuda":  # without it, kernels add in an order that may differ
        debug = replace(debug, deterministic=True)
    if data.num_streams == -1:
        data = replace(data, num_streams=largest_batch(replace(config, training=training)))
    data = replace(data, document_mask=data.masks_documents, add_bos=data.adds_bos)
    if data.stream_version == -1:
        data = replace(data, stream_version=STREAM_VERSION)
    if data.max_piece_bytes == -1:
        longest = max(each.training.seq_len for each in stage_configs(config))
        data = replace(data, max_piece_bytes=PIECE_BYTES_PER_POSITION * longest)
    loss = config.loss
    if loss.z_loss == -1:
        is_usual = loss.name == CROSS_ENTROPY.name and "z_loss" not in loss.terms
        loss = replace(loss, z_loss=config.family.logit_z_loss if is_usual else 0.0)
    if data.num_workers == -1:
        # Kernels are launched by the training process, whose interpreter a thread would share.
        launches = device_type == "cuda" and any(open_source(source).holds == "text" for source in data.sources)
        has_all = not any(is_of_program(KINDS, source.kind) for source in data.sources)
        data = replace(data, num_workers=int(launches and has_all))
    return resolve_lengths(replace(config, training=training, data=data, loss=loss, optimizer=optimizer, debug=debug))


def check_stores(config: JobConfig) -> list[Problem]:
    """Problems of sources in stores that cannot be listed. Before any check that reads their files."""
    held_out = config.validation.sources if config.validation.enable else ()
    keyed = [(f"data.sources.{n}", source) for n, source in enumerate(config.data.sources)]
    keyed += [(f"validation.sources.{n}", source) for n, source in enumerate(held_out)]
    return [problem for key, source in keyed for problem in open_source(source).check_store(key)]


def check_path_lengths(config: JobConfig, world_size: int) -> list[Problem]:
    """Problems of paths that no file system can have, and of addresses. Before any check that reads a path, which would
    raise OSError."""
    paths = {
        "job.dump_folder": config.job.dump_folder,
        "checkpoint.folder": config.checkpoint.folder,
        "checkpoint.initial_load_path": config.checkpoint.initial_load_path.removeprefix(PREFIX),
        "tokenizer.path": config.tokenizer.path,
        "tokenizer.chat_template": config.tokenizer.chat_template,
    }
    local = "a path on a disk: checkpoints and sources can be in stores", "write a path"
    invalid = {
        key: address_problem(path) if key.startswith("checkpoint.") else local
        for key, path in paths.items()
        if is_address(path)
    }
    if problems := [Problem(key, paths[key], *why) for key, why in invalid.items() if why]:
        return problems
    for section, sources in (("data", config.data.sources), ("validation", config.validation.sources)):
        paths |= {f"{section}.sources.{n}.path": source.path for n, source in enumerate(sources)}
    paths |= {f"validation.tasks.{n}": task for n, task in enumerate(config.validation.tasks)}
    own = [(key, path) for key, path in paths.items() if world_size > 1 and path.startswith("memory://")]
    if own:
        rule, remedy = "a place that all processes share: each has a memory:// of its own", "write s3://BUCKET/NAME"
        return [Problem(key, path, rule, remedy) for key, path in own]
    paths = {key: path for key, path in paths.items() if not is_address(path)}
    encoding = sys.getfilesystemencoding()
    for key, path in paths.items():
        try:
            path.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            rule = f"characters that names of files can have in this locale ({encoding})"
            return [Problem(key, path, rule, "set LC_ALL=C.UTF-8, or choose another path")]
    rule = f"names of at most {MAX_NAME_BYTES} bytes, and an absolute path of at most {MAX_PATH_BYTES:,}"
    return [
        Problem(key, path, rule, "choose a shorter path")
        for key, path in paths.items()
        if max(len(os.fsencode(part)) for part in path.split("/")) > MAX_NAME_BYTES
        or len(os.fsencode(os.path.abspath(path))) > MAX_PATH_BYTES
    ]


def check_job(section: JobSection) -> list[Problem]:
    """Problems of job.dump_folder: it, or its nearest existing parent, must be a writable folder."""
    rules, folder, remedy = Rules("job", section), section.dump_folder, "choose another job.dump_folder"
    existing = Path(folder).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if rules.require(
        "dump_folder", folder.strip(), "the path of a folder", 'write for example "outputs"'
    ) and rules.require("dump_folder", existing.is_dir(), f"a folder; {existing} is a file", remedy):
        is_writable = os.access(existing, os.W_OK | os.X_OK)
        rules.require("dump_folder", is_writable, f"a writable folder; {existing} is not writable", remedy)
    return rules.problems


def check_training(section: TrainingConfig, layout: ParallelismConfig) -> list[Problem]:
    """Problems of [training]."""
    rules = Rules("training", section)
    given = section.global_batch_size != -1 or (layout.layout != "auto" and section.local_batch_size != -1)
    rule = 'given with layout = "auto" or local_batch_size = -1: the sequences of a step must not depend on a device'
    rules.require("global_batch_size", given, rule, "set training.global_batch_size")
    rule = "at least 1 with a pipeline, whose microbatches have parallelism.pp_microbatch_size sequences"
    given = section.local_batch_size != -1 or layout.pp == 1
    rules.require("local_batch_size", given, rule, "set training.local_batch_size")
    if layout.tp > 1:
        rules.divides("seq_len", "parallelism.tp", layout.tp)
    return rules.problems
