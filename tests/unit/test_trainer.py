"""The batch arithmetic of [training]."""

from titanlite.config.check import check_training
from titanlite.config.schema import TrainingConfig
from titanlite.parallel.mesh import ParallelismConfig


def test_defaults_are_valid() -> None:
    assert check_training(TrainingConfig(), ParallelismConfig()) == []


def test_tp_ranks_share_each_sequence_evenly() -> None:
    assert check_training(TrainingConfig(seq_len=16), ParallelismConfig(tp=4)) == []
    (problem,) = check_training(TrainingConfig(seq_len=18), ParallelismConfig(tp=4))
    assert problem.key == "training.seq_len"
    assert problem.remedy == "set training.seq_len = 16 or 20, or change parallelism.tp"
