"""Successive starts of a run on forked ranks. Each start runs the entire program: config, build, resume, train.

A start can be interrupted like a kill, by an exception in a step on all ranks. Tests compare its tensors, training
rows, log lines and metrics.jsonl.
"""

import gc
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import tokenizers
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from tests.distributed.gradients import full_tensor
from tests.distributed.program import rows
from tests.distributed.reference import TOKENS, small_config
from tests.pool import run_ranks
from titanlite import train
from titanlite.assembly.job import job_of
from titanlite.assembly.run import Run, build_run, job_locks
from titanlite.batch import FILLER, Batch
from titanlite.metrics.records import Record
from titanlite.metrics.timing import COLUMNS
from titanlite.ranks.distributed import World
from titanlite.ranks.failure import FailureReport
from titanlite.ranks.job_lock import JOB_LOCK_FILE
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log, setup_logging

MACHINE_DEPENDENT = {
    *("tokens_per_second", "step_time_s", "data_time_s", "memory_gib"),
    *("slowest_rank", "slowest_host", "slowest_ratio"),
    *COLUMNS,
}
CORPUS = "corpus.npy"

Numbers = dict[str, str]
"""Tensor name -> hash of the full tensor."""


class KilledError(BaseException):
    """Simulates the end of the process; the program does not handle it."""


@dataclass(frozen=True)
class Start:
    """One start. settings: `section.key=value`. ranks: number of ranks that take part.

    kill: (step, finished microbatches) at which all ranks raise KilledError. run: name of the dump folder. around:
    context of the program. spoil: called with the resumed run before training.
    """

    settings: tuple[str, ...] = ()
    ranks: int = 1
    kill: tuple[int, int] | None = None
    run: str = "run"
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    spoil: Callable[[Run], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of a start. step: step from which it started. lines: log lines of rank 0. error: text of its UserError.

    killed: whether it was interrupted. begin, end: tensors before and after training. rows: step -> row number in the
    run -> hash of its tokens and labels. files: hash of each file in the dump folder after the start.
    """

    step: int
    lines: list[str]
    error: str
    killed: bool
    begin: Numbers
    end: Numbers
    rows: dict[int, dict[int, str]]
    files: dict[str, str]

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def start_runs(folder: Path, starts: Sequence[Start]) -> list[Outcome]:
    """Outcomes of the starts, run one after another in one launch of ranks."""
    if not (folder / CORPUS).exists():
        write_corpus(folder / CORPUS)
    with TemporaryDirectory() as rendezvous:
        by_rank = run_ranks(_starts_on_rank, max(start.ranks for start in starts), str(folder), rendezvous, starts)
    return [_merged([found[n] for found in by_rank if found[n] is not None]) for n in range(len(starts))]


def write_corpus(path: Path, windows: int = 70, seq_len: int = 16) -> None:
    """Write a small corpus: of 16 streams, the first have epochs of 5 steps, the others of 4."""
    np.save(path, np.load(TOKENS)[: windows * seq_len + 1])


def write_text(folder: Path, vocabulary: str = "abcdefghijklmnopqrstuvwxyz ") -> tuple[str, ...]:
    """Write a corpus of texts of very different lengths and a tokenizer of letters; return their settings."""
    letters = {letter: n for n, letter in enumerate(vocabulary)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(5)
    with (folder / "corpus.jsonl").open("w") as file:
        for n in range(60):
            ids = torch.randint(26, (1 + 7 * (n % 9),), generator=generator)
            file.write(json.dumps({"text": "".join("abcdefghijklmnopqrstuvwxyz"[i] for i in ids)}) + "\n")
    return (
        "data.sources.0.kind=jsonl",
        f"data.sources.0.path={folder / 'corpus.jsonl'}",
        f"tokenizer.path={folder / 'tokenizer.json'}",
    )


def numbers(folder: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without times, speeds and memory."""
    return [{key: value for key, value in row.items() if key not in MACHINE_DEPENDENT} for row in rows(folder)]


def checkpoints_of(outcome: Outcome) -> list[str]:
    """Names in the checkpoint folder after the start, from the oldest step to the latest."""
    found = {Path(name).parts[1] for name in outcome.files if Path(name).parts[0] == "checkpoint"}
    return sorted(found, key=lambda name: (int(name.partition("-")[2].partition(".")[0]), name))


def hashes(folder: Path) -> dict[str, str]:
    """Hash of each file below a folder, except the lock."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != JOB_LOCK_FILE]
    return {str(path.relative_to(folder)): xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in paths}


def _merged(by_rank: list[dict[str, Any]]) -> Outcome:
    """Merge the outcomes of all ranks; values reported by several ranks must be equal."""
    steps, errors, kills = ({found[key] for found in by_rank} for key in ("step", "error", "killed"))
    assert len(steps) == len(errors) == len(kills) == 1, by_rank
    begin, end = (_united([found[key] for found in by_rank]) for key in ("begin", "end"))
    handed_out: dict[int, list[dict[str, str]]] = {}
    for found in by_rank:
        for step, rows_of_rank in found["rows"].items():
            handed_out.setdefault(int(step), []).append(rows_of_rank)
    by_step = {step: {int(n): text for n, text in _united(parts).items()} for step, parts in handed_out.items()}
    return Outcome(
        steps.pop(), by_rank[0]["lines"], errors.pop(), kills.pop(), begin, end, by_step, by_rank[0]["files"]
    )


def _united(parts: Sequence[Numbers]) -> Numbers:
    united: Numbers = {}
    for part in parts:
        for name, value in part.items():
            assert united.setdefault(name, value) == value, f"{name} is not the same on all ranks"
    return united


def _starts_on_rank(folder: str, rendezvous: str, starts: Sequence[Start]) -> list[dict[str, Any] | None]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gate = dist.FileStore(f"{rendezvous}/gate", size)
    found: list[dict[str, Any] | None] = []
    for number, start in enumerate(starts):
        _wait_for_all(gate, f"{number}", size)
        if dist.is_initialized():
            dist.destroy_process_group()
        taking_part = rank < start.ranks
        found.append(_start(folder, f"{rendezvous}/store-{number}", rank, start) if taking_part else None)
    _wait_for_all(gate, "end", size)
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{rendezvous}/last-store", size), rank=rank, world_size=size)
    dist.barrier()
    return found


def _wait_for_all(store: dist.Store, name: str, size: int) -> None:
    """Barrier over ranks without a common process group."""
    if store.add(name, 1) == size:
        store.set(f"{name} is reached", "")
    store.wait([f"{name} is reached"])


def _start(folder: str, store: str, rank: int, start: Start) -> dict[str, Any]:
    gc.freeze()  # the loop of an earlier start has unfrozen all objects, and this one would visit them again
    lines = _Lines()
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

    def train_and_record(*args: Any) -> Record | None:
        record = original_train(*args)
        found["end"] = tensors(runs[0])
        return record

    original_train = train.train
    try:
        with start.around(), patch.object(train, "build_run", build), patch.object(train, "train", train_and_record):
            config = small_config(
                start.ranks,
                *(f"job.dump_folder={folder}/{start.run}", f"data.sources.0.path={folder}/{CORPUS}"),
                *("checkpoint.enable=true", "checkpoint.interval=2", "metrics.log_freq=1"),
                *("training.steps=8", "training.local_batch_size=8", "training.max_norm=1.0"),
                *("optimizer.name=AdamW", "optimizer.lr=1e-2", "lr_schedule.warmup_steps=3"),
                *start.settings,
            )
            world = World(rank, rank, start.ranks, "cpu")
            with job_locks(config, world, {}, log.error):
                connection = dist.FileStore(store, start.ranks)
                train.run_job(job_of(config, world.size), world, connection, FailureReport(), {}, ExitStack())
    except UserError as error:
        found["error"] = str(error)
    except KilledError:
        found["killed"] = True
    finally:
        log.removeFilter(lines)
        for run in runs:
            run.loader.close()
    return found | {"lines": lines.lines, "files": hashes(Path(folder, start.run)) if rank == 0 else {}}


def tensors(run: Run) -> Numbers:
    """Hashes of parameters, their average and optimizer state, and positions of this rank's streams. A collective."""
    named = [(name, p.detach()) for part in run.trainer.model_parts for name, p in part.named_parameters()]
    named += [(f"{name} in the optimizer", tensor) for name, tensor in run.trainer.optimizer.named_state()]
    named += [(f"{name} in the average", tensor) for name, tensor in run.trainer.average.tensors.items()]
    positions = {
        f"stream {n}": str(row) for n, row in zip(run.loader.stream_ids, run.loader.state().tolist(), strict=True)
    }
    return {name: _hash(full_tensor(tensor)) for name, tensor in named} | positions


def _hash(tensor: Tensor) -> str:
    """Hash of the bits, with shape and dtype."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return f"{tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(flat.numpy().tobytes())}"


def _watch(run: Run, start: Start, trained: dict[int, dict[int, str]]) -> None:
    """Record the training rows, and raise KilledError at `start.kill`."""
    next_step, forward_backward = run.loader.next_step, run.trainer.forward_backward
    done = 0

    def recorded_next_step() -> list[Batch]:
        nonlocal done
        batches = next_step()
        done = 0
        trained[run.trainer.step + 1] = {
            n: _hash(torch.stack([batch.tokens[row], batch.labels[row]]))
            for batch in batches
            for row, n in enumerate(batch.sequences.tolist())
            if n != FILLER
        }
        return batches

    def interrupted_forward_backward(batch: Batch, num_valid: Tensor) -> Tensor:
        nonlocal done
        if start.kill == (run.trainer.step, done):
            raise KilledError
        share = forward_backward(batch, num_valid)
        done += 1
        if start.kill == (run.trainer.step, done):
            raise KilledError
        return share

    run.loader.next_step = recorded_next_step  # type: ignore[method-assign]
    run.trainer.forward_backward = interrupted_forward_backward  # type: ignore[method-assign]


class _Lines(logging.Filter):
    """Record all log lines and pass them on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.lines.append(record.getMessage())
        return True
