"""Tokenizer and data loaders of a run."""

from titanlite.assembly.job import Job
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.chat.encoder import NO_END, ChatEncoder
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader, build_loader
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.mesh import Mesh
from titanlite.runtime.logging import log


def build_tokenizer(config: JobConfig) -> Tokenizer | None:
    """Load the tokenizer, or train it on first use; None if the sources hold tokens."""
    hyper_parameters = config.hyper_parameters
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=hyper_parameters.vocab_size)
    log.info("Tokenizer: %s", tokenizer.description if tokenizer else "none, the sources hold tokens")
    return tokenizer


def build_data(job: Job, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
    """Build this data rank's loader, and the index of the data on first use."""
    loader = loader_of(job, job.config.data, mesh, tokenizer)
    log.info("Data: %s", loader.description)
    if not job.config.data.reads_context and any(source.holds == "text" for source in loader.sources):
        log.info("Data: stream_version 2: parts of long documents are tokenized one by one, as before version 3")
    if mesh.world.rank == 0:  # takes time, and only rank 0 logs
        has_chat = any(source.config.is_chat for source in loader.sources)
        if tokenizer and has_chat and (fault := ChatEncoder(tokenizer).fault_of_end):
            log.warning("%s, so %s", fault, NO_END)
        for source in loader.sources:
            if source.holds == "text" and (unread := source.describe_unread()):
                log.info("Not read: %s in %s, by kind = %r", unread, source.config.path, source.kind)
        log.info("Epochs: %s", loader.describe_epochs(job.config.training.steps))
    return loader


def loader_of(job: Job, section: DataConfig, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
    """Build the loader of the data of `section`, with the batch sizes of training."""
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
        logs=mesh.is_data_leader,
    )
