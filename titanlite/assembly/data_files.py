"""The look at the data files of a run: the first rank of each node checks them, and the others take its tables."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.data.sources.token_table import use_looks
from titanlite.data.sources.tokens import Tokens, opened_once
from titanlite.ranks.agreement import share_from_rank
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import ConfigError


def resolve_without_data(resolve: Callable[..., JobConfig], world: World) -> JobConfig:
    """The configuration for the connection of several ranks, before resolve_with_data: problems of data are found
    later, unless there are others. In one process, with its data.

    resolve: takes reads_data, as titanlite.config.load.resolve. Raises ConfigError.
    """
    if world.size > 1:
        with suppress(ConfigError):
            return resolve(reads_data=False)
    return resolve()


def resolve_with_data(resolve: Callable[[], JobConfig], world: World, store: dist.Store, timeout_s: int) -> JobConfig:
    """The configuration, checked with its data files. Looks at token files on the first rank of each node only, if they
    are many; all ranks of the node raise its error.

    resolve: checks and resolves the configuration. store: of all ranks. timeout_s: for the first rank of a node.
    """
    first, found = world.local_ranks.start, list[JobConfig]()

    def look() -> Sequence[Any]:
        with opened_once(digests=True):
            found.append(resolve())
            return looks_of(found[0])

    use_looks(share_from_rank(first, f"data files of rank {first}", look, world, store, timeout_s))
    return found[0] if found else resolve()


def looks_of(config: JobConfig) -> list[Any]:
    """What the other processes of this node need to know of the token files. config: resolved."""
    held_out = config.validation.sources if config.validation.enable else ()
    sources = {
        (source.path, source.dtype): Tokens(source)
        for source in (*config.data.sources, *held_out)
        if source.kind == Tokens.kind
    }
    looks = [source.look(document_mask=bool(config.data.masks_documents)) for source in sources.values()]
    return [look for look in looks if look is not None]
