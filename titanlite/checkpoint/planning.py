"""Plan which rank writes which shard. The plan is made at the first save of a run, and again only at a save for which
the tensors of a rank have changed: other saves send nothing of it, and rank 0 writes the same metadata again."""

import math
import pickle
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from titanlite.checkpoint.grid import grid_content
from titanlite.checkpoint.grid_plan import GridPlan, Written, described, packed_places
from titanlite.checkpoint.manifest import GRID_FILE, METADATA_FILE
from titanlite.ranks.agreement import run_on_all_ranks
from titanlite.runtime.torch_internals import without_replicas

MOST_LISTED = 2**18
"""Shards, with their replicas, up to which a checkpoint has DCP's metadata, which list each: other programs read them.
Rank 0 takes about 100 microseconds and 4 kB for each, at the first save: 26 seconds and 1.1 GB. Every rank takes 10 to
20 microseconds at a resume. More shards are described by GRID.json: 3.5 million take rank 0 less than a second."""
_VERSION = "1.0.0"
"""Of DCP's metadata."""


class Form(Protocol):
    """How the plan is sent, and the metadata are written. Rank 0 calls plan and content."""

    file: str

    def sent(self, own: dcp.SavePlan) -> dcp.SavePlan: ...

    def plan(self, sent: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Decide which of the ranks that have a shard writes it."""
        ...

    def own(self, could: dcp.SavePlan, answer: dcp.SavePlan) -> dcp.SavePlan:
        """What this rank writes. could: what it could write."""
        ...

    def results(self, could: dcp.SavePlan, written: list[WriteResult]) -> list[WriteResult]:
        """What is sent of where this rank has put its shards."""
        ...

    def content(self, changed: Sequence[Sequence[WriteResult]]) -> bytes:
        """The content of the metadata. changed: the results of each rank, [] if they are those of the last save."""
        ...


class Listed:
    """DCP's metadata, which list all shards."""

    file = METADATA_FILE

    def __init__(self) -> None:
        self._metadata = Metadata({})

    def sent(self, own: dcp.SavePlan) -> dcp.SavePlan:
        return own

    def plan(self, sent: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        plans, self._metadata = create_default_global_save_plan(without_replicas(sent))
        self._metadata.planner_data = dict(ChainMap(*(plan.planner_data for plan in plans)))
        self._metadata.version = _VERSION
        _require_covered(self._metadata)
        return plans

    def own(self, could: dcp.SavePlan, answer: dcp.SavePlan) -> dcp.SavePlan:  # noqa: ARG002
        return answer

    def results(self, could: dcp.SavePlan, written: list[WriteResult]) -> list[WriteResult]:  # noqa: ARG002
        return written

    def content(self, changed: Sequence[Sequence[WriteResult]]) -> bytes:
        places = {result.index: result.storage_data for results in changed for result in results}
        self._metadata.storage_data = (self._metadata.storage_data or {}) | places
        return pickle.dumps(self._metadata)


class Gridded:
    """GRID.json."""

    file = GRID_FILE

    def __init__(self) -> None:
        self._plan = GridPlan([])

    def sent(self, own: dcp.SavePlan) -> dcp.SavePlan:
        rows = []
        for item in own.items:
            data = item.tensor_data
            assert data is not None
            box = tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            rows.append((item.index.fqn, str(data.properties.dtype), box))
        return dcp.SavePlan([], planner_data=described(rows))

    def plan(self, sent: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self._plan = GridPlan([plan.planner_data for plan in sent])
        return [dcp.SavePlan([], planner_data=self._plan.share_of(rank)) for rank in range(len(sent))]

    def own(self, could: dcp.SavePlan, answer: dcp.SavePlan) -> dcp.SavePlan:
        is_own = np.unpackbits(np.frombuffer(answer.planner_data, dtype=np.uint8), count=len(could.items))
        items = [item for item, mine in zip(could.items, is_own.tolist(), strict=True) if mine]
        return dcp.SavePlan(items, storage_data=answer.storage_data)

    def results(self, could: dcp.SavePlan, written: list[WriteResult]) -> list[WriteResult]:
        if not written:
            return []
        position = {item.index.fqn: number for number, item in enumerate(could.items)}
        rows = [(position[each.index.fqn], each.storage_data.offset, each.storage_data.length) for each in written]
        file = Written(written[0].storage_data.relative_path, packed_places(rows))
        return [WriteResult(MetadataIndex(file.name), len(file.places), file)]

    def content(self, changed: Sequence[Sequence[WriteResult]]) -> bytes:
        for rank, results in enumerate(changed):
            for result in results:
                self._plan.put(rank, result.storage_data)
        return grid_content(self._plan.tables())


class PlannedSaves:
    """What the saves of a run have in common, on this rank; all are by the same group."""

    def __init__(self) -> None:
        self._key = ""
        self._form: Form = Listed()
        self._could = self._own = dcp.SavePlan([])
        self._results: list[WriteResult] = []
        self._content = b""
        self.is_agreed = False
        """Whether all ranks have the tensors of their last saves."""

    @property
    def file(self) -> str:
        """The name of the metadata."""
        return self._form.file

    def agree(self, could_write: Callable[[], dcp.SavePlan], group: dist.ProcessGroup | None) -> None:
        """Decide whether the plan of the last save holds, by the shards that each rank could write. A collective."""
        could = dcp.SavePlan([])

        def look() -> tuple[bool, int]:
            nonlocal could
            could = could_write()
            key = _key_of(could)
            is_same, self._key = key == self._key, key
            return is_same, len(could.items)

        found = [look()] if group is None else run_on_all_ranks(look, group)
        self.is_agreed = all(is_same for is_same, _ in found)
        if not self.is_agreed:
            is_large = group is not None and sum(count for _, count in found) > MOST_LISTED
            self._form = Gridded() if is_large else Listed()
            self._could, self._results, self._content = could, [], b""

    def forget(self) -> None:
        """Make the plan again at the next save, on all ranks."""
        self._key = ""

    def sent(self) -> dcp.SavePlan:
        """What this rank sends to rank 0."""
        return dcp.SavePlan([]) if self.is_agreed else self._form.sent(self._could)

    def plan(self, sent: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """The answers of rank 0 to all ranks."""
        return sent if self.is_agreed else self._form.plan(sent)

    def own(self, answer: dcp.SavePlan) -> dcp.SavePlan:
        """What this rank writes."""
        if not self.is_agreed:
            self._own = self._form.own(self._could, answer)
        return self._own

    def results(self, written: list[WriteResult]) -> list[WriteResult]:
        """What this rank sends of where it has put its shards: [] if they are where the last save put them."""
        if written == self._results:
            return []
        self._results = written
        return self._form.results(self._could, written)

    def content(self, changed: Sequence[Sequence[WriteResult]]) -> bytes:
        """On rank 0: the content of the metadata. changed: what all ranks have sent."""
        if any(changed) or not self._content:
            self._content = self._form.content(changed)
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
        self._saves.agree(super().create_local_plan, group)

    def create_local_plan(self) -> dcp.SavePlan:
        return self._saves.sent()

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        return self._saves.plan(all_plans), Metadata({})

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        return self._saves.own(new_plan)

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
