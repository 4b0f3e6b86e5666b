"""Several starts of a run on forked ranks, one after the other, each a whole program: config, build, resume, fit.

A start may end early as by a kill: an exception in the middle of a step, on all ranks. What the run leaves is looked at
from outside the trainer: the tensors on its ranks, the rows that it was given, its log lines, metrics.jsonl.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tests.distributed.gradients import replaced, whole
from tests.distributed.program import rows
from tests.distributed.reference import TOKENS, small_config
from tests.pool import run_ranks
from titanlite import train
from titanlite.assembly.run import Run, build_run
from titanlite.batch import Batch
from titanlite.metrics.meter import Record
from titanlite.runtime.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.runtime.failure import FailureReport
from titanlite.runtime.job_lock import JOB_LOCK_FILE, job_lock
from titanlite.runtime.logging import log, setup_logging

OF_THE_CLOCK = {"tokens_per_second", "step_time_s", "data_time_s", "memory_gib"}
CORPUS = "corpus.npy"

Numbers = dict[str, str]
"""Name of a tensor -> a hash of its values, the whole of it whatever the mesh."""


class KilledError(BaseException):
    """Stands for the end of the process: nothing handles it."""


@dataclass(frozen=True)
class Start:
    """One start. settings: `section.key=value`. ranks: those after the first so many are left out.

    kill: (step, microbatches done) at which all ranks end. run: name of the dump folder. around: what is different
    about the program. spoil: called with the built and resumed run, before it trains.
    """

    settings: tuple[str, ...] = ()
    ranks: int = 1
    kill: tuple[int, int] | None = None
    run: str = "run"
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    spoil: Callable[[Run], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """step: at which it started. said: log lines of rank 0. error: what it told the user. killed: whether it was.

    begin, end: tensors before and after training. rows: of each step, what was trained on: the row's number in the run
    -> a hash of its tokens and labels. files: a hash of each file of the dump folder, as it was left.
    """

    step: int
    said: list[str]
    error: str
    killed: bool
    begin: Numbers
    end: Numbers
    rows: dict[int, dict[int, str]]
    files: dict[str, str]

    def says(self, text: str) -> bool:
        return any(text in line for line in self.said)


def start_runs(folder: Path, starts: Sequence[Start]) -> list[Outcome]:
    """What came of each start, in one launch of ranks."""
    if not (folder / CORPUS).exists():
        write_corpus(folder / CORPUS)
    with TemporaryDirectory() as meeting:
        by_rank = run_ranks(_starts_on_rank, max(start.ranks for start in starts), str(folder), meeting, starts)
    return [_merged([found[n] for found in by_rank if found[n] is not None]) for n in range(len(starts))]


def write_corpus(path: Path, windows: int = 70, seq_len: int = 16) -> None:
    """Small: of 16 streams the first have an epoch of 5 steps, the others one of 4."""
    np.save(path, np.load(TOKENS)[: windows * seq_len + 1])


def numbers(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl but for what the clock and the machine say."""
    return [{key: value for key, value in row.items() if key not in OF_THE_CLOCK} for row in rows(folder)]


def checkpoints_of(outcome: Outcome) -> list[str]:
    """Names in the checkpoint folder that it has left, from the oldest step to the newest."""
    found = {Path(name).parts[1] for name in outcome.files if Path(name).parts[0] == "checkpoint"}
    return sorted(found, key=lambda name: (int(name.partition("-")[2].partition(".")[0]), name))


def hashes(folder: Path) -> dict[str, str]:
    """Of all files below a folder but for the lock."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != JOB_LOCK_FILE]
    return {str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}


def _merged(by_rank: list[dict[str, Any]]) -> Outcome:
    """Of all ranks: what several of them know has to be the same."""
    steps, errors, kills = ({found[key] for found in by_rank} for key in ("step", "error", "killed"))
    assert len(steps) == len(errors) == len(kills) == 1, by_rank
    begin, end = (_united([found[key] for found in by_rank]) for key in ("begin", "end"))
    handed_out: dict[int, list[dict[str, str]]] = {}
    for found in by_rank:
        for step, given in found["rows"].items():
            handed_out.setdefault(int(step), []).append(given)
    by_step = {step: {int(n): text for n, text in _united(given).items()} for step, given in handed_out.items()}
    return Outcome(steps.pop(), by_rank[0]["said"], errors.pop(), kills.pop(), begin, end, by_step, by_rank[0]["files"])


def _united(parts: Sequence[Numbers]) -> Numbers:
    united: Numbers = {}
    for part in parts:
        for name, value in part.items():
            assert united.setdefault(name, value) == value, f"{name} is not the same on all ranks"
    return united


def _starts_on_rank(folder: str, meeting: str, starts: Sequence[Start]) -> list[dict[str, Any] | None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gate = dist.FileStore(f"{meeting}/gate", size)
    found: list[dict[str, Any] | None] = []
    for number, start in enumerate(starts):
        _wait_for_all(gate, f"{number}", size)
        if dist.is_initialized():
            dist.destroy_process_group()
        taking_part = rank < start.ranks
        found.append(_start(folder, f"{meeting}/store-{number}", rank, start) if taking_part else None)
    _wait_for_all(gate, "end", size)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{meeting}/last-store", size), rank=rank, world_size=size)
    dist.barrier()
    return found


def _wait_for_all(store: dist.Store, name: str, size: int) -> None:
    """Like a barrier, but of ranks that share no process group."""
    if store.add(name, 1) == size:
        store.set(f"{name} is reached", "")
    store.wait([f"{name} is reached"])


def _start(folder: str, store: str, rank: int, start: Start) -> dict[str, Any]:
    lines, failure = _Lines(), FailureReport()
    failure.store = dist.FileStore(store, start.ranks)
    setup_logging(rank)
    log.addFilter(lines)
    found: dict[str, Any] = {"step": -1, "error": "", "killed": False, "begin": {}, "end": {}, "rows": {}}
    runs: list[Run] = []

    def build(*args: Any) -> Run:
        run = build_run(*args)
        runs.append(run)
        found["step"], found["begin"] = run.trainer.step, tensors(run)
        if start.spoil is not None:
            start.spoil(run)
        _watch(run, start, found["rows"])
        return run

    def train_and_look(*args: Any) -> Record | None:
        record = train_to_the_end(*args)
        found["end"] = tensors(runs[0])
        return record

    train_to_the_end = train.train
    try:
        with start.around(), replaced(train, "build_run", build), replaced(train, "train", train_and_look):
            config = small_config(
                start.ranks,
                *(f"job.dump_folder={folder}/{start.run}", f"data.sources.0.path={folder}/{CORPUS}"),
                *("checkpoint.enable=true", "checkpoint.interval=2", "metrics.log_freq=1"),
                *("training.steps=8", "training.local_batch_size=4", "training.max_norm=1.0"),
                *("optimizer.name=AdamW", "optimizer.lr=1e-2", "lr_schedule.warmup_steps=3"),
                *start.settings,
            )
            with job_lock(config.job.dump_folder, rank, take_over=False, environment={}):
                train.run_job(config, World(rank, rank, start.ranks, "cpu"), failure, {})
    except UserError as error:
        found["error"] = str(error)
    except KilledError:
        found["killed"] = True
    finally:
        log.removeFilter(lines)
        for run in runs:
            run.loader.close()
    return found | {"said": lines.lines, "files": hashes(Path(folder, start.run)) if rank == 0 else {}}


def tensors(run: Run) -> Numbers:
    """Parameters, optimizer state and the places of this rank's streams. A collective."""
    named = [(name, p.detach()) for part in run.trainer.model_parts for name, p in part.named_parameters()]
    named += [(f"{name} in the optimizer", tensor) for name, tensor in run.trainer.optimizer.named_state()]
    places = {
        f"stream {n}": str(row) for n, row in zip(run.loader.stream_ids, run.loader.state().tolist(), strict=True)
    }
    return {name: _hash(whole(tensor)) for name, tensor in named} | places


def _hash(tensor: Tensor) -> str:
    """Of its bits, shape and dtype."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())}"


def _watch(run: Run, start: Start, given: dict[int, dict[int, str]]) -> None:
    """Notes what is trained on, and kills."""
    next_step, forward_backward = run.loader.next_step, run.trainer.forward_backward
    done = 0

    def noted_next_step() -> list[Batch]:
        nonlocal done
        batches = next_step()
        done = 0
        given[run.trainer.step + 1] = {
            n: _hash(torch.stack([batch.tokens[row], batch.labels[row]]))
            for batch in batches
            for row, n in enumerate(batch.sequences.tolist())
        }
        return batches

    def mortal_forward_backward(batch: Batch, num_valid: Tensor) -> Tensor:
        nonlocal done
        if start.kill == (run.trainer.step, done):
            raise KilledError
        share = forward_backward(batch, num_valid)
        done += 1
        if start.kill == (run.trainer.step, done):
            raise KilledError
        return share

    run.loader.next_step = noted_next_step  # type: ignore[method-assign]
    run.trainer.forward_backward = mortal_forward_backward  # type: ignore[method-assign]


class _Lines(logging.Filter):
    """Keeps what is logged, and lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True
