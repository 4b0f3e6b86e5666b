"""The loggers: console line, strict JSON row, TensorBoard, and the checks of their section."""

import json
import logging
import math
import os
import re
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import EXPERTS_FILE, METRICS_FILE, SAMPLES_FILE, TENSORBOARD_FOLDER, MetricsConfig
from titanlite.metrics.jsonl import JsonlLogger
from titanlite.metrics.loggers import ConsoleLogger, Loggers, table_lines
from titanlite.metrics.loggers import build_loggers as build
from titanlite.metrics.records import ExpertsRecord, LogRecord, Record, SamplesRecord
from titanlite.metrics.tensorboard import TOKENS_FOLDER, TensorBoardLogger
from titanlite.runtime.errors import UserError
from titanlite.runtime.logging import setup_logging

pytestmark = pytest.mark.usefixtures("own_log")

RECORD = Record(
    step=30,
    loss=7.123456789012345,
    grad_norm=1.2345678,
    lr=3e-4,
    num_valid=2**40 + 1,
    tokens_seen=61440,
    tokens_per_second=12345.6,
    step_time_s=0.16,
    data_time_s=0.004,
    memory_gib=1.234,
    skipped_steps=0,
    bad_rows=0,
)

TENSORBOARD: tuple[str, ...] = ("console", "jsonl", "tensorboard")
ABOUT = AboutRun(
    {"run_id": "r-1", "torch": "2"}, {"training.steps": 7, "data.shuffle": True}, "[training]\nsteps = 7\n"
)


def build_loggers(section: MetricsConfig, folder: Path, *, rank: int, total_steps: int, resume_step: int) -> Loggers:
    """Tokens are 2,048 per step."""
    loggers = partial(
        build, section, folder, rank, total_steps, "peak RSS", about=ABOUT, has_samples=True, has_experts=True
    )
    return loggers(resume_step=resume_step, resume_tokens=2048 * resume_step)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


PREFIX = "2026-11-23 04:35:06 "


def test_a_row_is_aligned_with_its_header() -> None:
    record = replace(RECORD, interval_loss=7.65432, mfu=0.4126, epochs={"epoch/a": 0.2, "epoch/b": 1.257})
    assert table_lines(record, 1000) == (
        "     step   loss   mean   norm      lr tok/s wait   GiB   MFU epoch    ETA",
        "  30/1000 7.1235 7.6543   1.23 3.00e-4 12.3k   2%  1.23 41.3%  1.26  2m35s",
    )


def test_further_keys_are_columns() -> None:
    record = replace(RECORD, watched={"watch/entropy/3": 3.21})
    assert table_lines(record, 30, ["watch/entropy/3", "mfu"]) == (
        " step   loss   mean   norm      lr tok/s wait   GiB watch/entropy/3    mfu    ETA",
        "30/30 7.1235      -   1.23 3.00e-4 12.3k   2%  1.23            3.21      -     0s",
    )


def test_the_console_warns_once_of_keys_that_the_first_row_does_not_have(caplog: pytest.LogCaptureFixture) -> None:
    console = ConsoleLogger(30, "peak RSS", ["grad_nrm", "loss", "?"])
    for _ in range(2):
        console.write(RECORD)
    rule = "metrics.columns: the first row of metrics.jsonl has no"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        *(f'{rule} "grad_nrm"; did you mean "grad_norm"?', f'{rule} "?"')
    ]


def test_unknown_values_are_left_out_and_rare_ones_are_appended() -> None:
    record = replace(RECORD, skipped_steps=2, bad_rows=3, loss=math.nan)
    assert table_lines(record, 30) == (
        " step   loss   mean   norm      lr tok/s wait   GiB    ETA",
        "30/30    nan      -   1.23 3.00e-4 12.3k   2%  1.23     0s | skipped steps 2 | bad rows 3",
    )


def test_usual_numbers_keep_the_width_and_large_runs_fit_into_100_characters() -> None:
    usual: list[dict[str, float]] = [
        {"loss": 11.93456, "interval_loss": 9.99999, "grad_norm": 0.0512, "tokens_per_second": 999_999, "mfu": 0.05},
        {"loss": 0.5, "interval_loss": 12.0, "grad_norm": 99.99, "tokens_per_second": 63.21, "memory_gib": 139.9},
        {"grad_norm": 1234.5, "tokens_per_second": 9.9999e8, "step": 999_000, "step_time_s": 99.96, "lr": 9.996e-4},
        {"memory_gib": 0.63},
        {"step": 1, "step_time_s": 0.01234, "data_time_s": 0.01234},
        {"step": 999_999, "grad_norm": 999.9, "lr": 1e-9},
    ]
    most = replace(RECORD, interval_loss=7.0, mfu=0.4, epochs={"epoch/a": 1.0})
    for changes in usual:
        header, row = table_lines(replace(most, **changes), 999_999)  # type: ignore[arg-type]
        assert len(header) == len(row) <= 100 - len(PREFIX), row
        # a column ends where its name ends
        assert [match.end() for match in re.finditer(r"\S+", row)] == [
            match.end() for match in re.finditer(r"\S+", header)
        ], row


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.7, "1h00m"), (86399.9, "1d00h"), (100 * 86400, "100d00h")],
)
def test_eta(seconds: float, text: str) -> None:
    _, row = table_lines(replace(RECORD, step=1, step_time_s=seconds), 2)
    assert row.endswith(f" {text}")


def test_the_console_has_a_header_after_every_20_rows(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    loggers = Loggers([ConsoleLogger(1000, "peak RSS")])
    for _ in range(21):
        loggers.write(RECORD)
    header, row = table_lines(RECORD, 1000)
    legend = "Columns: mean = loss since the last row, wait = for data, GiB = peak RSS"
    lines = capsys.readouterr().out.splitlines()
    assert [line[len(PREFIX) :] for line in lines] == [legend, header, *[row] * 20, header, row]
    assert max(map(len, lines)) <= 100


class ShortFile:
    """Writes at most `most` bytes per call, and counts the calls."""

    def __init__(self, file: Any, most: int) -> None:
        self.file, self.most, self.calls, self.close = file, most, 0, file.close

    def write(self, data: bytes) -> int:
        self.calls += 1
        return int(self.file.write(data[: self.most]))


@pytest.mark.parametrize(("content", "most"), [(b"", 10_000), (b'{"step": 1}\n', 10_000), (b"", 7)])
def test_rows_are_strict_json_of_the_same_numbers_in_one_unbuffered_write(
    tmp_path: Path, content: bytes, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the file has rows. A short write is completed."""
    path = tmp_path / METRICS_FILE
    path.write_bytes(content)
    logger = JsonlLogger(path)
    logger._file = file = ShortFile(logger._file, most)  # type: ignore[assignment]
    exact = replace(RECORD, loss=0.1 + 0.2, grad_norm=5e-324, lr=1 / 3, mfu=2 / 3)
    not_finite = replace(RECORD, loss=math.nan, grad_norm=math.inf, lr=-math.inf, slowest_host="node7")
    for count, record in enumerate((RECORD, exact, not_finite), 1):
        logger.write(record)
        assert (file.calls == count) == (most > 7)
        lines = path.read_bytes().removeprefix(content).decode().splitlines()
        rows = [json.loads(line, parse_constant=refuse_constant) for line in lines]
        assert len(rows) == count
    logger.close()
    assert rows[:2] == [RECORD.row(), exact.row()]
    assert rows[0]["num_valid"] == 2**40 + 1
    assert math.isnan(float(rows[2]["loss"]))
    assert (float(rows[2]["grad_norm"]), float(rows[2]["lr"]), rows[2]["slowest_host"]) == (
        math.inf,
        -math.inf,
        "node7",
    )
    assert not caplog.records


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / METRICS_FILE)
    logger.close()
    logger._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(
        UserError, match=r"metrics\.jsonl: No space left on device; the record of step 30 is lost; free space"
    ):
        logger.write(RECORD)
    logger.close()


def test_a_folder_that_is_renamed_or_deleted_during_the_run_is_noticed(tmp_path: Path) -> None:
    for change, message in (
        (lambda folder: folder.rename(tmp_path / "renamed"), "was deleted or its folder renamed during the run"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "was deleted or its folder renamed during the run"),
        (lambda folder: (folder / "other").replace(folder / "metrics.jsonl"), "was replaced during the run"),
    ):
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "other").write_text("")
        logger = JsonlLogger(folder / "metrics.jsonl")
        logger.write(RECORD)
        change(folder)
        with pytest.raises(UserError, match=message):
            logger.write(RECORD)
        logger.close()


def test_a_folder_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).mkdir()
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
        JsonlLogger(tmp_path / METRICS_FILE)


@pytest.mark.parametrize(
    ("file", "record_of", "row_of"),
    [
        (
            SAMPLES_FILE,
            lambda step: SamplesRecord(step, (("a\n", f"ü{step}"), ("b", "x"))),
            lambda step: [
                {"step": step, "prompt": "a\n", "text": f"ü{step}"},
                {"step": step, "prompt": "b", "text": "x"},
            ],
        ),
        (
            EXPERTS_FILE,
            lambda step: ExpertsRecord(step, [[step, 1]]),
            lambda step: [{"step": step, "loads": [[step, 1]]}],
        ),
    ],
)
def test_records_are_in_a_file_of_their_own_whose_later_rows_a_resumed_run_removes(
    file: str, record_of: Callable[[int], LogRecord], row_of: Callable[[int], list[Any]], tmp_path: Path
) -> None:
    for resume_step, steps in ((0, (5, 10, 15)), (10, (15,))):
        section = MetricsConfig(loggers=("jsonl",))
        loggers = build_loggers(section, tmp_path, rank=0, total_steps=20, resume_step=resume_step)
        for step in steps:
            loggers.write(record_of(step))
        loggers.close()
        with (tmp_path / file).open("ab") as opened:
            opened.write(b'{"step": 15, "pro')  # a power failure
    lines = (tmp_path / file).read_text().splitlines()
    assert [json.loads(line) for line in lines[:-1]] == [row for step in (5, 10, 15) for row in row_of(step)]
    assert (tmp_path / METRICS_FILE).read_bytes() == b""


def test_the_console_has_a_line_per_sample(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    ConsoleLogger(100, "peak RSS").write(SamplesRecord(5, (("a\n", "ü5"), ("b", "x"))))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(r'sample after step 5: "a\nü5"')
    assert second.endswith('sample after step 5: "bx"')


def test_only_rank_0_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(1)
    loggers = build_loggers(MetricsConfig(loggers=TENSORBOARD), tmp_path, rank=1, total_steps=10, resume_step=0)
    loggers.write(RECORD)
    loggers.close()
    assert list(tmp_path.iterdir()) == []
    setup_logging(0)
    loggers = build_loggers(MetricsConfig(), tmp_path, rank=0, total_steps=10, resume_step=0)
    loggers.write(RECORD)
    loggers.close()
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_FILE, SAMPLES_FILE, EXPERTS_FILE}
    assert " 30/10 " in capsys.readouterr().out


def test_tensorboard_has_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    loggers = build_loggers(MetricsConfig(loggers=TENSORBOARD), tmp_path, rank=0, total_steps=100, resume_step=0)
    loggers.write(RECORD)
    # before closing: written records are readable immediately
    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload()
    assert [event.step for event in events.Scalars("bad_rows")] == [30]
    loggers.write(replace(RECORD, step=40, loss=math.nan, slowest_host="node7"))  # text is no scalar
    loggers.write(SamplesRecord(40, (("a\n", "ü5"), ("b", "x"))))
    events.Reload()
    loggers.close()
    assert sorted(events.Tags()["scalars"]) == sorted(set(RECORD.row()) - {"step"})
    assert [event.step for event in events.Scalars("loss")] == [30, 40]
    (samples,) = events.Tensors("samples/text_summary")
    assert (samples.step, "ü5" in samples.tensor_proto.string_val[0].decode()) == (40, True)
    assert "steps = 7" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert b"r-1" in events.Tensors("run/text_summary")[0].tensor_proto.string_val[0]
    assert b"training.steps" in events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    by_tokens = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER / TOKENS_FOLDER)).Reload()
    assert [event.step for event in by_tokens.Scalars("by_tokens/loss")] == [61440, 61440]
    assert events.Scalars("lr")[0].value == pytest.approx(3e-4)


def starts_of(
    folder: Path, starts: list[tuple[int, list[int]]], damage: bytes | None = None, *, caplog: pytest.LogCaptureFixture
) -> list[tuple[int, float]]:
    """Run starts that resume after a step and log `steps` with loss = index of the start; return TensorBoard's points.

    damage: bytes that each start leaves after its last record, as after a kill or power failure; None: no bytes.
    """
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.summary.writer import event_file_writer  # type: ignore[import-untyped]
    from tensorboard.util import tensor_util  # type: ignore[import-untyped]

    folder.mkdir(exist_ok=True)
    section = MetricsConfig(loggers=TENSORBOARD)
    for number, (resume_step, steps) in enumerate(starts):
        # Starts are seconds apart: TensorBoard sorts the files by the time in their names.
        with mock.patch.object(event_file_writer, "time", mock.Mock(time=lambda at=1e9 + number: at)):
            loggers = build_loggers(section, folder, rank=0, total_steps=100, resume_step=resume_step)
        for step in steps:
            loggers.write(replace(RECORD, step=step, loss=float(number)))
        loggers.close()
        if damage is not None:
            newest = max((folder / TENSORBOARD_FOLDER).iterdir())
            newest.write_bytes(newest.read_bytes() + damage)
    with caplog.at_level(logging.ERROR):  # TensorBoard logs at length what it purges
        read = event_accumulator.EventAccumulator(str(folder / TENSORBOARD_FOLDER), {"scalars": 0}).Reload()
        served = plugin_event_accumulator.EventAccumulator(str(folder / TENSORBOARD_FOLDER), {"tensors": 0}).Reload()
    points = [(event.step, event.value) for event in read.Scalars("loss")]
    assert [(event.step, tensor_util.make_ndarray(event.tensor_proto)) for event in served.Tensors("loss")] == points
    return points


@pytest.mark.parametrize(
    "damage", [None, b"\x18\x00\x00", b"\x00" * 64, b"\xff" * 64], ids=["intact", "truncated", "zeros", "ones"]
)
def test_a_resumed_run_replaces_later_steps_of_earlier_starts(
    tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    starts = [(0, [1, 10, 20, 30, 40]), (25, [30, 40, 50]), (30, [40, 50]), (45, []), (40, [50, 60]), (12, [20])]
    points = starts_of(tmp_path, starts, damage, caplog=caplog)
    rows = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert points == [(1, 0.0), (10, 0.0), (20, 5.0)]
    assert [(row["step"], row["loss"]) for row in rows] == points
    points = starts_of(tmp_path / "other", starts[:-1], damage, caplog=caplog)
    assert points == [(1, 0.0), (10, 0.0), (20, 0.0), (30, 1.0), (40, 2.0), (50, 4.0), (60, 4.0)]


def test_a_full_disk_ends_only_tensorboard_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    loggers = build_loggers(MetricsConfig(loggers=TENSORBOARD), tmp_path, rank=0, total_steps=10, resume_step=0)
    hook = threading.excepthook
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # as on a full disk, a write fails in the middle; TensorBoard's records are longer than those of the JSON file
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        for _ in range(4):
            loggers.write(RECORD)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    loggers.write(RECORD)
    loggers.close()
    assert len((tmp_path / METRICS_FILE).read_text().splitlines()) == 5
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"cannot write TensorBoard's files in {tmp_path}")
    assert "Traceback" not in capfd.readouterr().err
    assert threading.excepthook != hook


def test_tensorboard_that_cannot_start_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "tb").write_text("a file")
    logger = TensorBoardLogger(tmp_path / "tb", 0, 0, ABOUT)
    logger.write(RECORD)
    logger.close()
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
