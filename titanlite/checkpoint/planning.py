"""Plan which rank writes which shard. The plan is made at the first save of a run, and again only at a save for which
the tensors of a rank have changed: other saves send nothing of it, and rank 0 writes the same metadata again."""

import math
import pickle
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from titanlite.ranks.agreement import run_on_all_ranks
from titanlite.runtime.torch_internals import without_replicas

_VERSION = "1.0.0"
"""Of DCP's metadata."""


class PlannedSaves:
    """What the saves of a run have in common, on this rank; all by the same group.

    own: the items that this rank writes. is_agreed: whether all ranks write the items of their last saves.
    """

    def __init__(self) -> None:
        self._key = ""
        self._results: list[WriteResult] = []
        self._metadata: Metadata | None = None  # on rank 0, and so is _content
        self._content = b""
        self.own = dcp.SavePlan([])
        self.is_agreed = False

    def agree(self, local: dcp.SavePlan, group: dist.ProcessGroup | None) -> None:
        """Decide whether the plan of the last save holds, by the items that each rank would write. A collective."""

        def look() -> bool:
            key = _key_of(local)
            is_same, self._key = key == self._key, key
            return is_same

        self.is_agreed = all(run_on_all_ranks(look, group) if group is not None else [look()])
        if not self.is_agreed:
            self.own, self._results, self._metadata, self._content = local, [], None, b""

    def forget(self) -> None:
        """Make the plan again at the next save, on all ranks."""
        self._key = ""

    def global_plan(self, local: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        """On rank 0: each shard is written by one of the ranks that have it. local: of all ranks."""
        if self.is_agreed:
            assert self._metadata is not None
            return local, self._metadata
        plans, metadata = create_default_global_save_plan(without_replicas(local))
        metadata.planner_data = dict(ChainMap(*(plan.planner_data for plan in plans)))
        metadata.version = _VERSION
        _require_covered(metadata)
        self._metadata = metadata
        return plans, metadata

    def changed_results(self, written: list[WriteResult]) -> list[WriteResult]:
        """Where this rank has put its items, if not where its last save put them; else []."""
        changed = [] if written == self._results else written
        self._results = written
        return changed

    def content(self, changed: Sequence[Sequence[WriteResult]]) -> bytes:
        """On rank 0: the content of DCP's file of metadata. changed: the changed results of all ranks."""
        places = {result.index: result.storage_data for results in changed for result in results}
        if places or not self._content:
            assert self._metadata is not None
            self._metadata.storage_data = (self._metadata.storage_data or {}) | places
            self._content = pickle.dumps(self._metadata)
        return self._content


class LocalPlanner(dcp.DefaultSavePlanner):
    """Plans with the run's tensors, and reads the data from `local`: this rank's shard of each, on any device."""

    def __init__(self, local: Mapping[str, Tensor], saves: PlannedSaves) -> None:
        super().__init__()
        self._local = local
        self._saves = saves

    def agree(self, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """See PlannedSaves.agree."""
        self.set_up_planner(dict(tensors), None, group is None or dist.get_rank(group) == 0)
        self._saves.agree(super().create_local_plan(), group)

    def create_local_plan(self) -> dcp.SavePlan:
        return dcp.SavePlan([]) if self._saves.is_agreed else self._saves.own

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        return self._saves.global_plan(all_plans)

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        if not self._saves.is_agreed:
            self._saves.own = new_plan
        return self._saves.own

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._local[index.fqn]


def _key_of(plan: dcp.SavePlan) -> str:
    """A hash of all that the global plan and the metadata are made of."""
    digest = xxhash.xxh3_128()
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, f"{item.index.fqn} is not a tensor"
        facts: tuple[Any, ...] = (item.index.fqn, item.type, data.size, data.chunk.offsets, data.chunk.sizes)
        digest.update(f"{facts}{data.properties}\n".encode())
    return digest.hexdigest()


def _require_covered(metadata: Metadata) -> None:
    """Raise ValueError unless the shards of each tensor lie in it and have as many elements. Whether shards overlap is
    not checked, which would take shards^2 comparisons: those of a mesh are the blocks of a grid."""
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        covered = 0
        for chunk in entry.chunks:
            covered += math.prod(chunk.sizes)
            for size, offset, extent in zip(entry.size, chunk.offsets, chunk.sizes, strict=True):
                if not 0 <= offset <= offset + extent <= size:
                    raise ValueError(f"{name} of shape {tuple(entry.size)} has a shard {chunk} outside of it")
        if covered != math.prod(entry.size):
            raise ValueError(f"{name} of shape {tuple(entry.size)} is not covered by its {len(entry.chunks)} shards")
