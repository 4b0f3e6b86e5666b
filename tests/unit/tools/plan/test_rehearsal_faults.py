"""What a rehearsal says of programs with mistakes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.measuring import configuration
from titanlite.assembly.job import job_of
from titanlite.models.layers import FeedForward
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.runtime.errors import ConfigError
from titanlite.tools.plan import __main__ as plan
from titanlite.tools.plan.rehearsal.__main__ import described
from titanlite.tools.plan.rehearsal.rank import rehearse, shortened
from titanlite.tools.plan.rehearsal.ranks import chosen_ranks, chosen_stages, require_rehearsable
from titanlite.tools.plan.rehearsal.report import describe_rehearsal, problems_of

TINY = (
    *("model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=2", "model.ffn_dim=64"),
    *("model.vocab_size=300", "model.max_seq_len=32", "training.seq_len=32", "training.local_batch_size=1"),
    *("training.global_batch_size=4", "training.steps=2"),
)


def found_on(*ranks: int, world_size: int = 2) -> dict[int, Any]:
    config = configuration(TINY, world_size, "cuda")
    return {rank: json.loads(json.dumps(described(rehearse(config, world_size, rank)))) for rank in ranks}


def of_host(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[-1])


def read(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def moved(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[-1]).to(x.device) + torch.ones(x.shape[-1], device=x.device) * torch.tensor(2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (of_host, "test_rehearsal_faults.py mixes tensors of the host with those of the device"),
        (read, "plan/test_rehearsal_faults.py reads values of the device 2 times in a step"),
        (moved, None),
    ],
)
def test_modules_that_leave_the_device(change: Any, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FeedForward.forward
    monkeypatch.setattr(FeedForward, "forward", lambda module, x: forward(module, change(x)))
    problems = problems_of(found_on(0), 2, 1, 80.0)
    if expected is None:
        assert problems == []
    else:
        (problem,) = problems
        assert expected in problem


@pytest.mark.slow
def test_a_collective_of_one_rank_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FeedForward.forward

    def shared(module: FeedForward, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(3, device=x.device))
        return forward(module, x)

    monkeypatch.setattr(FeedForward, "forward", shared)
    problems = problems_of(found_on(0, 1), 2, 1, 80.0)
    (waits,) = (problem for problem in problems if "wait" in problem)
    assert waits.startswith("ranks 0 and 1 of one stage call different collectives: number ")
    assert "all-reduce of 12 bytes on rank 1" in waits


COLLECTIVE = {"axis": "tp", "operation": "all-gather", "calls": 4, "bytes": 400}
OF_OWNERS = {"axis": "dp_shard x tp", "operation": "all-to-all"}
FOUND: dict[str, Any] = {
    "microbatches": 2,
    "microbatches_of_the_job": 8,
    "peak_bytes": 50 * 2**30,
    "groups": {"dp_shard": 4, "tp": 2},
    "further_bytes": 2 * 2**30,
    "planned_peak_bytes": 50 * 2**30,
    "bytes": {"parameters": 20 * 2**30, "head": 10 * 2**30, "activations": 20 * 2**30},
    "planned_bytes": {"parameters": 20 * 2**30, "activations": 30 * 2**30},
    "collectives": [{**COLLECTIVE, "planned_calls": 4, "planned_bytes": 400}],
    "order": [["tp", "all-gather", 100]] * 4,
    "host_reads": {"parallel/expert.py": 3},
    "mixed_devices": {},
    "saved_tensors": 3,
    "saved_bytes": 2**30,
    "start": {
        "requests": 55,
        "planned_requests": 55,
        "keys": 71,
        "data_files": 3,
        "token_files": 2,
        "opens": 11,
        "planned_opens": 10,
    },
    "cpu_s": 9,
    "resident_mib": 400,
}


@pytest.mark.parametrize(
    ("changes", "gib", "expected"),
    [
        ({}, 80, None),
        ({}, 48, "does not fit: 52.0 GiB at its peak, 43.2 GiB usable of a device of 48 GiB"),
        (
            {"collectives": [{**COLLECTIVE, "planned_calls": 2, "planned_bytes": 200}]},
            80,
            "tp all-gather: 4 calls of 400 bytes in all, planned 2 of 200: a layer gathers",
        ),
        (
            {"peak_bytes": 60 * 2**30, "bytes": {**FOUND["bytes"], "head": 20 * 2**30}},
            80,
            "keeps 60.00 GiB at its peak, planned 50.00: the largest difference is activations, 40.00 GiB in place of",
        ),
        ({"planned_peak_bytes": None, "peak_bytes": 60 * 2**30}, 80, None),
        ({"collectives": [{**COLLECTIVE, **OF_OWNERS, "planned_calls": 4, "planned_bytes": 500}]}, 80, None),
        (
            {"collectives": [{**COLLECTIVE, **OF_OWNERS, "planned_calls": 4, "planned_bytes": 300}]},
            80,
            "dp_shard x tp all-to-all: 4 calls of 400 bytes in all, planned 4 of 300: a layer",
        ),
    ],
)
def test_problems_of_a_rank(changes: dict[str, Any], gib: float, expected: str | None) -> None:
    problems = problems_of({5: FOUND | changes}, 8, 1, gib)
    if expected is None:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"rank 5: {expected}")


def test_an_error_of_the_program_is_named_with_its_place() -> None:
    found = {0: {"error": "RuntimeError: shapes", "place": "mine/plugin.py:7"}, 3: FOUND}
    assert problems_of(found, 8, 1, 80) == ["rank 0: the program ends with RuntimeError: shapes (at mine/plugin.py:7)"]


def test_owners_exchange_different_numbers_of_bytes() -> None:
    found = {
        rank: FOUND | {"order": [["dp_shard x tp", "all-to-all", size], ["tp", "all-gather", 100]]}
        for rank, size in ((0, 100), (7, 50))
    }
    assert problems_of(found, 8, 1, 80) == []
    found[7]["order"][1][2] = 50
    assert len(problems_of(found, 8, 1, 80)) == 1


def test_the_report_has_equal_ranks_once() -> None:
    of_other = FOUND | {"start": FOUND["start"] | {"requests": 17, "keys": 1, "data_files": 0}, "cpu_s": 8}
    text = describe_rehearsal({0: {0: FOUND, 7: of_other}}, 8, 80.0, 12.3, 0.5)
    assert "Rehearsed: ranks 0, 7 of 8, on tensors without data, in 12 s" in text
    assert "Rank 0: a step of 2 microbatches (of 8: the others repeat them); peak 50.00 GiB + 2.00 of" in text
    assert "the others, fits into a device of 80 GiB" in text
    assert re.search(r"activations +30.000 +30.000\n +of them, the head +10.000 *\n", text)
    assert text.count("tp all-gather") == 1
    assert "process groups: dp_shard 4, tp 2\n" in text
    assert "Start: 16 connections to the TCPStore" in text
    assert (
        "start: 55 requests to the TCPStore for 71 keys; 3 data files here; 2 token files opened 11 times (plan" in text
    )
    assert "Rank 7: as rank 0\n  start: 17 requests (planned 55) to the TCPStore for 1 key; no data files here" in text
    assert "Expected: 0.5 s per step" in text
    assert "Training stage" not in text
    of_stages = describe_rehearsal({1: {0: FOUND}, 0: {0: FOUND}}, 8, 80.0, 12.3, None)
    assert of_stages.index("Training stage 2:\n") < of_stages.index("Training stage 1:\n")
    assert "Expected" not in of_stages


@pytest.mark.parametrize(
    ("ranks", "degrees", "most", "expected"),
    [
        (1, {}, None, [0]),
        (4, {}, 0, [0, 3]),
        (16, {"pp": 4}, None, [0, 12, 15]),
        (16, {"pp": 4}, 2, [0, 8, 12, 15]),
        (8, {"pp": 2, "ep": 2}, 0, [0, 3, 4, 7]),
    ],
)
def test_chosen_ranks(ranks: int, degrees: dict[str, int], most: int | None, expected: list[int]) -> None:
    plan: Any = None if most is None else SimpleNamespace(largest=SimpleNamespace(pp_rank=most))
    assert chosen_ranks(ranks, ParallelismConfig(**degrees), plan) == expected


def test_stages_of_training_that_differ_in_shape() -> None:
    """Only the last one repeats another one: its further microbatches are not rehearsed."""
    stages = ({"seq_len": 16}, {"seq_len": 32}, {"global_batch_size": 16}, {"global_batch_size": 32})
    rows = [
        f"training.stages.{number}.{key}={value}"
        for number, stage in enumerate(stages)
        for key, value in {"from_step": number + 2, **stage}.items()
    ]
    config = configuration([*TINY, "training.steps=9", *rows], 4, "cuda")
    assert chosen_stages(config, 4, 3) == [3, 0, 1]


def test_what_only_the_compiler_does_is_refused() -> None:
    config = configuration(TINY, 2, "cuda")
    require_rehearsable(config)
    config = replace(config, activation_checkpoint=replace(config.activation_checkpoint, mode="memory_budget"))
    with pytest.raises(ConfigError, match=r"activation_checkpoint\.mode = 'memory_budget'"):
        require_rehearsable(config)


@pytest.mark.parametrize(
    ("settings", "microbatches"),
    [
        (("training.global_batch_size=64",), (2, 16)),
        (("training.global_batch_size=4",), (1, 1)),
        (("training.global_batch_size=64", "parallelism.pp=2", "model.n_layers=2"), (4, 32)),
    ],
)
def test_long_steps_are_shortened(settings: tuple[str, ...], microbatches: tuple[int, int]) -> None:
    job = job_of(configuration([*TINY, *settings], 4, "cuda"), 4)
    assert (shortened(job, 4).step.microbatches, job.step.microbatches) == microbatches


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.main([*command(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    (stage,) = found["stages"].values()
    assert stage["1"]["peak_bytes"] > 0
    assert stage["1"]["start"]["data_files"] == 1


def command(folder: Path) -> list[str]:
    """The arguments of a rehearsal of rank 1 of 2, on texts in the folder."""
    (folder / "text.txt").write_text("text\n")
    source = ("--data.sources.0.kind=text", f"--data.sources.0.path={folder}/text.txt")
    return ["quickstart", "--world-size=2", "--rehearse", "--rank=1", *(f"--{each}" for each in TINY), *source]


def test_options_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as error:
        plan.main(["quickstart", "--world-size", "2", "--rank", "2", "--json", "--device", "cpu"])
    assert [problem.key for problem in error.value.problems] == ["--rank", "--json", "--rank"]
