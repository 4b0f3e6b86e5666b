"""Optimizers: time and bytes of an update by number of ranks.

The first table times `step_if` for the quick start's model, after a step on random tokens, with one thread per rank on
gloo. All optimizers of a layout take turns in the same processes, in an order that alternates. Ranks share the cores of
the machine: with more ranks than cores, "time" is mostly waiting for a core, and "CPU" is what an update costs a rank.
"CPU" and bytes are those of the rank with the most. Bytes to and from other ranks are counted in every collective of an
update; an all-gather over n ranks sends a rank's part n - 1 times, and in a broadcast, n ranks pass the message on to
one another, each (n - 1) / n of it.

"Muon, gathered" is a reference without owners: every rank gathers every matrix over the shards and orthogonalizes it.
The second table divides its figures by those of Muon. Replicas have all matrices already: there, the reference sends
nothing and every rank orthogonalizes everything.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measuring import MIB, Row, build, configuration, in_turns, ratios, report
from titanlite.optim import muon as muon_module
from titanlite.optim.owners import Matrix, Owners
from titanlite.ranks.launch import run_ranks
from titanlite.trainer import Trainer

Layout = Literal["dp_shard=1", "dp_shard=2", "dp_shard=4", "dp_shard=8", "dp_replicate=2", "dp_replicate=4", "tp=2"]
"""The axis of the mesh with several ranks."""
SEQUENCES = 8
STEP = ("model.vocab_size=4096", f"training.global_batch_size={SEQUENCES}", "training.seq_len=32")
GATHERED = "Muon, gathered"
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "AdamW": (),
    "AdamW, bfloat16 moments": ("optimizer.state_dtype=bfloat16",),
    "Lion": ("optimizer.name=Lion",),
    "SGD with momentum": ("optimizer.name=SGD", "optimizer.momentum=0.9"),
    "Muon": ("optimizer.name=Muon",),
    GATHERED: ("optimizer.name=Muon",),
}
"""Optimizer -> its settings."""


class Gathered(Owners):
    """Every rank gathers each matrix over the shards and calls the function on it, in place of one owner."""

    def apply(
        self,
        part: Callable[[Matrix], Tensor],
        function: Callable[[Tensor], Tensor],
        use: Callable[[Matrix, Tensor], None],
        dtype: torch.dtype,
    ) -> None:
        for matrix in (matrix for matrices in self.rounds for matrix in matrices):
            division = matrix.division
            sizes = [division.size(rank) for rank in range(self.size)]
            padded = torch.zeros(max(sizes), dtype=dtype)
            if sizes[self.rank]:
                padded[: sizes[self.rank]] = part(matrix).reshape(-1)
            gathered = [padded]
            if self._groups.shards is not None:
                gathered = [torch.empty_like(padded) for _ in sizes]
                dist.all_gather(gathered, padded, group=self._groups.shards)
            full = padded.new_empty(matrix.shape)
            for sender in division.senders:
                place = full[division.parts[sender]]
                place.copy_(gathered[sender][: sizes[sender]].view_as(place))
            result = function(full)
            own = division.parts[self.rank]
            if own is not None:
                use(matrix, result[own])


class Traffic(TorchDispatchMode):
    """Counts the bytes that the collectives of this rank send to other ranks and receive from them.

    Raises NotImplementedError for collectives that no optimizer uses.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent, self.received = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name(), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[Any]) -> None:
        if name == "c10d::alltoall_base_":
            output, tensor, group, received, sent = args[:5]
            rank = dist.ProcessGroup.unbox(group).rank()
            self.sent += (sum(sent) - sent[rank]) * tensor.itemsize
            self.received += (sum(received) - received[rank]) * output.itemsize
        elif name == "c10d::allgather_":
            (tensor,), group = args[1:3]
            others = dist.ProcessGroup.unbox(group).size() - 1
            self.sent += others * tensor.nbytes
            self.received += others * tensor.nbytes
        elif name == "c10d::broadcast_":
            (tensor,), group, root = args[:3]
            group = dist.ProcessGroup.unbox(group)
            self.sent += tensor.nbytes * (group.size() - 1) // group.size()
            self.received += tensor.nbytes * (group.rank() != root)
        else:
            raise NotImplementedError(f"count the bytes of {name}")


def settings_of(layout: Layout, settings: Sequence[str]) -> tuple[int, list[str]]:
    """(number of ranks, all settings). settings: of the model."""
    axis, _, degree = layout.partition("=")
    data_ranks = 1 if axis == "tp" else int(degree)
    batch = f"training.local_batch_size={SEQUENCES // data_ranks}"
    return int(degree), [*STEP, batch, "parallelism.dp_shard=1", f"parallelism.{layout}", *settings]


def build_trainers(settings: Sequence[str]) -> dict[str, Trainer]:
    """A trainer with each optimizer, after a step."""
    trainers = {}
    for name, own in OPTIMIZERS.items():
        with patch.object(muon_module, "Owners", Gathered if name == GATHERED else Owners):
            trainers[name], batches = build(configuration([*settings, *own], dist.get_world_size()))
        trainers[name].train_step(batches)
    return trainers


def measure(settings: Sequence[str], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
    """By optimizer: (elapsed seconds, CPU seconds) of an update of this rank in each round; bytes sent and received."""
    sides, found = {}, {}
    for name, trainer in build_trainers(settings).items():
        sides[name] = partial(trainer.optimizer.step_if, torch.tensor(True))
        with Traffic() as traffic:
            sides[name]()
        found[name] = {"sent": traffic.sent, "received": traffic.received}
    for name, times in in_turns(sides, rounds, steps, dist.barrier).items():
        found[name]["seconds"] = times
    return found


def update_rows(layout: Layout, rounds: int, steps: int, settings: Sequence[str]) -> tuple[list[Row], Row]:
    """The rows of a layout of the first table, and its row of the second one."""
    world_size, keys = settings_of(layout, settings)
    ranks = run_ranks(measure, world_size, keys, rounds, steps, timeout_s=3600)
    cpu, sent, received = {}, {}, {}
    rows: list[Row] = []
    for name in OPTIMIZERS:
        of_ranks = [rank[name] for rank in ranks]
        elapsed = [seconds for seconds, _ in of_ranks[0]["seconds"]]
        by_round = zip(*(of_rank["seconds"] for of_rank in of_ranks), strict=True)
        cpu[name] = [max(seconds for _, seconds in times) for times in by_round]
        sent[name], received[name] = (max(of_rank[key] for of_rank in of_ranks) for key in ("sent", "received"))
        rows.append(
            {
                "layout": layout,
                "optimizer": name,
                "time (ms)": [1000 * value for value in elapsed],
                "CPU (ms)": [1000 * value for value in cpu[name]],
                "sent (MiB)": sent[name] / MIB,
                "received (MiB)": received[name] / MIB,
            }
        )
    savings: dict[str, str | float | Sequence[float]] = {"layout": layout, "CPU": ratios(cpu[GATHERED], cpu["Muon"])}
    if sent["Muon"]:
        savings["sent"] = sent[GATHERED] / sent["Muon"]
        savings["received"] = received[GATHERED] / received["Muon"]
    return rows, savings


def main(
    layouts: tuple[Layout, ...] = get_args(Layout),
    rounds: int = 5,
    steps: int = 2,
    settings: tuple[str, ...] = (),
    json: Path | None = None,
) -> None:
    """settings: of the model, such as model.n_layers=2. json: folder of optimizers.json."""
    found = [update_rows(layout, rounds, steps, settings) for layout in layouts]
    tables = {
        "An update, of the rank with the most": [row for rows, _ in found for row in rows],
        "Muon that gathers every matrix on every rank / Muon": [savings for _, savings in found],
    }
    report("optimizers", tables, json)
