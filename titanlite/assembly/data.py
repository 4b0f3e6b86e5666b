"""Tokenizer and data loaders of a run."""

from dataclasses import replace

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.data.bpe import prepare_tokenizer
from titanlite.data.config import DataConfig
from titanlite.data.kinds import KINDS, open_source, source_names
from titanlite.data.loader import Loader, build_loader
from titanlite.data.sources.base import TextSource
from titanlite.data.tasks import EncodedTask, encode_task, read_task
from titanlite.data.tokenizer import Tokenizer
from titanlite.parallel.mesh import Mesh
from titanlite.planning.microbatches import divide_step
from titanlite.runtime.agreement import share_from_rank_0
from titanlite.runtime.distributed import World
from titanlite.runtime.logging import log


def pin_revisions(config: JobConfig, world: World, store: dist.Store) -> JobConfig:
    """The configuration with the revisions of all datasets on the hub resolved to commits, the same on all ranks.

    Rank 0 queries the hub and shares the commits through the store. Raises ConfigError.
    """
    sections = {"data": config.data.sources, "validation": config.validation.sources}
    keyed = [(f"{name}.sources.{n}", source) for name, sources in sections.items() for n, source in enumerate(sources)]
    if not any(KINDS[source.kind].has_revision for _, source in keyed):
        return config
    commits = share_from_rank_0(
        "hub_commits",
        lambda: [open_source(source).pinned_revision(key) for key, source in keyed],
        *(world, store, config.comm.init_timeout_s),
    )
    pinned = [
        replace(source, revision=commit) if commit else source
        for (_, source), commit in zip(keyed, commits, strict=True)
    ]
    count = len(config.data.sources)
    return replace(
        config,
        data=replace(config.data, sources=tuple(pinned[:count])),
        validation=replace(config.validation, sources=tuple(pinned[count:])),
    )


def build_tokenizer(config: JobConfig) -> Tokenizer | None:
    """Load the tokenizer, or train it on first use; None if the sources hold tokens."""
    hyper_parameters = config.hyper_parameters
    tokenizer = prepare_tokenizer(config.tokenizer, config.data.sources, vocab_size=hyper_parameters.vocab_size)
    log.info("Tokenizer: %s", tokenizer.description if tokenizer else "none, the sources hold tokens")
    return tokenizer


def build_data(config: JobConfig, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
    """Build this data rank's loader, and the index of the data on first use."""
    loader = loader_of(config, config.data, mesh, tokenizer)
    log.info("Data: %s", loader.description)
    if mesh.world.rank == 0:  # takes time, and only rank 0 logs
        for source in loader.sources:
            if isinstance(source, TextSource) and (unread := source.describe_unread()):
                log.info("Not read: %s in %s, by kind = %r", unread, source.config.path, source.kind)
        log.info("Epochs: %s", loader.describe_epochs(config.training.steps))
    return loader


def build_validation_data(config: JobConfig, mesh: Mesh, tokenizer: Tokenizer | None) -> dict[str, Loader]:
    """Build this data rank's loaders of the validation data, by source. Each source is read once, unshuffled."""
    sources = config.validation.sources if config.validation.enable else ()
    loaders = {}
    for name, source in zip(source_names(sources), sources, strict=True):
        section = replace(config.data, sources=(replace(source, epochs=1),), shuffle=False, num_workers=0)
        loaders[name] = loader_of(config, section, mesh, tokenizer)
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


def loader_of(config: JobConfig, section: DataConfig, mesh: Mesh, tokenizer: Tokenizer | None) -> Loader:
    """Build the loader of the data of `section`, with the batch sizes of training."""
    hyper_parameters = config.hyper_parameters
    return build_loader(
        section,
        tokenizer,
        seq_len=config.training.seq_len,
        vocab_size=hyper_parameters.vocab_size,
        global_batch_size=config.training.global_batch_size,
        local_batch_size=divide_step(config, mesh.data_degree).rows_per_batch,
        data_rank=mesh.data_rank,
        data_degree=mesh.data_degree,
        logs=mesh.is_data_leader,
    )
