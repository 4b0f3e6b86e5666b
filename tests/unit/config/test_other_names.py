"""Settings by their names in other trainers."""

import pytest

from titanlite.config.keys import full_keys, suggest
from titanlite.config.other_names import KEYS, NAMES
from titanlite.models.registry import FAMILIES


def test_every_name_points_to_a_key_and_is_none_itself() -> None:
    known = [key for family in FAMILIES for key in full_keys(family)]
    assert {*KEYS.values(), *NAMES.values()} <= {*known}
    assert not {*NAMES} & {key.rpartition(".")[2] for key in known}
    assert not {*KEYS} & {*known}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("training.learning_rate", "optimizer.lr"),
        ("lr", "optimizer.lr"),
        ("batch-size", "training.local_batch_size"),
        ("max_steps", "training.steps"),
        ("lr_wsd_decay_iters", "lr_schedule.final_decay_steps"),
        ("training.dataset", "data.sources.0.kind"),
        ("model.name", "model.family"),
        ("tensor_model_parallel_size", "parallelism.tp"),
        ("training.stepps", "training.steps"),
    ],
)
def test_names_of_other_trainers_are_explained(given: str, meant: str) -> None:
    assert suggest(given, full_keys("llama3")) == [meant]
