"""titanlite compare: runs that rounding alone drives apart are within, and a run with a mistake is outside."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import titanlite
from tests.distributed.program import CONFIG
from tests.distributed.reference import TOKENS
from tests.in_process import TrainingHere
from titanlite.config.schema import JobConfig
from titanlite.data.config import ValidationConfig
from titanlite.data.sources.config import SourceConfig
from titanlite.models import layers
from titanlite.runtime.errors import UserError
from titanlite.tools.compare import __main__ as command
from titanlite.tools.compare.envelope import FACTOR, FLOOR_EPS, Compared, compare, first_outside, relative
from titanlite.tools.compare.repeats import without_outputs

pytestmark = pytest.mark.usefixtures("one_collection")


def test_the_envelope_grows_to_what_a_repeat_has_reached() -> None:
    repeats = [{"loss": {1: 0.0, 2: 1.0, 3: 3.0, 4: 1.0}}, {"loss": {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}}]
    found = compare({"loss": {4: 13.0, 1: 0.5, 2: 12.0, 3: 4.0}}, repeats, 2.0**-20)
    assert found == [
        Compared(1, "loss", 0.5, 2 * FACTOR),
        Compared(2, "loss", 12.0, 3 * FACTOR),
        Compared(3, "loss", 4.0, 3 * FACTOR),
        Compared(4, "loss", 13.0, 3 * FACTOR),
    ]
    assert first_outside(found) == found[3]
    (floor,) = compare({"loss": {1: 0.1}}, [{"loss": {1: 0.0}}], 2.0**-10)
    assert floor.allowed == FLOOR_EPS * 2.0**-10


def test_of_one_step_the_number_that_exceeds_most_is_named() -> None:
    found = [Compared(2, "a", 3.0, 1.0), Compared(2, "b", 8.0, 2.0), Compared(1, "c", 1.0, 1.0)]
    assert first_outside(found) == found[1]


def test_relative_differences() -> None:
    nan, inf = float("nan"), float("inf")
    assert [relative(1.0, -1.0), relative(0.0, 0.0), relative(3.0, 4.0)] == [2.0, 0.0, 0.25]
    assert [relative(nan, nan), relative(inf, nan), relative(1.0, nan), relative(inf, 1.0)] == [0.0, 0.0, inf, inf]


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "start_run", TrainingHere)


def trained(folder: Path, **settings: Any) -> str:
    (folder.parent / "config.toml").write_text(CONFIG)
    values: dict[str, Any] = {
        "job.dump_folder": folder,
        "checkpoint.enable": True,
        "checkpoint.interval": 2,
        "training.steps": 3,
        "training.dtype": "float32",
        # An element whose gradient is no larger than eps moves by rounding alone: at 1e-8, one element of 512 made 99%
        # of the difference of a weight, by chance beyond that of three repeats.
        "optimizer.eps": 1e-5,
        **settings,
    }
    return str(titanlite.run(folder.parent / "config.toml", values).folder)


@pytest.mark.slow
def test_other_rows_are_within_and_a_mistake_is_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = trained(tmp_path / "a"), trained(tmp_path / "b", **{"training.local_batch_size": 3})
    out, moved = tmp_path / "out", shutil.copy(TOKENS, tmp_path / "moved.npy")
    options = ["--out", str(out), "--repeats", "3", "--data.sources.0.path", str(moved)]
    command.main([a, b, *options])
    assert all(str(moved) in file.read_text() for file in out.glob("*.toml"))
    within = r"\nWithin: up to step 3, .* rounding explains: the last loss by \S+ of 1.9e-06\.\n"
    assert re.search(within, capsys.readouterr().out)
    result = json.loads((out / command.COMPARE_FILE).read_text())
    assert len({json.dumps(each) for each in result["repeats"]}) == 3
    assert {(each["step"], each["name"]) for each in result["compared"]} >= {(3, "loss"), (2, "norm.weight")}

    with monkeypatch.context() as planted:
        right = layers.rms_norm
        planted.setattr(layers, "rms_norm", lambda x, weight, eps: right(x, weight, 2 * eps))
        wrong = trained(tmp_path / "wrong")
    monkeypatch.delattr(command, "start_run")  # the repeats are finished
    command.main([a, a, *options, "--steps", "2"])
    equal = "\nEqual: up to step 2, A and B have the same bits in all numbers that are compared.\n"
    assert equal in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        command.main([a, wrong, *options])
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "Trains 0 of 3 repeats" in shown
    assert "\nOutside from step 1 on: " in shown
    assert " B also differs from all repeats by more, the other one does not.\n" in shown


def test_other_settings_are_refused_before_training(tmp_path: Path) -> None:
    for name, changes in {"a": "bit_equal = true\n", "b": ""}.items():
        (tmp_path / name).mkdir()
        text = CONFIG.replace("[training]\n", f"[training]\n{changes}")
        text = (
            text if name == "a" else text.replace("[optimizer]\nlr = 1e-2", "[debug]\nseed = 7\n[optimizer]\nlr = 2e-2")
        )
        (tmp_path / name / "config.toml").write_text(text)
    with pytest.raises(UserError) as error:
        command.main([*(str(tmp_path / name) for name in "ab"), "--out", str(tmp_path / "out")])
    assert str(error.value).splitlines()[1:] == [
        "  debug.seed: 0 in A, 7 in B",
        "  optimizer.lr: 0.01 in A, 0.02 in B",
        "  training.bit_equal: True in A, False in B",
    ]
    assert not (tmp_path / "out").exists()


def test_repeats_and_recomputations_train_without_tasks() -> None:
    """A task that a run names may be a file of another person."""
    section = ValidationConfig(enable=True, interval=2, tasks=("task.yaml",))
    assert not without_outputs(JobConfig(validation=section)).validation.enable
    with_data = replace(section, sources=(SourceConfig(kind="text", path="text.txt"),))
    assert without_outputs(JobConfig(validation=with_data)).validation == replace(with_data, tasks=())


def test_a_repeat_that_overflows_explains_any_difference() -> None:
    (found,) = compare({"loss": {1: 0.1}}, [{"loss": {1: math.inf}}], 2.0**-20)
    assert found.is_within
    assert command.verdict_of([found], {}, 2).endswith("the last loss by 1.0e-01 of inf.")
    json.dumps(command.json_rows([found]), allow_nan=False)
