"""What a start decides for all ranks: layout, batch, revisions of datasets."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch.distributed as dist

from titanlite.assembly.facts import program_facts
from titanlite.assembly.job import Job, job_of
from titanlite.config.schema import JobConfig
from titanlite.data.kinds import KINDS, open_source
from titanlite.planning.automatic import agree_on_layout, agree_on_memory
from titanlite.ranks.agreement import require_equal, share_from_rank_0
from titanlite.ranks.distributed import World


def resolve_job(
    config: JobConfig, given: Collection[str], world: World, store: dist.Store, environment: Mapping[str, str]
) -> Job:
    """Decide what depends on the machine and on the hub: layout, batch, revisions. A collective. Raises UserError, also
    if the ranks differ in settings or code.

    config: checked and resolved, as by titanlite.config.load.resolve. given: full keys that a choice of the layout
    keeps. store: connected; there is no process group yet. environment: the variables at program start.
    """
    facts = program_facts(config, world, environment)
    require_equal("program", facts, world, store, config.comm.init_timeout_s)
    config = agree_on_layout(config, given, world, store)
    config = agree_on_memory(config, world, store)
    return job_of(pin_revisions(config, world, store), world.size)


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
