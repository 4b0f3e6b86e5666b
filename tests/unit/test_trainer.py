"""The batch arithmetic of [training]."""

import pytest

from titanlite.trainer import TrainingConfig, check_training, mark_last


def test_defaults_are_valid_on_any_degree() -> None:
    for degree in (0, 1, 2, 7):
        assert check_training(TrainingConfig(), degree) == []


@pytest.mark.parametrize(
    ("section", "degree", "key", "remedy"),
    [
        (TrainingConfig(steps=0), 1, "training.steps", ""),
        (TrainingConfig(seq_len=0), 1, "training.seq_len", ""),
        (TrainingConfig(local_batch_size=0), 1, "training.local_batch_size", ""),
        (TrainingConfig(gc_freq=0), 1, "training.gc_freq", ""),
        (TrainingConfig(global_batch_size=0), 1, "training.global_batch_size", "-1"),
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
    (problem,) = check_training(section, degree)
    assert problem.key == key
    assert remedy in problem.remedy


def test_only_the_last_microbatch_is_the_last() -> None:
    assert list(mark_last(["a", "b", "c"])) == [("a", False), ("b", False), ("c", True)]
