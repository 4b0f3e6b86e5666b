"""The batch arithmetic of [training], and when a run with bad rows ends."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from titanlite import train
from titanlite import trainer as trainer_module
from titanlite.config.schema import JobConfig
from titanlite.data.config import DataConfig
from titanlite.metrics.sinks import MetricsConfig
from titanlite.runtime.distributed import CommConfig
from titanlite.runtime.errors import UserError
from titanlite.trainer import Trainer, TrainingConfig, check_training, mark_last


def test_defaults_are_valid_on_any_degree() -> None:
    for degree in (0, 1, 2, 7):
        assert check_training(TrainingConfig(), degree, 1) == []


@pytest.mark.parametrize(
    ("section", "degree", "key", "remedy"),
    [
        (TrainingConfig(global_batch_size=-2), 1, "training.global_batch_size", "-1"),
        (
            TrainingConfig(local_batch_size=4, global_batch_size=8),
            4,
            "training.global_batch_size",
            "training.local_batch_size = 2, or training.global_batch_size = 16",
        ),
        (
            TrainingConfig(local_batch_size=2, global_batch_size=8),
            3,
            "training.global_batch_size",
            "training.global_batch_size = 12",
        ),
    ],
)
def test_problems(section: TrainingConfig, degree: int, key: str, remedy: str) -> None:
    (problem,) = check_training(section, degree, 1)
    assert problem.key == key
    assert remedy in problem.remedy


def test_tp_ranks_share_each_sequence_evenly() -> None:
    assert check_training(TrainingConfig(seq_len=16), 1, 4) == []
    (problem,) = check_training(TrainingConfig(seq_len=18), 1, 4)
    assert problem.key == "training.seq_len"
    assert problem.remedy == "training.seq_len = 16"


def test_only_the_last_microbatch_is_the_last() -> None:
    assert list(mark_last(["a", "b", "c"])) == [("a", False), ("b", False), ("c", True)]


class NoModel(Trainer):
    """Counts steps, and trains nothing."""

    def __init__(self) -> None:
        self.step = 0
        self.device = torch.device("cpu")
        self.schedule = float
        self.counts_rows = True

    def train_step(self, batches: Any) -> Any:
        assert batches == []
        self.step += 1


@pytest.mark.parametrize(
    ("max_bad_rows", "log_freq", "logged"),
    [(10, 5, [1, 5, 10]), (9, 5, [1, 5, 10]), (4, 5, [1, 5]), (0, 5, [1]), (3, 1, [1, 2, 3, 4])],
)
def test_more_bad_rows_than_allowed_end_the_run_at_the_next_log_step(
    max_bad_rows: int, log_freq: int, logged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps over data with a bad row in each."""
    monkeypatch.setattr(trainer_module, "PacedGarbageCollection", MagicMock())  # it goes through all objects
    trainer, loader, meter, sinks = NoModel(), Mock(wait_s=0.0), Mock(), Mock()
    loader.next_step.return_value = []
    meter.flush.side_effect = lambda: Mock(bad_rows=trainer.step)
    facts = {"steps": 10, "log_freq": log_freq, "gc_freq": 50, "max_bad_rows": max_bad_rows}
    too_many = pytest.raises(UserError, match=rf"max_bad_rows = {max_bad_rows}: {logged[-1]} rows were skipped")
    with nullcontext() if max_bad_rows == 10 else too_many:
        trainer.fit(
            loader,
            meter,
            sinks,
            **facts,
            after_first_step=Mock(),
            data_ended=lambda: False,
            after_step=lambda *_: False,
            on_data_error=Mock(),
        )
    assert [call.args[0].bad_rows for call in sinks.write.call_args_list] == logged


def test_the_loop_gets_the_numbers_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JobConfig(
        training=TrainingConfig(steps=7, gc_freq=11),
        metrics=MetricsConfig(log_freq=3),
        data=DataConfig(max_bad_rows=13),
        comm=CommConfig(train_timeout_s=17),
    )
    run, failure, set_timeout = Mock(), Mock(), Mock()
    run.validation.after_step.return_value = 15
    monkeypatch.setattr(train, "set_timeout", set_timeout)
    assert train.fit(config, run, failure) is run.trainer.fit.return_value
    numbers = dict(run.trainer.fit.call_args.kwargs)
    numbers.pop("after_first_step")()
    assert numbers.pop("on_data_error") == failure.note_data_error
    run.checkpoints.after_step.return_value = False
    assert numbers.pop("after_step")(3, True)
    run.validation.after_step.assert_called_once_with(3, last=True, on_data_error=failure.note_data_error)
    run.checkpoints.after_step.assert_called_once_with(3, True)
    run.checkpoints.stop_after.assert_called_once_with(3, 15)
    run.data_end.after_step.return_value = [False, True]
    assert numbers.pop("data_ended")()
    run.stop.activate.assert_called_once_with()
    run.checkpoints.close.assert_called_once_with()
    assert numbers == {"steps": 7, "log_freq": 3, "gc_freq": 11, "max_bad_rows": 13}
    set_timeout.assert_called_once_with(run.groups, 17)
