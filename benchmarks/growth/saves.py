"""Saves: what rank 0 receives and computes, with the plans of all ranks and the tensors of a model, but no values."""

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import uuid4

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from benchmarks.growth.count import Count
from titanlite.checkpoint.folder import retain
from titanlite.checkpoint.grid import Grid, grid_content
from titanlite.checkpoint.grid_plan import Box, Described, GridPlan, Written, described, packed_places
from titanlite.checkpoint.manifest import METADATA_FILE, Branch, Manifest, manifest_text, write_recorded
from titanlite.checkpoint.planning import Listed, PlannedSaves
from titanlite.checkpoint.storage import ShardPlace
from titanlite.models.registry import FAMILIES
from titanlite.storage.address import Address
from titanlite.storage.store import Store

T = TypeVar("T")
Tensors = Sequence[tuple[str, tuple[int, ...]]]
"""Names and shapes."""


def tensors_of(family: str, flavor: str) -> Tensors:
    """The tensors of a run of a model with AdamW."""
    kind = FAMILIES[family]
    with torch.device("meta"):
        parameters = [(name, tuple(each.shape)) for name, each in kind.build(kind.flavors[flavor]).named_parameters()]
    moments = [(f"optimizer/{name}/{key}", shape) for name, shape in parameters for key in ("exp_avg", "exp_avg_sq")]
    return [*((f"model/{name}", shape) for name, shape in parameters), *moments]


def of_saves(shards: int) -> Iterator[Count]:
    """The costs of saves of Llama 3 405B."""
    return grid(tensors_of("llama3", "405B"), shards)


def grid(tensors: Tensors, shards: int) -> Iterator[Count]:
    """Rank 0's first save with GRID.json, and the start of a rank of another mesh."""
    sent, num_bytes = list[Described](), 0
    shapes = dict.fromkeys(shape for _, shape in tensors)
    for rank in range(shards):
        boxes = [_box(shape, shards, rank) for shape in shapes]
        own = sent[0].tensors if sent else _described(tensors, shards).tensors
        sent.append(Described(own, boxes))  # all ranks of a mesh have the same list
        num_bytes += len(pickle.dumps(sent[-1]))
    yield Count("first save", shards, "items", len(tensors) * shards)
    plan, seconds = _timed(lambda: GridPlan(sent))
    answers, more = _timed(lambda: [plan.share_of(rank) for rank in range(shards)])
    yield Count("first save: plan", shards, "bytes", num_bytes + sum(map(len, answers)))
    yield Count("first save: plan", shards, "CPU s", seconds + more)
    num_bytes = 0
    for rank, share in enumerate(answers):
        written = Written(f"__{rank}_0.distcp", _places(tensors, shards, rank, share))
        plan.put(rank, written)
        num_bytes += len(pickle.dumps(written))
    content, seconds = _timed(lambda: grid_content(plan.tables()))
    yield Count("first save: metadata", shards, "bytes", num_bytes + len(content))
    yield Count("first save: metadata", shards, "CPU s", seconds)
    saves = PlannedSaves()
    for _ in range(2):
        saves.agree(lambda: _plan(tensors, shards, 0), None)
    later = saves.sent()
    yield Count("later saves", shards, "items", shards * len(later.items))
    yield Count("later saves", shards, "bytes", shards * len(pickle.dumps(later)))
    read, seconds = _timed(lambda: Grid(content))
    others, more = _timed(lambda: sum(len([*read.blocks(name, *_box(shape, 7, 1)[1:])]) for name, shape in tensors))
    yield Count("resume of a rank of 7", shards, "items", others)
    yield Count("resume of a rank of 7", shards, "CPU s", seconds + more)


def listed(tensors: Tensors, shards: int) -> Iterator[Count]:
    """Rank 0's first save with DCP's metadata."""
    form = Listed()
    sent = [pickle.dumps(_plan(tensors, shards, rank)) for rank in range(shards)]
    yield Count("first save, listed", shards, "items", len(tensors) * shards)
    yield Count("first save, listed: plan", shards, "bytes", sum(map(len, sent)))
    plans, seconds = _timed(lambda: form.plan([pickle.loads(each) for each in sent]))
    yield Count("first save, listed: plan", shards, "CPU s", seconds)
    results = [pickle.dumps(_results(plan, rank)) for rank, plan in enumerate(plans)]
    content, seconds = _timed(lambda: form.content([pickle.loads(each) for each in results]))
    yield Count("first save, listed: metadata", shards, "bytes", sum(map(len, results)) + len(content))
    yield Count("first save, listed: metadata", shards, "CPU s", seconds)


def of_retention(kept: int) -> Iterator[Count]:
    """The requests of a save that keeps all of `kept` earlier checkpoints in a store, but the last three: `ranks` is
    their number."""
    folder, requests = Address.parse(f"memory://{uuid4().hex}/run"), list[str]()
    for step in (*range(100, 100 * kept + 1, 100), *(100 * kept + n for n in (10, 20, 30))):
        attempt = folder / f"step-{step}" / "attempt-0123456789abcdef"
        files = {METADATA_FILE: write_recorded(attempt / METADATA_FILE, b"metadata")}
        counts = {"tokens_seen": 0, "skipped_steps": 0, "by_source": {}, "interval": [0.0, 0.0]}
        manifest = Manifest(step, "full", (Branch("a", 0),), counts, {}, {}, {}, "", files, 4, attempt=attempt.name)
        Store(folder).write(f"step-{step}/MANIFEST.json", manifest_text(manifest))
    call = Store._call

    def noted(store: Store, verb: str, name: str, request: Callable[[], Any]) -> Any:
        requests.append(verb)
        return call(store, verb, name, request)

    with patch.object(Store, "_call", noted):
        retain(folder, keep_latest_k=2, keep_every=100, keep=())
    yield Count("retention, of kept checkpoints", kept, "requests", len(requests))


def _box(shape: tuple[int, ...], shards: int, rank: int) -> Box:
    """The part of a tensor that is cut along its first dimension."""
    chunk = -(-shape[0] // shards)
    begin = min(shape[0], chunk * rank)
    rest = shape[1:]
    return shape, (begin, *(0 for _ in rest)), (min(shape[0], begin + chunk) - begin, *rest)


def _described(tensors: Tensors, shards: int) -> Described:
    return described([(name, "torch.float32", _box(shape, shards, 0)) for name, shape in tensors])


def _places(tensors: Tensors, shards: int, rank: int, share: bytes) -> bytes:
    """Places as torch writes a rank's shards: content and about 1,200 bytes, in multiples of 64."""
    is_own = np.unpackbits(np.frombuffer(share, dtype=np.uint8), count=len(tensors)).tolist()
    found, begin = [], 0
    for position, (_, shape) in enumerate(tensors):
        if is_own[position]:
            _, _, sizes = _box(shape, shards, rank)
            length = 1216 + -(-4 * math.prod(sizes) // 64) * 64
            found.append((position, begin, length))
            begin += length
    return packed_places(found)


def _plan(tensors: Tensors, shards: int, rank: int) -> dcp.SavePlan:
    items = []
    for name, shape in tensors:
        _, offset, sizes = map(torch.Size, _box(shape, shards, rank))
        data = TensorWriteData(ChunkStorageMetadata(offset, sizes), TensorProperties(torch.float32), torch.Size(shape))
        items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    return dcp.SavePlan(items, planner_data={name: (name,) for name, _ in tensors})


def _results(plan: dcp.SavePlan, rank: int) -> list[WriteResult]:
    places = (ShardPlace(f"__{rank}_0.distcp", number, 1) for number in range(len(plan.items)))
    return [WriteResult(item.index, 1, place) for item, place in zip(plan.items, places, strict=True)]


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """The result and the CPU seconds of `work`."""
    begin = time.process_time()
    return work(), time.process_time() - begin
