"""Validation data, tasks, and what evaluates a model on them."""

from dataclasses import replace

import torch
import torch.distributed as dist

from titanlite.assembly.data import loader_of
from titanlite.assembly.job import Job
from titanlite.config.schema import JobConfig
from titanlite.data.kinds import source_names
from titanlite.data.loader import Loader
from titanlite.data.tasks import EncodedTask, encode_task, read_task
from titanlite.data.tokenizer import Tokenizer
from titanlite.evaluation.evaluator import Evaluator
from titanlite.evaluation.task_rows import RowShape
from titanlite.forward import ModelOnMesh
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.logging import log


def build_validation_data(job: Job, mesh: Mesh, tokenizer: Tokenizer | None) -> dict[str, Loader]:
    """Build this data rank's loaders of the validation data, by source. Each source is read once, unshuffled."""
    config = job.config
    sources = config.validation.sources if config.validation.enable else ()
    loaders = {}
    for name, source in zip(source_names(sources), sources, strict=True):
        section = replace(config.data, sources=(replace(source, epochs=1),), shuffle=False, num_workers=0)
        loaders[name] = loader_of(job, section, mesh, tokenizer)
        log.info("Validation data: %s", loaders[name].description)
    return loaders


def build_tasks(config: JobConfig, tokenizer: Tokenizer | None) -> list[EncodedTask]:
    """Read and tokenize all questions of validation.tasks, the same on all ranks. Raises UserError."""
    paths = config.validation.tasks if config.validation.enable else ()
    tasks = []
    for path in paths:
        assert tokenizer is not None, "see check_validation"
        task = read_task(path)
        tasks.append(encode_task(task, tokenizer, seq_len=config.training.seq_len, add_bos=config.data.add_bos))
        log.info("Task: %s", tasks[-1].describe())
    if tasks and tokenizer is not None and tokenizer.prefix_ids and not config.data.add_bos:
        log.info("Tasks: contexts begin as the post-processor of tokenizer.json defines, although data.add_bos = false")
    return tasks


def build_evaluator(
    job: Job, model: ModelOnMesh, group: dist.ProcessGroup, stop: StopRequest, tokenizer: Tokenizer | None
) -> Evaluator:
    """Build what computes losses, and scores of tasks in batches of as many tokens as those of training.

    A pipeline and context parallelism need rows of one length. Compiled code must not see another one: it would be
    compiled again, for training, too.
    """
    config, in_nats = job.config, job.config.loss.is_cross_entropy
    section = config.parallelism
    is_fixed = section.pp > 1 or section.cp > 1 or config.compile.enable
    shape = RowShape(job.step.rows_per_batch, config.training.seq_len, is_fixed)
    if not config.validation.sources:
        return Evaluator(model, group, stop, shape, in_nats=in_nats)
    sizes, why = None, "the loss is not the cross-entropy"
    if in_nats:
        sizes = tokenizer.token_bytes() if tokenizer else None
        why = "the tokenizer is not byte-level" if tokenizer else "there is no tokenizer"
    if sizes is None:
        log.info("Validation: no bits per byte, since %s", why)
        return Evaluator(model, group, stop, shape, None, why, in_nats)
    token_bytes = torch.zeros(job.hyper_parameters.vocab_size, dtype=torch.int64)
    token_bytes[: len(sizes)] = torch.tensor(sizes)
    return Evaluator(model, group, stop, shape, token_bytes.to(model.device))
