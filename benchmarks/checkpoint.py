"""Checkpoints: saving and loading against torch.save and plain DCP.

The state is that of a model with about 100 M parameters and AdamW: 1.2 GB in float32. Each rank writes its shards.
Every round saves with each method once, in an order that alternates; then every round loads with each method once. The
first round of both is discarded. All methods sync the files to disk before a save ends (fsync); loads read from the
page cache. Speeds are compared in the same round. An async save has two timings: the wait of the training thread, and
the time until the checkpoint is published.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.measuring import Row, in_turns, ratios, report, threads_per_process
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Saver
from titanlite.checkpoint.start import load
from titanlite.checkpoint.verification import Found, verify_checkpoint
from titanlite.ranks.launch import run_ranks

WIDTH, BLOCKS, VOCABULARY = 768, 12, 16384


def state(blocks: int = BLOCKS) -> dict[str, Tensor]:
    """Parameters and moments of a model with blocks of width 768, sharded over the ranks in the first dimension."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("tok_embeddings", "output"), (VOCABULARY, WIDTH))
    for block in range(blocks):
        shapes |= {f"layers.{block}.attention.{name}": (WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")}
        shapes |= {f"layers.{block}.feed_forward.{name}": (2048, WIDTH) for name in ("w1", "w2", "w3")}
        shapes |= {f"layers.{block}.{name}": (WIDTH,) for name in ("attention_norm", "ffn_norm")}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors: dict[str, Tensor] = {}
    for name, (rows, *columns) in shapes.items():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            local = torch.randn(rows // dist.get_world_size(), *columns)
            tensors[f"{kind}/{name}"] = (
                DTensor.from_local(local, mesh, [Shard(0)]) if dist.get_world_size() > 1 else local
            )
    return tensors


def draft(step: int) -> Manifest:
    counts = {"tokens_seen": 0, "skipped_steps": 0, "by_source": {}, "interval": []}
    return Manifest(step, "full", (Branch("benchmark", 0),), counts, {}, {}, {}, "", {})


class NoHash:
    """Replaces the hash and does nothing."""

    def update(self, data: object) -> None: ...

    def hexdigest(self) -> str:
        return ""


class Ways:
    """The methods to save and load. Each save starts in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = state()
        self.group = dist.new_group(backend="gloo")
        self.savers = {
            "disabled": Saver(folder / "disabled", self.group, "disabled", torch.device("cpu"), list),
            "not hashed": Saver(folder / "not hashed", self.group, "disabled", torch.device("cpu"), list),
            "async": Saver(folder / "async", self.group, "async", torch.device("cpu"), list),
        }
        self.step = 0
        self.waits_s: list[float] = []
        """Of the training thread in each async save."""

    def draft(self) -> Manifest:
        self.step += 1
        return draft(self.step)

    def torch_save(self) -> None:
        path = self.folder / "torch" / f"{dist.get_rank()}.pt"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            torch.save({name: storage_of(tensor) for name, tensor in self.tensors.items()}, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        loaded = torch.load(self.folder / "torch" / f"{dist.get_rank()}.pt", weights_only=True)
        for name, tensor in self.tensors.items():
            storage_of(tensor).copy_(loaded[name])

    def dcp_save(self) -> None:
        dcp.save(dict(self.tensors), checkpoint_id=self.folder / "dcp", process_group=self.group)

    def dcp_load(self) -> None:
        dcp.load(dict(self.tensors), checkpoint_id=self.folder / "dcp", process_group=self.group)

    def save(self) -> None:
        self.savers["disabled"].save(self.draft(), self.tensors)

    def save_without_hash(self) -> None:
        with patch.object(xxhash, "xxh3_128", NoHash):
            self.savers["not hashed"].save(self.draft(), self.tensors)

    def load(self) -> None:
        (path,) = (self.folder / "disabled").iterdir()
        found = verify_checkpoint(path, self.group, lambda _: True)
        assert isinstance(found, Found), found
        load(found.path, self.tensors, self.group)

    def load_unverified(self) -> None:
        (path,) = (self.folder / "disabled").iterdir()
        load(path, self.tensors, self.group)

    def save_async(self) -> None:
        start = perf_counter()
        self.savers["async"].begin(self.draft(), self.tensors)
        dist.barrier()
        self.waits_s.append(perf_counter() - start)
        failure = self.savers["async"].take_failure()
        assert failure is None, failure


def storage_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(folder: str, rounds: int, threads: int) -> tuple[int, dict[str, list[float]]]:
    """(bytes of the state, seconds of each round by method)."""
    torch.set_num_threads(threads)
    logging.getLogger("titanlite").setLevel(logging.WARNING)
    ways = Ways(Path(folder))

    saves: dict[str, tuple[str, Callable[[], None]]] = {
        "torch.save": ("torch", ways.torch_save),
        "dcp.save": ("dcp", ways.dcp_save),
        "save": ("disabled", ways.save),
        "save, not hashed": ("not hashed", ways.save_without_hash),
        "async save: published": ("async", ways.save_async),
    }
    loads: dict[str, Callable[[], None]] = {
        "torch.load": ways.torch_load,
        "dcp.load": ways.dcp_load,
        "load": ways.load,
        "load, not verified": ways.load_unverified,
    }

    def empty(name: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(ways.folder / saves[name][0], ignore_errors=True)

    found = in_turns({name: save for name, (_, save) in saves.items()}, rounds + 1, 1, dist.barrier, empty)
    found |= in_turns(loads, rounds + 1, 1, dist.barrier)
    seconds = {"async save: wait": ways.waits_s[1:]}
    seconds |= {name: [elapsed for elapsed, _ in times[1:]] for name, times in found.items()}
    return sum(t.numel() * t.element_size() for t in ways.tensors.values()), seconds


def main(processes: Literal[1, 2] = 1, rounds: int = 7, folder: Path | None = None, json: Path | None = None) -> None:
    """folder: where to write; None: the system's temporary folder. json: folder of checkpoint.json."""
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        arguments = (inner, rounds, threads_per_process(processes))
        size, seconds = run_ranks(measure, processes, *arguments, timeout_s=3600)[0]
    against = {
        "save": "dcp.save",
        "save, not hashed": "dcp.save",
        "async save: wait": "save",
        "load": "dcp.load",
        "load, not verified": "dcp.load",
    }
    rows: list[Row] = []
    for way in sorted(seconds, key=lambda name: ("load" in name, name)):
        row: Row = {"method": way, "seconds": seconds[way], "MB/s": [size / 1e6 / value for value in seconds[way]]}
        if way in against:
            other = against[way]
            row = {**row, "speed / other": ratios(seconds[other], seconds[way]), "other": other}
        rows.append(row)
    report("checkpoint", {f"{processes} process(es), {size / 1e6:,.0f} MB": rows}, json)
