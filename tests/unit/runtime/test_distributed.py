"""Where a process stands in the world, by what the launcher has set."""

import pytest

from titanlite.runtime.distributed import World, world_from_environment
from titanlite.runtime.errors import UserError

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COMPLETE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def world(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> World:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return world_from_environment()


def test_without_a_launcher_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, {}) == World(0, 0, 1, "cpu")


def test_with_one_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world(monkeypatch, COMPLETE) == World(1, 1, 2, "cpu")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": ""}, "have to be numbers"),
        ({"RANK": "one"}, "RANK=one"),
        ({"RANK": "2"}, "RANK has to be below WORLD_SIZE"),
        ({"MASTER_PORT": ""}, "but not MASTER_PORT"),
    ],
)
def test_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        world(monkeypatch, COMPLETE | change)
