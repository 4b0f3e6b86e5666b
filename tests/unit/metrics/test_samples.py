"""samples.jsonl, and samples in the other loggers."""

import json
from pathlib import Path

import pytest

from tests.unit.metrics.test_sinks import ABOUT
from titanlite.metrics.config import MetricsConfig
from titanlite.metrics.console import ConsoleSink
from titanlite.metrics.jsonl import keep_lines
from titanlite.metrics.records import SampleRow, SamplesRecord
from titanlite.metrics.sinks import Sinks, build_sinks
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import log, setup_logging


def record(step: int) -> SamplesRecord:
    return SamplesRecord(step, (("a\n", f"ü{step}"), ("b", "x")))


def sinks_of(section: MetricsConfig, folder: Path, resume_step: int) -> Sinks:
    return build_sinks(
        *(section, folder, 0, 20, "peak RSS"),
        resume_step=resume_step,
        resume_tokens=0,
        about=ABOUT,
        has_samples=True,
        has_experts=False,
    )


def test_each_prompt_is_a_row_and_a_resumed_run_removes_later_ones(tmp_path: Path) -> None:
    section = MetricsConfig(loggers=("jsonl",))
    for resume_step, steps in ((0, (5, 10, 15)), (10, (15,))):
        sinks = build_sinks(
            section,
            tmp_path,
            0,
            20,
            "peak RSS",
            resume_step=resume_step,
            resume_tokens=0,
            about=ABOUT,
            has_samples=True,
            has_experts=False,
        )
        for step in steps:
            sinks.write(record(step))
        sinks.close()
        with (tmp_path / "samples.jsonl").open("ab") as file:
            file.write(b'{"step": 15, "pro')  # a power failure
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines[:-1]]
    assert [(row["step"], row["prompt"]) for row in found] == [(s, p) for s in (5, 10, 15) for p in ("a\n", "b")]
    assert found[4] == {"step": 15, "prompt": "a\n", "text": "ü15"}
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_a_folder_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(UserError, match="rename or remove it"):
        keep_lines(tmp_path / "samples.jsonl", SampleRow, 5)
    keep_lines(tmp_path / "absent", SampleRow, 5)


def test_the_console_has_a_line_per_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", log.propagate)
    setup_logging(0)
    ConsoleSink(100, "peak RSS").write(record(5))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(r'sample after step 5: "a\nü5"')
    assert second.endswith('sample after step 5: "bx"')


def test_tensorboard_has_the_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    section = MetricsConfig(loggers=("jsonl", "tensorboard"))
    sinks = sinks_of(section, tmp_path, 0)
    sinks.write(record(5))
    sinks.close()
    (event,) = EventAccumulator(str(tmp_path / "tb")).Reload().Tensors("samples/text_summary")
    assert event.step == 5
    assert "ü5" in event.tensor_proto.string_val[0].decode()
