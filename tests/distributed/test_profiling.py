"""Profiling of runs: traces on two ranks, unchanged numbers, regions of a pipeline, and the command."""

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.distributed.gradients import build_on_mesh
from tests.distributed.program import CONFIG, Starter, rows, start_command
from tests.distributed.reference import global_batch, rank_batches, small_config
from tests.pool import run_ranks
from titanlite.profiling.regions import REGIONS
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import UserError
from titanlite.tools.profile import output_folder

TRACE = ("--profiling.enable_trace", "--profiling.wait", "1", "--profiling.warmup", "1", "--profiling.active", "2")


def regions_of(file: Path) -> Counter[str]:
    """Number of events of each region, and of steps, in a trace."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = [event["name"].partition("#")[0] for event in events if event.get("cat") == "user_annotation"]
    return Counter(name for name in names if name in (*REGIONS, "ProfilerStep"))


@pytest.mark.slow
def test_a_trace_of_each_rank_does_not_change_the_run(tmp_path: Path, start: Starter) -> None:
    """Two steps of two microbatches."""
    found = {}
    for name, arguments in {"traced": (*TRACE, "--profiling.ranks", "[0, 1]"), "plain": ()}.items():
        (tmp_path / name).mkdir()
        batch = ("--parallelism.dp_shard", "2", "--training.local_batch_size", "4")
        start(tmp_path / name, *batch, *arguments, ranks=2).succeed()
        found[name] = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / name / "out")]
    assert found["traced"] == found["plain"]
    traces = sorted((tmp_path / "traced" / "out" / "traces").rglob("*.*"))
    assert [str(file.relative_to(tmp_path / "traced" / "out" / "traces")) for file in traces] == [
        f"step-4/rank-{rank}.json.gz" for rank in (0, 1)
    ]
    for file in traces:
        assert regions_of(file) == {
            **dict.fromkeys(("ProfilerStep", "data", "reduce", "clip", "update"), 2),
            **dict.fromkeys(("forward", "backward"), 4),
        }
    assert not (tmp_path / "plain" / "out" / "traces").exists()


def regions_of_a_pipeline(schedule: str) -> dict[str, int]:
    """Events by region of a step of this rank."""
    config = small_config(2, "parallelism.pp=2", f"parallelism.pp_schedule={schedule}", "training.local_batch_size=16")
    trainer, _ = build_on_mesh(config)
    batches = rank_batches(global_batch("uneven"), 0, 1, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.train_step(batches)
    dist.barrier()
    names = [event.name for event in profiler.events() or () if event.name in REGIONS]
    return dict(Counter(names))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.soak)])
def test_the_stages_of_a_pipeline_have_regions(schedule: str) -> None:
    """16 microbatches of one sequence."""
    for found in run_ranks(regions_of_a_pipeline, 2, schedule):
        stages = 2 if schedule == "ZBVZeroBubble" else 1
        assert found["forward"] == 16 * stages
        assert found["backward"] >= 16 * stages
        assert found["clip"] == found["update"] == 1
        assert found["reduce"] >= 1


TIMES = r"^2 steps: [\d.e-]+ s per step, [\d,]+ tokens/s, [\d.]+% waiting for data, [\d.]+ GiB$"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_command(ranks: int, tmp_path: Path) -> None:
    """On one process with a temporary folder, on two with --out. Leaves the dump folder of the configuration alone."""
    (tmp_path / "config.toml").write_text(f'[job]\ndump_folder = "{tmp_path / "run"}"\n' + CONFIG)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("# of the run")
    arguments = ["config.toml", "--steps", "2", "--operations", "20", "--profiling.active", "1"]
    arguments += ["--out", str(tmp_path / "profile")] if ranks else []
    program = start_command(tmp_path, *arguments, ranks=ranks, program=("-m", "titanlite.tools.profile")).succeed()
    report = program.output
    assert re.search(TIMES, report, re.MULTILINE)
    shares = {name: float(share) for name, share in re.findall(r"^(\S.*?) +[\d,.]+ +([\d.]+)%", report, re.MULTILINE)}
    assert {*REGIONS, "between regions", "matrix products", "optimizer"} <= {*shares}
    assert sum(shares[name] for name in (*REGIONS, "between regions")) == pytest.approx(100, abs=1)
    assert shares["forward"] > 0 < shares["backward"]
    operations = re.search(r"^operation .*\n((?:\S.* +[\d,.]+ +[\d.]+% +[\d,]+\n)+)\n", report, re.MULTILINE)
    assert operations is not None
    assert operations[1].count("\n") == 20
    assert "::" in operations[1]
    assert bool(re.search(r"^communication by rank: [\d.]+% \(rank \d\)", report, re.MULTILINE)) == (ranks == 2)
    trace = Path(re.findall(r"^trace: (\S+)", report, re.MULTILINE)[0])
    assert regions_of(trace)["ProfilerStep"] == 1
    assert {path.name for path in trace.parents[2].iterdir()} >= {"traces", "config.toml"}
    assert trace.is_relative_to(tmp_path / "profile") == (ranks == 2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]
    if not ranks:
        shutil.rmtree(trace.parents[2])


def test_an_existing_output_folder_is_refused(tmp_path: Path) -> None:
    world = World(0, 0, 1, "cpu")
    with pytest.raises(UserError, match="already exists and is not overwritten"):
        output_folder(tmp_path, world, dist.HashStore(), 5)
    assert output_folder(tmp_path / "new", world, dist.HashStore(), 5).is_dir()


@pytest.mark.slow
def test_the_end_of_the_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(CONFIG)
    command = ("config.toml", "--steps", "1000", "--data.sources.0.epochs", "1", "--out", "profile")
    program = start_command(tmp_path, *command, program=("-m", "titanlite.tools.profile"))
    assert program.wait() == 1, program.output
    assert re.search(r"the data is exhausted after step \d+ of the profile: give fewer --steps", program.output)
