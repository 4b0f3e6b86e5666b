"""Tokenizer, data and tasks of a run, for training and validation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from titanlite.assembly.job import Job
from titanlite.checkpoint.preflight import initial_config
from titanlite.config.check import start_model
from titanlite.config.conventions import bos_by_source
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.chat.encoder import NO_END, ChatEncoder
from titanlite.data.config import DataConfig
from titanlite.data.kinds import source_names
from titanlite.data.loader import Loader, build_loader
from titanlite.data.sources.stored import stored_parts
from titanlite.data.steps import BatchStage
from titanlite.data.tokenizer import Tokenizer
from titanlite.evaluation.evaluator import Evaluator, RowShape
from titanlite.evaluation.harness import Harness
from titanlite.forward import ModelOnMesh
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.agreement import share_from_rank_0
from titanlite.ranks.distributed import World
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.logging import log


def build_tokenizer(config: JobConfig) -> Tokenizer | None:
    """Load the tokenizer, or train it on first use; None if the sources hold tokens."""
    hyper_parameters = config.hyper_parameters
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=hyper_parameters.vocab_size)
    log.info("Tokenizer: %s", tokenizer.description if tokenizer else "none, the sources hold tokens")
    return tokenizer


def _describe_bos(config: JobConfig, tokenizer: Tokenizer) -> None:
    """Log what disagrees about BOS at the start of documents."""
    by_source, of_run = bos_by_source(config), config.data.adds_bos
    of_data = all(by_source.values()) if by_source else of_run
    of_weights = initial_config(config.checkpoint).get("data", {}).get("add_bos", of_run)
    have = {True: "have it", False: "have none"}
    if len({*by_source.values()}) > 1:
        first = {begins: source for source, begins in reversed(by_source.items())}
        log.warning(
            "BOS: documents in %s have it, those in %s have none, prompts and tasks %s: write all with one add_bos",
            *(first[True], first[False], have[of_run]),
        )
    elif of_data != of_run:
        log.warning(
            "BOS: the documents in the token files %s, prompts and tasks %s: data.add_bos = %s should be %s",
            *(have[of_data], have[of_run], *(str(each).lower() for each in (of_run, of_data))),
        )
    elif of_weights != of_run:
        log.warning(
            "BOS: the documents of the run in %s %s, those of this run %s: data.add_bos = %s should be %s",
            *(config.checkpoint.initial_load_path, have[not of_run], have[of_run]),
            *(str(each).lower() for each in (of_run, not of_run)),
        )
    elif start_model(config) and tokenizer.conflict_of_bos:
        log.warning(
            "BOS: %s; the documents of this run %s: if the model was trained otherwise, write data.add_bos = %s",
            *(tokenizer.conflict_of_bos, have[of_run], str(not of_run).lower()),
        )
    elif tokenizer.adds_bos and not of_run:
        log.info("BOS: the tokenizer adds it to a text; documents, prompts, tasks and exports of this run have none")


def build_data(job: Job, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
    """Build this data rank's loader, and the index of the data on first use."""
    loader = loader_of(job, job.config.data, mesh, tokenizer, later=job.batch_stages[1:])
    log.info("Data: %s", loader.description)
    if any(source.is_stored for source in loader.sources):
        log.info("Data: %s", stored_parts().describe())
    if not job.config.data.reads_context and any(source.holds == "text" for source in loader.sources):
        log.info("Data: stream_version 2: parts of long documents are tokenized one by one, as before version 3")
    if not job.config.data.reads_fields and any(source.config.is_chat for source in loader.sources):
        log.info("Data: before stream_version 4: rows with tools are bad, and chat_template_kwargs is ignored")
    if mesh.world.rank == 0:  # takes time, and only rank 0 logs
        if tokenizer and tokenizer.bos_id is not None:
            _describe_bos(job.config, tokenizer)
        has_chat = any(source.config.is_chat for source in loader.sources)
        if tokenizer and has_chat and (fault := ChatEncoder(tokenizer).fault_of_end):
            log.warning("%s, so %s", fault, NO_END)
        for source in loader.sources:
            if source.holds == "text" and (unread := source.describe_unread()):
                log.info("Not read: %s in %s, by kind = %r", unread, source.config.path, source.kind)
        log.info("Epochs: %s", loader.describe_epochs(job.config.training.steps))
    return loader


def loader_of(
    job: Job, section: DataConfig, mesh: Mesh, tokenizer: Tokenizer | None, later: Sequence[BatchStage] = ()
) -> Loader:
    """Build the loader of the data of `section`, with the batch sizes of training, of its first stage and `later`."""
    training = job.config.training
    return build_loader(
        section,
        tokenizer,
        seq_len=training.seq_len,
        vocab_size=job.hyper_parameters.vocab_size,
        global_batch_size=training.global_batch_size,
        local_batch_size=job.step.rows_per_batch,
        data_rank=mesh.data_rank,
        data_degree=mesh.data_degree,
        together=job.step.size if training.bit_equal else 1,
        later=later,
        logs=mesh.is_data_leader,
    )


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


def build_tasks(
    config: JobConfig,
    tokenizer: Tokenizer | None,
    world: World,
    store: dist.Store,
    *,
    allows_code: bool = False,
    why_no_text: str = "",
) -> Harness | None:
    """Load validation.tasks with their data on rank 0, whose errors all ranks raise; None on the others, and without
    tasks. allows_code, why_no_text: see Harness. Raises UserError."""
    section, found = config.validation, list[Harness]()
    if not section.enable or not section.tasks:
        return None
    assert tokenizer is not None, "see check_validation"

    def load() -> None:
        log.info("Loading the tasks %s", ", ".join(section.tasks))
        build = partial(Harness, allows_code=allows_code, why_no_text=why_no_text)
        found.append(build(section, tokenizer, seq_len=config.training.seq_len, adds_bos=config.data.adds_bos))
        for line in found[0].describe():
            log.info("Task: %s", line)

    share_from_rank_0("tasks", load, world, store, config.comm.save_timeout_s)
    return found[0] if found else None


def build_evaluator(
    job: Job, model: ModelOnMesh, group: dist.ProcessGroup, stop: StopRequest, tokenizer: Tokenizer | None
) -> Evaluator:
    """Build what computes losses, and scores of tasks in batches of as many tokens as those of training.

    A pipeline and context parallelism need rows of one length. Compiled code must not see another one: it would be
    compiled again, for training, too.
    """
    config, in_nats = job.config, job.config.loss.is_cross_entropy
    section, bit_equal = config.parallelism, config.training.bit_equal
    is_fixed = section.pp > 1 or section.cp > 1 or config.compile.enable
    shape = RowShape(job.step.rows_per_batch, config.training.seq_len, is_fixed)
    if not config.validation.sources:
        return Evaluator(model, group, stop, shape, in_nats=in_nats, bit_equal=bit_equal)
    sizes, why = None, "the loss is not the cross-entropy"
    if in_nats:
        sizes = tokenizer.token_bytes() if tokenizer else None
        why = "the tokenizer is not byte-level" if tokenizer else "there is no tokenizer"
    if sizes is None:
        log.info("Validation: no bits per byte, since %s", why)
        return Evaluator(model, group, stop, shape, None, why, in_nats, bit_equal)
    token_bytes = torch.zeros(job.hyper_parameters.vocab_size, dtype=torch.int64)
    token_bytes[: len(sizes)] = torch.tensor(sizes)
    return Evaluator(model, group, stop, shape, token_bytes.to(model.device), bit_equal=bit_equal)
