"""Construction of a run, from top to bottom."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.assembly.data import build_data, build_evaluator, build_tasks, build_tokenizer, build_validation_data
from titanlite.assembly.description import (
    describe_job,
    describe_jump,
    describe_moved_decay,
    describe_training,
    record_start,
)
from titanlite.assembly.facts import (
    code_facts,
    computation_facts,
    computer_facts,
    content_facts,
    device_kind,
    model_facts,
)
from titanlite.assembly.job import Job
from titanlite.assembly.model import allocate_parts, build_parts, build_trainer, draw_weights_
from titanlite.checkpoint.config import CheckpointConfig, another_run
from titanlite.checkpoint.folder import published_steps
from titanlite.checkpoint.manager import Checkpoints
from titanlite.checkpoint.manifest import Computation, computed_by
from titanlite.checkpoint.preflight import imported_from
from titanlite.checkpoint.start import RunFacts, Start, StartFinder
from titanlite.checkpoint.state import RunState
from titanlite.config.check import FOLDERS_OF_LOGGERS, OUTPUTS, OWN_FILES
from titanlite.config.fields import SECTIONS, keys_of, keys_that_affect
from titanlite.config.load import CONFIG_COPY, read_copy
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages, largest_batch
from titanlite.config.toml import dump_config
from titanlite.data.fingerprint import data_fingerprint
from titanlite.data.kinds import source_names
from titanlite.data.ledger import Ledger, ledger_files
from titanlite.data.loader import Loader
from titanlite.data.sources.base import Source
from titanlite.data.steps import BatchStage, stage_index
from titanlite.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from titanlite.evaluation.evaluator import share_tasks
from titanlite.evaluation.harness import Harness
from titanlite.evaluation.validation import Validation
from titanlite.faults.record import StepRecorder
from titanlite.faults.replicas import Replicas
from titanlite.faults.skipped import SkippedSteps
from titanlite.generation.generate import Prompt, encode_prompts
from titanlite.generation.samples import Samples
from titanlite.hf.folder import PREFIX, ModelFolder
from titanlite.hf.generation_defaults import read_generation_defaults
from titanlite.hf.source import fetch_source
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import LOG_FILE, METRICS_FILE
from titanlite.metrics.experts import ExpertLoads
from titanlite.metrics.jsonl import has_validation, keep_rows, last_row
from titanlite.metrics.loggers import Loggers, build_loggers
from titanlite.metrics.meter import Meter, Place, SlowRanks, Work
from titanlite.metrics.timing import Goodput
from titanlite.models.attention import pin_kernels
from titanlite.models.init import INIT_VERSION
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.microbatches import rows_together
from titanlite.parallel.pipeline import local_stages
from titanlite.planning.memory_check import check_memory, explained_out_of_memory, plan_memory
from titanlite.planning.rank_memory import Memory
from titanlite.precision import DTYPES
from titanlite.profiling.trace import Profiling
from titanlite.ranks.agreement import DataEnd, require_equal, run_on_all_ranks, run_on_rank_0
from titanlite.ranks.claim import claim
from titanlite.ranks.distributed import World, keep_nccl_records
from titanlite.ranks.job_lock import job_lock, require_own
from titanlite.ranks.network import init_process_group
from titanlite.ranks.positions import FAULTS_FOLDER
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.determinism import apply_determinism
from titanlite.runtime.dump_folder import prepare_dump_folder, rename_links
from titanlite.runtime.durability import replace_file
from titanlite.runtime.environment import chooses_threads
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import append_errors_to, log, open_log_file
from titanlite.runtime.peak_flops import device_peak_flops
from titanlite.storage.address import Address, place
from titanlite.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """All parts of a run.

    trainer: has the mesh, and the step from which the run starts. checkpoints: None if checkpoint.enable is false.
    stop: the stop request by signals, not yet active. validation: None if validation.enable is false. samples: None
    without samples.prompts. memory: planned for this rank; None if the family cannot be planned. computed_by: see
    Record.
    """

    trainer: Trainer
    loader: Loader
    meter: Meter
    expert_loads: ExpertLoads
    goodput: Goodput
    loggers: Loggers
    data_end: DataEnd
    checks: "StateChecks"
    profiling: Profiling
    ledger: Ledger | None
    checkpoints: Checkpoints | None
    stop: StopRequest
    validation: Validation | None
    samples: Samples | None
    memory: Memory | None
    computed_by: str | None


def build_run(job: Job, world: World, store: dist.Store, environment: Mapping[str, str], cleanup: ExitStack) -> Run:
    """Build all parts of the run; logs a line for each part.

    store: shared by all ranks. environment: environment variables at program start.
    cleanup: gets what closes the parts, also those that exist if the build fails; the process group last.
    """
    began = time.monotonic()
    config = job.config
    apply_determinism(config.debug)
    if config.training.bit_equal and world.device_type == "cuda":
        log.info("Deterministic algorithms: on; training.bit_equal needs them on GPUs")
    fix_threads(config, world, environment)
    pin_kernels(world.device)
    require_no_checkpoints(config)
    imported = fetch_imported(config, world, store)
    describe_job(config, world.device)
    # Build the data before the process group, so that a long index build on one rank does not cause a timeout.
    mesh = Mesh(config.parallelism, world)
    data = build_run_data(job, mesh, store, cleanup)
    weights = imported.files() if imported else []
    held_out = [source for loader in data.held_out.values() for source in loader.sources]
    content = content_facts(config, data.tokenizer, data.loader.sources, held_out, weights)
    if config.training.bit_equal:
        content["device"] = device_kind(world.device)
    require_equal("content", content, world, store, config.comm.init_timeout_s)
    if world.device_type == "cuda":
        keep_nccl_records(Path(config.job.dump_folder, FAULTS_FOLDER))
    group = init_process_group(world, store, config.comm)
    cleanup.callback(dist.destroy_process_group)
    mesh.connect(config.comm)
    log.info(
        "Building %d-D device mesh with %s, %s", len(mesh.degrees), list(mesh.degrees), list(mesh.degrees.values())
    )
    profiling = Profiling(config.profiling, config.job.dump_folder, world.rank, world.device)
    trainer, memory = build_planned_trainer(job, mesh, store)
    describe_training(job, mesh, environment)
    meter = build_meter(job, world, trainer, group)
    hosts = run_on_all_ranks(socket.gethostname, group)
    checks = build_checks(config, trainer, data.loader, group, environment)
    stop, start, checkpoints = StopRequest(), Start(0, (), {}), None
    if config.checkpoint.enable or config.checkpoint.initial_load_path:
        checkpoints = build_checkpoints(config, trainer, data, meter, stop, imported, checks)
        start = load_start(config, trainer, checkpoints)
    else:
        draw_weights_(config, trainer.model_parts)
        trainer.average.restart()
    checks.replicas.compare(start.step)
    # One rank lists the folder, which has a file for each data rank.
    ledger = run_on_rank_0(lambda: ledger_files(config.job.dump_folder), group) if start.resumes else []
    prepare_outputs(config, world, start, data.tokenizer, ledger)
    resume_step = start.step if start.resumes else 0
    about = record_start(config, mesh, hosts, resume_step, environment)
    loggers = build_run_loggers(config, world, meter, resume_step, about, job.batch_stages)
    cleanup.callback(loggers.close)
    return Run(
        trainer=trainer,
        loader=data.loader,
        meter=meter,
        expert_loads=build_expert_loads(config, trainer),
        goodput=Goodput(earlier_times(config, world, resume_step), began=began),
        loggers=loggers,
        data_end=build_data_end(config, data.loader, mesh),
        checks=checks,
        profiling=profiling,
        ledger=build_ledger(config, trainer, cleanup),
        checkpoints=checkpoints if config.checkpoint.enable else None,
        stop=stop,
        validation=build_validation(job, trainer, data, meter, loggers, stop, start),
        samples=build_samples(config, trainer, data.tokenizer, meter, loggers, start),
        memory=memory,
        computed_by=describe_computations(config, start, world.device),
    )


def fix_threads(config: JobConfig, world: World, environment: Mapping[str, str]) -> None:
    """Use one thread on a CPU with training.bit_equal, since the order of sums depends on their number, unless the user
    has chosen another number."""
    if config.training.bit_equal and world.device_type == "cpu" and not chooses_threads(environment):
        torch.set_num_threads(1)


@dataclass(frozen=True)
class RunData:
    """The data of a run. tokenizer: None if all sources hold tokens. held_out, harness: data and tasks of the
    validation."""

    tokenizer: Tokenizer | None
    loader: Loader
    held_out: dict[str, Loader]
    harness: Harness | None


def build_run_data(job: Job, mesh: Mesh, store: dist.Store, cleanup: ExitStack) -> RunData:
    """Open all data. cleanup: gets what closes the loaders."""
    tokenizer = build_tokenizer(job.config)
    loader = build_data(job, mesh, tokenizer)
    cleanup.callback(loader.close)
    held_out = build_validation_data(job, mesh, tokenizer)
    for each in held_out.values():
        cleanup.callback(each.close)
    why_no_text = "a run on a mesh cannot; evaluate it with titanlite evaluate RUN --tasks, in one process"
    harness = build_tasks(job.config, tokenizer, mesh.world, store, why_no_text=why_no_text)
    return RunData(tokenizer, loader, held_out, harness)


def build_planned_trainer(job: Job, mesh: Mesh, store: dist.Store) -> tuple[Trainer, Memory | None]:
    """Allocate the model and its optimizer if the plan of the memory fits; the plan is None if the family has none.

    The weights are undefined: a run that resumes loads them, and others draw them later.
    """
    config, world = job.config, mesh.world
    memory = plan_memory(config, mesh)
    if memory is not None:
        check_memory(config, memory, world, store)
    parts = build_parts(config, mesh)
    with explained_out_of_memory(config, memory, world, lambda: "before the first step"):
        model_parts = allocate_parts(config, parts, world.device, draws_weights=False)
        return build_trainer(job, model_parts, mesh, world.device), memory


@contextmanager
def job_locks(
    config: JobConfig, world: World, environment: Mapping[str, str], on_lost: Callable[[str], object]
) -> Iterator[None]:
    """Context in which this job is the only one in its dump folder, and in its checkpoint folder in a store.

    environment: the variables at program start. on_lost: of claim. See job_lock and claim.
    """
    folder, rank, take_over = config.job.dump_folder, world.rank, config.job.take_over
    claimed = place(config.checkpoint.folder, folder)
    with ExitStack() as stack:
        stack.enter_context(job_lock(folder, rank, take_over=take_over, environment=environment))
        if rank == 0:
            rename_links(Path(folder), OWN_FILES, FOLDERS_OF_LOGGERS)
            _log_real_folder(config.checkpoint, Path(folder))
        if config.checkpoint.enable and isinstance(claimed, Address):
            stack.enter_context(claim(claimed, rank, take_over=take_over, environment=environment, on_lost=on_lost))
        yield


def _log_real_folder(section: CheckpointConfig, dump_folder: Path) -> None:
    """Log where the checkpoints are, if checkpoint.folder is a link, as to another disk: it is followed."""
    folder = place(section.folder, dump_folder)
    if section.enable and isinstance(folder, Path) and folder.resolve() != dump_folder.resolve() / section.folder:
        log.info("Checkpoints: %s is a link; they are in %s", folder, folder.resolve())


@dataclass(frozen=True)
class StateChecks:
    """What must hold of a state that is saved. group: of all ranks."""

    dump_folder: str
    replicas: Replicas
    skipped: SkippedSteps
    group: dist.ProcessGroup

    def __call__(self, step: int) -> None:
        """Raise UserError if the state must not be saved: another job uses the folder, replicas differ, or too many
        steps were skipped."""
        run_on_rank_0(lambda: require_own(self.dump_folder), self.group)
        self.replicas.compare(step)
        self.skipped.check()


def build_checks(
    config: JobConfig, trainer: Trainer, loader: Loader, group: dist.ProcessGroup, environment: Mapping[str, str]
) -> StateChecks:
    """Build the comparison of replicas, and the count and record of skipped steps. A collective."""
    mesh, parts = trainer.mesh, trainer.model_parts
    replicas = Replicas(parts, trainer.optimizer, mesh, config.faults.check_replicas_every, average=trainer.average)
    stages = local_stages(config.parallelism, mesh.coordinate["pp"])
    recorder = build_recorder(config, mesh, trainer, stages, group, environment)
    about = {"counts_loss": trainer.counts_loss, "bit_equal": config.training.bit_equal}
    skipped = SkippedSteps(config.faults, parts, stages, loader, group, recorder, **about)
    return StateChecks(config.job.dump_folder, replicas, skipped, group)


def build_checkpoints(
    config: JobConfig,
    trainer: Trainer,
    data: RunData,
    meter: Meter,
    stop: StopRequest,
    imported: ModelFolder | None,
    check_state: Callable[[int], None],
) -> Checkpoints:
    """Build the checkpoint manager. A collective: creates process groups."""
    mesh = trainer.mesh
    norms = trainer.spikes.norms if trainer.spikes else None
    state = RunState(trainer.model_parts, trainer.optimizer, data.loader, mesh, norms, trainer.average, trainer.exact)
    control_group = mesh.control_group(config.comm.init_timeout_s)
    saving_group = mesh.new_group(config.comm.save_timeout_s, keeps_timeout=True)
    finder = StartFinder(
        config.checkpoint,
        place(config.checkpoint.folder, config.job.dump_folder),
        state,
        meter,
        run_on_rank_0(
            lambda: checkpoint_facts(config, data.tokenizer, data.loader.sources, mesh.world.device), saving_group
        ),
        config.training.steps,
        saving_group,
        lambda: draw_weights_(config, trainer.model_parts),
        imported,
    )
    checkpoints = Checkpoints(finder, control_group, mesh.world.device, stop, check_state)
    if config.checkpoint.enable:
        trainer.before_update = checkpoints.before_update
    return checkpoints


def load_start(config: JobConfig, trainer: Trainer, checkpoints: Checkpoints) -> Start:
    """Load the state from which the run starts; logs what has changed in the learning rate."""
    start = checkpoints.resume()
    trainer.step = start.step
    trainer.enter_stage(start.step)  # for a validation or samples before the next step
    if moved := describe_moved_decay(config, start):
        log.info("Changed since the checkpoint: %s", moved)
    if (jump := describe_jump(config, start)) and trainer.mesh.world.rank == 0:
        log.warning("%s", jump)
    return start


def describe_computations(config: JobConfig, start: Start, device: torch.device) -> str | None:
    """Log what computes the steps; return computed_by of the run's records, None without training.bit_equal."""
    if not config.training.bit_equal:
        return None
    computations = start.computations or (Computation(0, computation_facts(config, device)),)
    log.info("Bits: computed by %s: %s", computations[-1].id, computations[-1])
    return computed_by(computations)


def earlier_times(config: JobConfig, world: World, resume_step: int) -> Mapping[str, object]:
    """The last row of metrics.jsonl, which rank 0 alone reads: others report no times. {} for a new run."""
    return last_row(Path(config.job.dump_folder, METRICS_FILE)) if resume_step and world.rank == 0 else {}


def build_run_loggers(
    config: JobConfig, world: World, meter: Meter, resume_step: int, about: AboutRun, stages: Sequence[BatchStage]
) -> Loggers:
    """Build the loggers. resume_step: 0 for a new run."""
    return build_loggers(
        config.metrics,
        config.job.dump_folder,
        world.rank,
        config.training.steps,
        "peak reserved" if world.device_type == "cuda" else "peak RSS",
        resume_step=resume_step,
        resume_tokens=meter.tokens_seen if resume_step else 0,
        about=about,
        has_samples=bool(config.samples.prompts),
        has_experts=getattr(config.hyper_parameters, "n_experts", 1) > 1,
        stages=stages,
    )


def fetch_imported(config: JobConfig, world: World, store: dist.Store) -> ModelFolder | None:
    """The model folder that a new run starts from; None if it starts otherwise."""
    if not config.checkpoint.initial_load_path.startswith(PREFIX):
        return None
    source = imported_from(config.checkpoint, config.job.dump_folder)
    return fetch_source(
        *(source, config.family, config.hyper_parameters, world, store, config.comm.init_timeout_s),
        accepts_rope="rope" in config.checkpoint.accept_changes,
    )


def build_recorder(
    config: JobConfig,
    mesh: Mesh,
    trainer: Trainer,
    stages: Sequence[int],
    group: dist.ProcessGroup,
    environment: Mapping[str, str],
) -> StepRecorder:
    """Build the record of the last steps. A collective."""
    return StepRecorder(
        config.job.dump_folder,
        trainer.model_parts,
        stages,
        mesh,
        group,
        sequences=largest_batch(config),
        counts_loss=trainer.counts_loss,
        about={
            "config": asdict(config),
            "code": code_facts(environment),
            "world_size": mesh.world.size,
            "device": mesh.world.device_type,
        },
    )


def build_meter(job: Job, world: World, trainer: Trainer, group: dist.ProcessGroup) -> Meter:
    """Build the meter, over all ranks, with the peak FLOP/s of the device if it is known. A collective."""
    config, stages = job.config, job.batch_stages
    flops = [job.family.flops_per_token(job.hyper_parameters, stage.seq_len) for stage in stages]
    of_stages = [Work(stage.tokens, stage.tokens * each) for stage, each in zip(stages, flops, strict=True)]
    places = run_on_all_ranks(lambda: Place(socket.gethostname(), trainer.mesh.coordinate["pp"]), group)
    return Meter(
        group,
        world.device,
        work=lambda step: of_stages[stage_index(stages, step)],
        peak_flops=device_peak_flops(world.device, DTYPES[config.training.mixed_precision_param]),
        sources=source_names(config.data.sources),
        terms=config.terms,
        watched=trainer.watched,
        slow_ranks=SlowRanks(places, logs=world.rank == 0),
    )


def build_data_end(config: JobConfig, loader: Loader, mesh: Mesh) -> DataEnd:
    """Build the agreement on exhausted sources. A collective: creates a process group if sources are finite."""
    if all(source.epochs == -1 for source in config.data.sources):
        return DataEnd(None, None)
    return DataEnd(loader, mesh.control_group(config.comm.init_timeout_s))


def build_ledger(config: JobConfig, trainer: Trainer, cleanup: ExitStack) -> Ledger | None:
    """Open the ledger of this data rank; None if data.ledger is false, or another rank writes the rows."""
    if not config.data.ledger or not trainer.counts_rows:
        return None
    mesh = trainer.mesh
    ledger = Ledger(config.job.dump_folder, data_rank=mesh.data_rank, data_degree=mesh.data_degree)
    cleanup.callback(ledger.close)
    return ledger


def build_expert_loads(config: JobConfig, trainer: Trainer) -> ExpertLoads:
    """Build the reader of the experts' loads."""
    family, hyper_parameters = config.family, config.hyper_parameters
    return ExpertLoads(
        trainer.model_parts,
        trainer.device,
        counts=trainer.mesh.is_first(["tp"]),
        num_blocks=len(family.structure(hyper_parameters).blocks),
        num_dense=getattr(hyper_parameters, "n_dense_layers", 0),
        n_experts=getattr(hyper_parameters, "n_experts", 1),
        n_active=getattr(hyper_parameters, "n_active_experts", 1),
        first_step=trainer.step + 1,
        total_steps=config.training.steps,
    )


def build_validation(
    job: Job, trainer: Trainer, data: RunData, meter: Meter, loggers: Loggers, stop: StopRequest, start: Start
) -> Validation | None:
    """Build the validation of the run; None if validation.enable is false. A collective: creates a process group, and
    reads the validation data once. Raises RanksError if it is bad, or has no token to predict."""
    config = job.config
    if not config.validation.enable:
        return None
    group = trainer.mesh.control_group(config.comm.init_timeout_s)
    metrics_file = Path(config.job.dump_folder, METRICS_FILE)
    evaluator = build_evaluator(job, trainer, group, stop, data.tokenizer)
    evaluator.check_data(data.held_out, steps=config.validation.steps, max_bad_rows=config.data.max_bad_rows)
    return Validation(
        config.validation,
        evaluator,
        data.held_out,
        share_tasks(data.harness, group) if config.validation.tasks else None,
        meter,
        loggers,
        max_bad_rows=config.data.max_bad_rows,
        missing=start.resumes and run_on_rank_0(lambda: not has_validation(metrics_file, start.step), group),
    )


def build_samples(
    config: JobConfig, trainer: Trainer, tokenizer: Tokenizer | None, meter: Meter, loggers: Loggers, start: Start
) -> Samples | None:
    """Build the samples of the run; None without samples.prompts. A collective: creates a process group. Raises
    ConfigError if a prompt is too long or empty."""
    if not config.samples.prompts:
        return None
    assert tokenizer is not None, "see check_samples"
    family, hyper_parameters = config.family, config.hyper_parameters
    given = [Prompt(f"samples.prompts, item {index}", text) for index, text in enumerate(config.samples.prompts)]
    prompts = encode_prompts(
        given,
        tokenizer,
        starts_with_bos=config.data.adds_bos,
        max_new_tokens=1,
        max_seq_len=hyper_parameters.max_seq_len,
    )
    return Samples(
        config.samples,
        trainer,
        family,
        hyper_parameters,
        DTYPES[config.training.mixed_precision_param],
        tokenizer,
        read_generation_defaults(start.generation_config).ends(tokenizer.eos_id),
        prompts,
        trainer.mesh.new_group(config.comm.save_timeout_s, keeps_timeout=True),
        meter,
        loggers,
    )


def checkpoint_facts(
    config: JobConfig, tokenizer: Tokenizer | None, sources: Sequence[Source], device: torch.device
) -> RunFacts:
    """Facts about the run that checkpoints store. Call on one process only: it reads samples of the data.

    sources: those of the loader.
    """
    seq_len = config.training.seq_len
    longest = max(stage.seq_len for stage in batch_stages(config))
    facts = {
        **model_facts(config),
        "num_streams": config.data.num_streams,
        "data": data_fingerprint(config.data, sources, tokenizer, longest if longest > seq_len else 0),
        "tokenizer": tokenizer.fingerprint if tokenizer else None,
        "streams_version": config.data.stream_version,
        "init_version": INIT_VERSION,
    }
    if config.training.bit_equal:
        rows = rows_together(config.parallelism, config.training.local_batch_size)
        facts["bit_equal"] = {"rows": rows, "threads": torch.get_num_threads()}
    facts, values = (json.loads(json.dumps(part)) for part in (facts, asdict(config)))
    computation = computation_facts(config, device) if config.training.bit_equal else {}
    return RunFacts(facts, values, computer_facts(device), keys_that_affect("numbers", "reports"), computation)


def without_options_of_start(config: JobConfig) -> JobConfig:
    """The configuration with the defaults of the keys that apply to one start only."""
    sections = {}
    for section in SECTIONS:
        once = {name: key.default for name, key in keys_of(section, None).items() if key.setting.once}
        sections[section] = replace(getattr(config, section), **once)
    return replace(config, **sections)


def require_no_checkpoints(config: JobConfig) -> None:
    """Raise UserError if the dump folder has checkpoints of a run that this one would not resume."""
    dump_folder = Path(config.job.dump_folder)
    folder = place(config.checkpoint.folder, dump_folder)
    earlier = read_copy(dump_folder)  # the defaults if absent
    inside = os.listdir(dump_folder) if dump_folder.is_dir() else ()
    inside = [name for name in inside if name.partition(".")[0] not in OWN_FILES]  # traces.1 has step-N, too
    for name in (*inside, earlier.checkpoint.folder):
        other = place(name, dump_folder)
        if other != folder and published_steps(other):
            raise UserError(
                f"checkpoint.folder = {config.checkpoint.folder!r}, but {other} holds checkpoints of an earlier run: "
                f"resume it with --checkpoint.folder {name}, or start a new run in another --job.dump_folder"
            )
    if not config.checkpoint.enable and published_steps(folder):
        raise UserError(
            f"checkpoint.enable = false, but {folder} holds checkpoints of an earlier run: resume it with "
            f"--checkpoint.enable true, or start a new run with {another_run(folder)}"
        )


def prepare_outputs(
    config: JobConfig, world: World, start: Start, tokenizer: Tokenizer | None, ledger: Sequence[Path]
) -> None:
    """Write the resolved configuration and the tokenizer into the dump folder.

    A new run renames the files of an earlier run there. A resumed run removes rows of later steps from the files of its
    ledger.
    """
    if not start.resumes:
        prepare_dump_folder(config.job.dump_folder, OUTPUTS, world.rank)
    else:
        for file in ledger[world.rank :: world.size]:
            keep_rows(file, start.step)
    append_errors_to(Path(config.job.dump_folder, LOG_FILE))
    if world.rank == 0:
        open_log_file(Path(config.job.dump_folder, LOG_FILE))
        try:
            copy = dump_config(without_options_of_start(config)).encode()
            replace_file(Path(config.job.dump_folder, CONFIG_COPY), copy)  # follows no link
            if tokenizer is not None:
                tokenizer.save(Path(config.job.dump_folder, TOKENIZER_FOLDER))
        except OSError as error:
            raise UserError(
                f"job.dump_folder: cannot write {error.filename2 or error.filename or config.job.dump_folder}: "
                f"{error.strerror}; fix this, or give another folder with --job.dump_folder"
            ) from None
    dist.barrier()
