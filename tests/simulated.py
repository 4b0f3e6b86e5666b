"""A simulated world for tests of what one of many ranks builds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import Mesh
from titanlite.ranks.distributed import World


@contextmanager
def simulated_mesh(config: JobConfig, world_size: int, rank: int = 0) -> Iterator[Mesh]:
    """The mesh of a simulated world with only this process, as `rank`. Collectives return at once and move no data."""
    excepthook = sys.excepthook  # which torch replaces by one that writes the rank before each line
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        mesh = Mesh(config.parallelism, World(rank, rank, world_size, "cpu"))
        mesh.connect(None)
        yield mesh
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
