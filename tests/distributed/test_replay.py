"""Replay of a step: what a run records on several ranks, and what `titanlite replay` finds out about it."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.faulty_train import WRONG_GRADIENT
from tests.distributed.program import FAULTY, start_command, start_program
from tests.distributed.reference import GLOBAL_BATCH

REPLAY = ("-m", "titanlite.tools.replay")


def replayed(workplace: Path, *arguments: str) -> tuple[int, str]:
    program = start_command(workplace, str(workplace / "out"), *arguments, program=REPLAY)
    return program.wait(), program.output


def run_with_wrong_gradient(workplace: Path, *layout: str) -> None:
    """Train six steps; in step 4 a gradient of rank 1 is wrong."""
    settings = ("--training.dtype", "float32", "--checkpoint.enable", "true", "--checkpoint.interval", "2", *layout)
    environment = {"FAULT": "gradient", "FAULTY_RANK": "1"}
    start_program(workplace, *settings, ranks=2, program=FAULTY, environment=environment).succeed()


NOT_REPRODUCED = rf"NOT reproduced: step 4 \({WRONG_GRADIENT} differs most, by (1.0e-03|[45]\.\de-04);"


@pytest.mark.slow
def test_a_wrong_gradient_of_one_rank_is_found_in_its_step(tmp_path: Path) -> None:
    run_with_wrong_gradient(tmp_path, "--parallelism.tp=2")
    code, output = replayed(tmp_path, "--step", "3")
    assert code == 0, output
    assert f"Replay of step 3 from {tmp_path}/out/checkpoint/step-2: the next one\n" in output
    assert re.search(r"\nreproduced \(.* differs most, by \d\.\de-0[789]; allowed: \d\.\de-0[67]\)", output), output

    code, output = replayed(tmp_path, "--step", "4")
    assert code == 1, output
    assert "step-2: after 1 step from there, about" in output
    assert re.search(NOT_REPRODUCED, output), output
    assert "code, versions and environment are those of the run" in output

    code, output = replayed(tmp_path, "--step", "5", "--sequences", "1")  # from weights with the wrong update
    assert code == 0, output
    assert output.count("  sequence ") == 1

    code, output = replayed(tmp_path, "--step", "6", "--from-checkpoint-only")
    assert code == 1
    assert "has no valid checkpoint of step 5" in output
    assert "1 step from " in output

    code, output = replayed(tmp_path, "--step", "7")
    assert code == 2
    assert "was trained to step 6: give a --step from 1 to 6" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "axes", [("dp_replicate",), pytest.param(("dp_replicate", "cp"), marks=pytest.mark.soak)], ids=len
)
def test_without_checkpoints_the_replay_starts_from_the_initial_weights(axes: tuple[str, ...], tmp_path: Path) -> None:
    layout = [f"--parallelism.{axis}=2" for axis in axes]
    start_program(tmp_path, "--training.local_batch_size", "4", *layout, ranks=2 ** len(axes)).succeed()
    code, output = replayed(tmp_path, "--step", "6")
    assert code == 0, output
    assert "from the initial weights: after 5 steps from there" in output
    file = next((tmp_path / "out" / "records").iterdir())
    with np.load(file) as record:
        assert record["step"].tolist() == [1, 2, 3, 4, 5, 6]
        assert record["row_losses"].shape == (6, GLOBAL_BATCH)
        assert len(json.loads(record["about"].tobytes())["parameters"]) == record["gradient_norms"].shape[1]


@pytest.mark.soak  # default suite: test_without_checkpoints_the_replay_starts_from_the_initial_weights
def test_a_run_that_continues_another_is_replayed_from_the_step_at_which_it_began(tmp_path: Path) -> None:
    """With training.bit_equal, and microbatches of pp_microbatch_size sequences, also on the process of the replay."""
    pipeline = ("--parallelism.pp=2", "--parallelism.pp_microbatch_size=2", "--training.local_batch_size=4")
    pipeline = (*pipeline, "--training.bit_equal=true", "--training.dtype=float32")
    saving = ("--training.steps", "2", "--checkpoint.enable", "true", "--job.dump_folder", str(tmp_path / "first"))
    start_program(tmp_path, *saving, *pipeline, ranks=2).succeed()
    first = tmp_path / "first" / "checkpoint" / "step-2"
    begin = ("--checkpoint.initial_load_path", str(first), "--checkpoint.initial_load_model_only", "false")
    start_program(tmp_path, "--training.steps", "4", *begin, *pipeline, ranks=2).succeed()

    code, output = replayed(tmp_path, "--step", "2")
    assert code == 1
    assert f"the run began after step 2, from {first}, so it has not taken step 2" in output
    code, output = replayed(tmp_path, "--step", "3", "--from-checkpoint-only")
    assert code == 0, output
    assert f"Replay of step 3 from {first}: the next one\n" in output
    code, output = replayed(tmp_path, "--step", "4")
    assert code == 0, output
    assert f"Replay of step 4 from {first}: after 1 step from there, about" in output
