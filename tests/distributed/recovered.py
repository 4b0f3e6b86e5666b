"""Interrupted and resumed runs of the program, compared with an undisturbed run bit for bit."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.distributed.program import TRAIN, Program, Starter, start_program
from tests.distributed.resuming import numbers
from titanlite.checkpoint.folder import published_steps, step_folder
from titanlite.tools.audit import __main__ as audit
from titanlite.tools.audit.result import AUDIT_FOLDER, Result, read_results

SETTINGS = ("--checkpoint.enable", "true", "--lr_schedule.decay_steps", "1000")
"""Settings of all compared runs. The learning rate changes at each step and does not depend on training.steps."""
SHORT_STEPS = 40
SPACING = 10
"""Checkpoint interval of the undisturbed run; the steps of compared runs are a multiple of it."""

Rows = Callable[[Path], list[dict[str, Any]]]
Undisturbed = Callable[[int], Path]
"""Number of steps -> dump folder of an undisturbed run on two ranks with at least that many steps."""


def undisturbed_runs(workplace: Path) -> Undisturbed:
    """Undisturbed runs, cached by number of steps. One run of SHORT_STEPS serves all smaller numbers."""
    done: dict[int, Path] = {}

    def run(steps: int) -> Path:
        steps = max(steps, SHORT_STEPS)
        if steps not in done:
            folder = workplace / str(steps)
            folder.mkdir()
            spacing = ("--checkpoint.interval", str(SPACING), "--checkpoint.keep_latest_k", "0")
            program = start_program(folder, *SETTINGS, *spacing, "--training.steps", str(steps), ranks=2)
            try:
                assert program.wait() == 0, program.output
            finally:
                program.close()
            done[steps] = folder / "out"
        return done[steps]

    return run


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read by torch."""
    reader = dcp.FileSystemReader(checkpoint)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # torch warns about loading in one process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def numbers_on_any_mesh(out: Path) -> list[dict[str, Any]]:
    """The numbers of a run with training.bit_equal. The epoch of a source is a rounded sum over the data ranks."""
    return [{key: value for key, value in row.items() if not key.startswith("epoch/")} for row in numbers(out)]


def assert_matches_undisturbed(out: Path, steps: int, undisturbed: Path, rows: Rows = numbers) -> None:
    """Check that the run in `out` ended after `steps` with the rows and tensors of the undisturbed run."""
    assert published_steps(out / "checkpoint")[-1] == steps
    found, expected = (tensors_in(step_folder(folder / "checkpoint", steps)) for folder in (out, undisturbed))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert rows(out) == rows(undisturbed)[:steps]
    assert [row["step"] for row in numbers(out)] == list(range(1, steps + 1))


def starts(output: str) -> list[int]:
    """Steps from which training started, in order; 0 for a new run."""
    found = re.findall(r" Start: (?:step (\d+),|new run)", output)
    return [int(step or 0) for step in found]


def saved_steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r" Saved step (\d+) in", output)]


def trained_steps(output: str) -> list[int]:
    """Steps of all log lines of steps."""
    return [int(step) for step in re.findall(r":\d\d +(\d+)/\d+ ", output)]


def stopped(output: str) -> list[tuple[str, int]]:
    """(signal, step) of each start that a signal stopped."""
    return [(name, int(step)) for name, step in re.findall(r" Stopped by (\w+) after step (\d+)", output)]


def audited(folder: Path) -> list[Result]:
    """Check that one process reproduces all intervals of a run with training.bit_equal, bit for bit; the results."""
    audit.main([str(folder), "--intervals", "0", "--nproc", "1"])
    results = read_results(folder / AUDIT_FOLDER)
    assert {result.verdict for result in results} == {"reproduced"}
    return results


def start_saving(start: Starter, workplace: Path, *arguments: str, **options: object) -> Program:
    """Start a run on two ranks that can be compared. options: arguments of start_program."""
    return start(workplace, *SETTINGS, *arguments, **{"ranks": 2, "program": TRAIN} | options)
