"""The training loop: the order of calls in a step, and the conditions that end the loop."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from time import sleep
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest

from titanlite import train as train_module
from titanlite.checkpoint.manager import STOP_AFTER
from titanlite.config.check import check_training
from titanlite.config.schema import JobConfig, TrainingConfig
from titanlite.data.config import DataConfig
from titanlite.metrics.config import MetricsConfig
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.ranks.distributed import CommConfig
from titanlite.ranks.signals import StopRequest
from titanlite.runtime.errors import DataError, UsageError, UserError
from titanlite.train import train


@pytest.mark.parametrize("argv", [[], ["--training.steps", "3"]])
def test_a_configuration_is_required(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    monkeypatch.setattr(train_module, "FailureReport", MagicMock)  # ends the process
    with pytest.raises(UsageError, match=r"a configuration is missing\. To start:"):
        train_module.main()


STEP = [
    *("trainer.compute_time.start", "loader.next_step", "trainer.train_step", "trainer.compute_time.stop"),
    *("checks.skipped.note", "meter.update", "data_end.after_step"),
]
LOG = [
    *("loader.epochs", "expert_loads.flush", "loader.too_long_by_name", "meter.flush", "loggers.write"),
    "checks.skipped.check",
]
SAVE = ["ledger.write", "checks.replicas.after_step", "checkpoints.after_step"]
VALIDATE = ["validation.is_due", "trainer.mesh.set_timeout", "validation.after_step", "trainer.mesh.set_timeout"]
SAMPLE = ["samples.is_due", "samples.after_step"]
PROFILE = "profiling.after_step"
AFTER = [*SAVE, *VALIDATE, *SAMPLE, PROFILE]
END = ["profiling.close", "checkpoints.close"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """A mock run whose trainer counts steps. `run.mock_calls` records every call of the loop."""
    run = MagicMock()

    def count(_: Any) -> None:
        run.trainer.step += 1

    run.trainer.step = 0
    run.trainer.counts_rows, run.trainer.exact = True, None
    run.trainer.schedule = float
    run.trainer.train_step.side_effect = count
    run.loader.next_step.return_value = []
    run.data_end.after_step.return_value = [False]
    run.expert_loads.flush.return_value = {}, None
    run.meter.flush.side_effect = lambda *_: Mock(step=run.trainer.step, bad_rows=run.trainer.step)
    run.goodput = Mock(name="goodput")  # with a name, it is not in run.mock_calls
    run.checkpoints.after_step.return_value = False
    run.checkpoints.stopped_by = "SIGTERM"
    run.validation.is_due.return_value = run.samples.is_due.return_value = True
    run.validation.after_step.return_value = 0
    run.attach_mock(MagicMock(), "garbage")
    monkeypatch.setattr(train_module, "PacedGarbageCollection", run.garbage)  # the real one traverses all objects
    run.reset_mock()
    return run


def config(steps: int = 3, max_bad_rows: int = 100, log_freq: int = 3) -> JobConfig:
    return JobConfig(
        training=TrainingConfig(steps=steps),
        metrics=MetricsConfig(log_freq=log_freq),
        data=DataConfig(max_bad_rows=max_bad_rows),
        comm=CommConfig(init_timeout_s=40, train_timeout_s=17),
    )


def events(run: MagicMock) -> list[str]:
    return [name for name, *_ in run.mock_calls if not name.startswith("garbage")]


def test_calls_of_each_step_are_in_order(run: MagicMock) -> None:
    failure = Mock(enter=Mock(name="enter"))  # with a name, it is not in run.mock_calls
    run.attach_mock(failure, "failure")
    record = train(config(), run, failure)
    assert record is not None
    assert record.step == 3
    assert events(run) == [
        *("failure.record_stops", "profiling.start", "meter.start"),
        *(*STEP, *LOG, "trainer.mesh.set_timeout", *AFTER),
        *(*STEP, *AFTER),
        *(*STEP, *LOG, *AFTER),
        *END,
    ]
    run.garbage.assert_called_once_with()
    paced = run.garbage.return_value.__enter__.return_value
    assert [call.args for call in paced.after_step.call_args_list] == [(1,), (2,)]
    assert [call.args for call in run.checkpoints.after_step.call_args_list] == [(1, False), (2, False), (3, True)]
    assert run.checks.replicas.after_step.call_args_list == run.checkpoints.after_step.call_args_list
    failure.record_stops.assert_called_once_with(run.stop)
    compute_s = run.trainer.compute_time.stop.return_value
    numbers = {"data_wait_s": run.loader.wait_s, "bad_rows": run.loader.bad_rows, "compute_s": compute_s}
    updates = [(call.args[0], call.kwargs) for call in run.meter.update.call_args_list]
    assert updates == [(step, {"lr": float(step), **numbers}) for step in (1, 2, 3)]
    assert [call.args for call in run.validation.is_due.call_args_list] == [(1, False), (2, False), (3, True)]
    assert [call.args for call in run.validation.after_step.call_args_list] == [(1, False), (2, False), (3, True)]


def test_the_first_validation_has_the_time_limit_of_the_start(run: MagicMock) -> None:
    """It compiles: with the limit of later steps, the ranks that wait for the slowest compilation would end the job."""
    run.validation.is_due.side_effect = [False, True, True, True]
    limits = []
    run.validation.after_step.side_effect = lambda *_: limits.append(run.trainer.mesh.set_timeout.call_args.args) or 0
    train(config(steps=4), run, Mock())
    assert limits == [(40,), (17,), (17,)]
    assert [call.args for call in run.trainer.mesh.set_timeout.call_args_list] == [(17,), (40,), *[(17,)] * 5]


def test_only_the_rank_that_counts_rows_reports_bad_rows(run: MagicMock) -> None:
    run.trainer.counts_rows = False
    train(config(steps=1), run, Mock())
    assert run.meter.update.call_args.kwargs["bad_rows"] == 0


def test_optional_parts_may_be_absent(run: MagicMock) -> None:
    run.ledger = run.checkpoints = run.validation = run.samples = None
    assert train(config(steps=1), run, Mock()) is not None
    parts = ["profiling.start", "meter.start", *STEP, *LOG, "trainer.mesh.set_timeout", "checks.replicas.after_step"]
    assert events(run) == [*parts, PROFILE, "profiling.close"]


def test_the_end_of_the_data_is_the_last_step(run: MagicMock) -> None:
    run.data_end.after_step.side_effect = [[False, False], [False, True]]
    record = train(config(), run, Mock())
    assert record is not None
    assert record.step == 2
    assert events(run)[-18:] == [*LOG, *AFTER, *END]
    assert run.checkpoints.after_step.call_args.args == (2, True)


def test_a_signal_stops_the_loop_after_the_save_without_validation(run: MagicMock) -> None:
    run.checkpoints.after_step.side_effect = [False, True]
    assert train(config(), run, Mock()) is None
    assert events(run)[-4:] == ["checkpoints.after_step", PROFILE, *END]


def test_a_stop_that_was_planned_does_not_skip_the_validation(run: MagicMock) -> None:
    run.checkpoints.after_step.side_effect = [False, True]
    run.checkpoints.stopped_by = STOP_AFTER
    assert train(config(), run, Mock()) is None
    assert events(run)[-9:] == [*VALIDATE, *SAMPLE, PROFILE, *END]


def test_a_signal_in_the_last_step_does_not_skip_its_validation(run: MagicMock) -> None:
    run.checkpoints.after_step.return_value = True
    run.validation.after_step.return_value = 15
    assert train(config(steps=1), run, Mock()) is not None
    assert events(run)[-9:] == [*VALIDATE, *SAMPLE, PROFILE, *END]


def test_a_signal_during_validation_saves_the_step(run: MagicMock) -> None:
    run.validation.after_step.side_effect = [0, 15]
    assert train(config(), run, Mock()) is None
    assert events(run)[-8:] == [*VALIDATE, "checkpoints.stop_after", PROFILE, *END]
    run.checkpoints.stop_after.assert_called_once_with(2, 15)


@pytest.mark.parametrize(
    ("max_bad_rows", "log_freq", "logged"),
    [(10, 5, [1, 5, 10]), (9, 5, [1, 5, 10]), (4, 5, [1, 5]), (0, 5, [1]), (3, 1, [1, 2, 3, 4])],
)
def test_too_many_bad_rows_stop_the_run_at_the_next_log_step(
    max_bad_rows: int, log_freq: int, logged: list[int], run: MagicMock
) -> None:
    """Ten steps with one bad row each."""
    if max_bad_rows == 10:
        train(config(10, max_bad_rows, log_freq), run, Mock())
    else:
        with pytest.raises(UserError, match=rf"max_bad_rows = {max_bad_rows}: {logged[-1]} rows were skipped"):
            train(config(10, max_bad_rows, log_freq), run, Mock())
    assert [call.args[0].bad_rows for call in run.loggers.write.call_args_list] == logged
    assert events(run)[-2:] == END


@pytest.mark.parametrize(("is_saved", "is_everywhere"), [(False, True), (False, False), (True, True)])
def test_a_validation_that_fails_on_all_ranks_saves_its_step(
    is_saved: bool, is_everywhere: bool, run: MagicMock
) -> None:
    run.validation.after_step.side_effect = ZeroDivisionError
    run.validation.fails_on_all_ranks.return_value = is_everywhere
    run.checkpoints.after_step.side_effect = lambda _, last: last and is_saved
    run.validation.is_due.side_effect = lambda step, _: step == 2
    with pytest.raises(ZeroDivisionError):
        train(config(2), run, Mock())
    assert run.checkpoints.save_unsaved.call_args_list == ([call(2)] if is_everywhere and not is_saved else [])


def test_a_data_error_is_noted_before_waiting_for_the_ranks(run: MagicMock, monkeypatch: pytest.MonkeyPatch) -> None:
    error = DataError("it is not UTF-8", 3)
    run.loader.next_step.side_effect = error
    run.attach_mock(Mock(), "failure")
    run.attach_mock(Mock(), "wait_for_ranks")
    monkeypatch.setattr(train_module, "wait_for_ranks", run.wait_for_ranks)
    with pytest.raises(DataError):
        train(config(), run, run.failure)
    found = [name for name in events(run) if name != "failure.enter"]
    assert found[4:] == ["loader.next_step", "failure.note_data_error", "wait_for_ranks", *END]
    run.failure.note_data_error.assert_called_once_with(error)
    run.wait_for_ranks.assert_called_once_with(run.trainer)


def test_a_rank_that_stopped_by_agreement_waits_for_its_launcher() -> None:
    """Else its launcher, which has not seen the node that joins, would take the run as finished."""
    request = StopRequest()
    with pytest.raises(UserError, match="this one needs a restart, to continue without them"):
        train_module.wait_for_launcher(request, 0.1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(train_module.wait_for_launcher, request, 60.0)
        sleep(0.2)
        assert not waiting.done()
        request.number = signal.SIGTERM
        waiting.result(timeout=10)


def test_defaults_are_valid() -> None:
    assert check_training(TrainingConfig(), ParallelismConfig()) == []


def test_tp_ranks_share_each_sequence_evenly() -> None:
    assert check_training(TrainingConfig(seq_len=16), ParallelismConfig(tp=4)) == []
    (problem,) = check_training(TrainingConfig(seq_len=18), ParallelismConfig(tp=4))
    assert problem.key == "training.seq_len"
    assert problem.remedy == "set training.seq_len = 16 or 20, or change parallelism.tp"
