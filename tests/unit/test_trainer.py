"""The batch arithmetic of [training]."""

import pytest

from titanlite.config.check import check_training
from titanlite.config.schema import TrainingConfig
from titanlite.parallel.mesh import ParallelismConfig


def test_defaults_are_valid_for_any_degree() -> None:
    for degree in (0, 1, 2, 7):
        assert check_training(TrainingConfig(), degree, ParallelismConfig()) == []


@pytest.mark.parametrize(
    ("section", "degree", "key", "remedy"),
    [
        (TrainingConfig(global_batch_size=-2), 1, "training.global_batch_size", "-1"),
        (
            TrainingConfig(local_batch_size=4, global_batch_size=8),
            4,
            "training.global_batch_size",
            "set training.local_batch_size = 2, or set training.global_batch_size = 16",
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
    (problem,) = check_training(section, degree, ParallelismConfig())
    assert problem.key == key
    assert remedy in problem.remedy


def test_tp_ranks_share_each_sequence_evenly() -> None:
    assert check_training(TrainingConfig(seq_len=16), 1, ParallelismConfig(tp=4)) == []
    (problem,) = check_training(TrainingConfig(seq_len=18), 1, ParallelismConfig(tp=4))
    assert problem.key == "training.seq_len"
    assert problem.remedy == "set training.seq_len = 16"
