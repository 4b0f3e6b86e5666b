"""What a run logs about its settings at the start, also beside those of the checkpoint that it starts from, and what
its loggers record about it."""

import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import titanlite
from titanlite.assembly.facts import config_values
from titanlite.assembly.job import Job
from titanlite.assembly.model import describe_attention
from titanlite.checkpoint.start import Start
from titanlite.config.schema import JobConfig, TrainingConfig
from titanlite.config.stages import SIZES, stage_lines, stage_sizes
from titanlite.config.toml import dump_config
from titanlite.config.value_types import literal
from titanlite.config.values import read_values
from titanlite.data.steps import tokens_until
from titanlite.metrics.about import AboutRun, git_commit, note_start
from titanlite.models.losses import CROSS_ENTROPY
from titanlite.models.registry import full_parameters
from titanlite.optim.groups import describe_groups
from titanlite.optim.lengths import in_steps
from titanlite.optim.optimizer import OptimizerConfig
from titanlite.optim.schedule import (
    ScheduleConfig,
    build_schedule,
    decay_span,
    decays,
    depends_on_steps,
    describe_schedule,
    ramps,
)
from titanlite.parallel.mesh import Mesh
from titanlite.planning.estimate import loss_chunk, plan_step
from titanlite.runtime.environment import environment_lines, overridden
from titanlite.runtime.errors import Problem
from titanlite.runtime.logging import log
from titanlite.runtime.memory import device_memory_bytes
from titanlite.runtime.text import counted


def describe_job(config: JobConfig, device: torch.device) -> None:
    """Log the job, its plugins and the device."""
    log.info("Job: %s, outputs in %s", config.job.description or "no description", config.job.dump_folder)
    if config.job.plugins:
        log.info("Plugins: %s", ", ".join(config.job.plugins))
    log.info("Device: %s, %.1f GiB", device_name(device), device_memory_bytes(device) / 2**30)


MANY_RANKS = 64
"""Above it, a job that waits in a queue and fails costs more than a rehearsal."""


def describe_training(job: Job, mesh: Mesh, environment: Mapping[str, str]) -> None:
    """Log kernels, loss, optimizer, batch and learning rate, and the variables that titanlite has changed.

    environment: environment variables at program start.
    """
    config = job.config
    if mesh.world.size > MANY_RANKS:
        command = f"titanlite plan CONFIG --world-size {mesh.world.size} --rehearse"
        log.info("Ranks: to try the next job of this size on a machine without GPUs: %s", command)
    if attention := describe_attention(config, mesh.world.device):
        log.info("Attention: %s", attention)
    if config.terms or config.loss.chosen is not CROSS_ENTROPY:
        terms = ", ".join(config.terms) or "none"
        log.info('Loss: "%s", terms of the objective: %s', config.loss.name, terms)
    rows = plan_step(config, mesh.degrees).size
    chunk = loss_chunk(config, config.hyper_parameters.vocab_size, mesh.world.device_type, rows)
    log.info("Loss: in chunks of %s tokens", f"{chunk:,}")
    for line in describe_groups(config.optimizer, *full_parameters(config.model)):
        log.info("Optimizer: %s", line)
    describe_batch(job, mesh)
    schedule = describe_schedule(config.lr_schedule, config.optimizer.lr, config.training.steps)
    log.info("Learning rate: %s", schedule)
    for key, ramp in ramps(config.optimizer, config.training.steps).items():
        log.info("%s: %s", {"weight_decay": "Weight decay", "momentum": "Momentum"}[key], ramp)
    for line in overridden(environment, os.environ):
        log.info("Environment: %s", line)


def describe_batch(job: Job, mesh: Mesh) -> None:
    """Log the batch sizes, the number of steps and the share of filler."""
    config, step = job.config, job.step
    training = config.training
    warmup = in_steps(config.lr_schedule.warmup_steps)
    if config.parallelism.pp > 1:
        log.info("Pipeline: %s of %s per pass", counted(step.per_batch, "microbatch"), counted(step.size, "sequence"))
    log.info(
        "Batch: local %d, global %d, accumulation %d, sequence length %d, steps %d (%s tokens), warm-up %d%s",
        training.local_batch_size if config.parallelism.pp > 1 else step.size,
        training.global_batch_size,
        step.batches,
        training.seq_len,
        training.steps,
        f"{tokens_until(job.batch_stages, training.steps):,}",
        warmup,
        " (longer than the run)" if warmup > training.steps else "",
    )
    for line in stage_lines(config):
        log.info("Batch: %s", line)
    if step.filler_share:
        log.info(
            "Batch: %.1f%% of the work is filler: each of %s computes %s per step, for up to %s of its own",
            100 * step.filler_share,
            counted(mesh.data_degree, "data rank"),
            counted(step.rows_per_batch * step.batches, "row"),
            counted(step.sequences, "sequence"),
        )


def record_start(
    config: JobConfig, mesh: Mesh, hosts: Sequence[str], resume_step: int, environment: Mapping[str, str]
) -> AboutRun:
    """Note this start in run.json, on rank 0; return what loggers record about the run and this start, else empty."""
    if mesh.world.rank != 0:
        return AboutRun({}, {}, "")
    facts = {
        "git_commit": git_commit(Path.cwd()),
        "hosts": ", ".join(sorted({*hosts})),
        "mesh": ", ".join(f"{axis} {degree}" for axis, degree in mesh.layout.items()),
        "device": device_name(mesh.world.device),
        "titanlite": titanlite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    known = {key: text for key, text in facts.items() if text}
    variables = environment_lines(environment, os.environ)
    noted = {**known, "mesh": mesh.layout, "environment": variables}
    trains = resume_step < config.training.steps
    run_id = note_start(Path(config.job.dump_folder), resume_step, noted, trains=trains)
    log.info("Run: %s, %s", run_id, ", ".join(f"{key} {text}" for key, text in known.items() if key != "device"))
    values = dict(config_values(config))
    return AboutRun(
        {"run_id": run_id, **known},
        {key: literal(value) if isinstance(value, tuple | dict) else value for key, value in values.items()},
        dump_config(config),
    )


def device_name(device: torch.device) -> str:
    """Name of the device; for a CPU, its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


def describe_moved_decay(config: JobConfig, start: Start) -> str:
    """A decay that moves with a change of training.steps, in one line; "" if none does."""
    steps = config.training.steps
    if not start.config or start.step >= steps:
        return ""
    earlier, _, training, problem = saved_schedule(start.config)
    earlier_steps = training.steps
    if problem is not None:
        return ""
    if steps == earlier_steps or not (depends_on_steps(earlier) and depends_on_steps(config.lr_schedule)):
        return ""
    return (
        f"training.steps: {earlier_steps} in the checkpoint, {steps} now; the decay of the learning rate moves with it "
        '(lr_schedule.decay = "none", or decay_steps, would not depend on it)'
    )


def describe_jump(config: JobConfig, start: Start) -> str:
    """A jump of the learning rate at the start of the run, with a remedy if its decay should have begun before; "" if
    the schedules of the checkpoint and of the run agree about the checkpoint's step. If that of the checkpoint cannot
    be computed, which value is the reason."""
    section, steps, step = config.lr_schedule, config.training.steps, start.step
    if not start.config or step >= steps:
        return ""
    earlier, earlier_lr, training, problem = saved_schedule(start.config)
    if problem is not None:
        given = f"{problem.key} = {problem.value!r}"
        return f"Whether the learning rate jumps is unknown: the checkpoint has {given} (valid: {problem.rule})"
    before = build_schedule(earlier, earlier_lr, training.steps, stage_sizes(training))(step)
    now = build_schedule(section, config.optimizer.lr, steps, stage_sizes(config.training))(step)
    if math.isclose(before, now):
        return ""
    text = (
        f"The learning rate jumps: step {step} was trained with {before:.4g}, and has {now:.4g} in this run's schedule"
    )
    last_before, _ = decay_span(section, steps)
    had_begun = decays(earlier) and decay_span(earlier, training.steps)[0] < step
    if not decays(section) or last_before >= step or had_begun:
        return text
    return (
        f"{text}. The decay would have begun at step {last_before + 1}; to begin it at step {step + 1}: "
        f"--lr_schedule.final_decay_steps {steps - step}"
    )


def saved_schedule(saved: Mapping[str, Any]) -> tuple[ScheduleConfig, float, TrainingConfig, Problem | None]:
    """([lr_schedule], optimizer.lr, steps and sizes of [training] in a checkpoint's configuration, the first value that
    is not valid: an edited one, or a shape of a plugin that is not imported). Keys that it lacks have their defaults.
    """
    known = {
        "lr_schedule": [field.name for field in fields(ScheduleConfig)],
        "optimizer": ["lr"],
        "training": ["steps", "stages", *SIZES],
    }
    tables = {name: {key: saved[name][key] for key in keys if key in saved[name]} for name, keys in known.items()}
    read, problems = read_values(tables, None)
    unresolved = [(key, value) for key, value in read["lr_schedule"].items() if key.endswith("_steps")]
    problems += [
        Problem(f"lr_schedule.{key}", value, "a number of steps", "write one")
        for key, value in unresolved
        if not isinstance(value, int)
    ]
    lr, training = read["optimizer"].get("lr", OptimizerConfig.lr), TrainingConfig(**read["training"])
    return ScheduleConfig(**read["lr_schedule"]), lr, training, next(iter(problems), None)
