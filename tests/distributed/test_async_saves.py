"""Saves beside training: of the values at their step, from buffers that are used again, one at a time, never lost."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.distributed.file_operations import watch
from tests.distributed.forked import Parent, fork_ranks
from tests.distributed.standin import Run, StandIn, start_in
from titanlite.checkpoint import saver as saver_module
from titanlite.checkpoint.manifest import Branch, Manifest
from titanlite.checkpoint.saver import Retention, Saver
from titanlite.checkpoint.state import STREAMS, local_part
from titanlite.checkpoint.storage import FileRecord
from titanlite.config.schema import JobConfig
from titanlite.runtime.failure import FailureReport
from titanlite.train import fit


def gate_before_shards(root: Path) -> threading.Event:
    """Before a shard is written its thread waits for this."""
    gate = threading.Event()

    def wait(operation: str, name: str, descriptor: int) -> None:  # noqa: ARG001
        if operation == "create" and name.endswith(".distcp"):
            assert gate.wait(60)

    watch(root, wait)
    return gate


def change_while_saving(folder: Path) -> str:
    gate = gate_before_shards(folder)
    run = Run(folder, async_mode="async")
    run.state.become(1, "a")
    run.checkpoints.after_step(1, False)
    run.state.become(2, "a")
    published = (folder / "step-1").exists()
    gate.set()
    run.checkpoints.close()
    return "published before its time" if published else ""


def changed_while_saving(folder: Path) -> Any:
    ends = fork_ranks(change_while_saving, 2, folder)
    return [[end.result, end.error] for end in ends], start_in([folder])


def test_what_is_saved_is_what_was_there_when_the_save_began(parent: Parent, tmp_path: Path) -> None:
    ends, ((one, other),) = parent(changed_while_saving, tmp_path)
    assert ends == [["", None]] * 2
    assert (one["step"], one["branch"]) == (other["step"], other["branch"]) == (1, "a")


def note_saves(note: Callable[[Mapping[str, Tensor]], None]) -> None:
    """Calls it with what each save writes, when it does, and again with nothing when it has."""
    original = saver_module.save_tensors

    def noting(
        folder: Path, tensors: Mapping[str, Tensor], local: Mapping[str, Tensor], group: dist.ProcessGroup
    ) -> dict[str, FileRecord]:
        note(local)
        records = original(folder, tensors, local, group)
        note({})
        return records

    saver_module.save_tensors = noting


def places_of_saves(folder: Path) -> list[list[int]]:
    """Where in memory each of four saves lies, and training's own values last."""
    places: list[list[int]] = []
    note_saves(lambda local: places.append([tensor.data_ptr() for tensor in local.values()]) if local else None)
    run = Run(folder, async_mode="async")
    run.train("a", 4)
    return [*places, [local_part(tensor).data_ptr() for tensor in run.state.model_and_optimizer().values()]]


def fork_places(folder: Path) -> list[list[list[int]]]:
    return [end.result for end in fork_ranks(places_of_saves, 2, folder)]


def test_the_buffers_of_the_first_save_are_those_of_all(parent: Parent, tmp_path: Path) -> None:
    for *saves, training in parent(fork_places, tmp_path):
        assert len(saves) == 4
        assert saves[1:] == saves[:-1]
        assert not set(saves[0]) & set(training)


def crowded_saves(folder: Path) -> int:
    """How many of six saves, begun as fast as possible, were ever under way at once."""
    under_way, most = 0, 0

    def note(local: Mapping[str, Tensor]) -> None:
        nonlocal under_way, most
        under_way += 1 if local else -1
        most = max(most, under_way)
        time.sleep(0.02)

    note_saves(note)
    group = dist.group.WORLD
    assert group is not None
    saver = Saver(folder, group, "async", Retention(0, 0, frozenset()))
    state = StandIn()
    for step in range(1, 7):
        state.become(step, "a")
        tensors = state.model_and_optimizer() | {STREAMS: state.streams(group)}
        saver.begin(Manifest(step, "full", (Branch("a", 0),), asdict(state.state()), {}, {}, {}, "", {}), tensors)
    assert saver.take_failure() is None
    return most


def fork_crowded(folder: Path) -> Any:
    return [end.result for end in fork_ranks(crowded_saves, 2, folder)], start_in([folder])


def test_at_most_one_save_is_under_way(parent: Parent, tmp_path: Path) -> None:
    most, ((one, other),) = parent(fork_crowded, tmp_path)
    assert most == [1, 1]
    assert (one["step"], one["branch"]) == (other["step"], other["branch"]) == (6, "a")
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{step}" for step in range(1, 7)}


def ways_out(folder: Path) -> list[list[str]]:
    """What stands in the folder when training is left while its save waits: by its end, by an exception."""
    gate = gate_before_shards(folder)
    found = []
    for number, error in enumerate((None, KeyboardInterrupt())):
        gate.clear()
        own = folder / f"{number}"
        run = Run(own, async_mode="async")
        trainer = SimpleNamespace(fit=partial(one_step, run, gate, error))
        of_the_job = dict.fromkeys(("loader", "meter", "sinks", "groups", "ledger", "validation"))
        job = SimpleNamespace(
            trainer=trainer, checkpoints=run.checkpoints, stop=SimpleNamespace(activate=lambda: None), **of_the_job
        )
        with suppress(KeyboardInterrupt):
            fit(JobConfig(), job, FailureReport())  # type: ignore[arg-type]
        found.append(sorted(path.name for path in own.iterdir()))
        dist.barrier()
    return found


def one_step(
    run: Run,
    gate: threading.Event,
    error: BaseException | None,
    *_: Any,
    after_step: Callable[[int, bool], bool],
    **settings: Any,  # noqa: ARG001
) -> None:
    run.state.become(1, "a")
    after_step(1, False)
    threading.Timer(0.2, gate.set).start()
    if error is not None:
        raise error


def fork_ways_out(folder: Path) -> Any:
    ends = fork_ranks(ways_out, 2, folder)
    return [[end.result, end.error] for end in ends]


def test_a_save_under_way_is_finished_on_the_way_out(parent: Parent, tmp_path: Path) -> None:
    for found, error in parent(fork_ways_out, tmp_path):
        assert error is None
        assert found == [["step-1"], ["step-1"]]
