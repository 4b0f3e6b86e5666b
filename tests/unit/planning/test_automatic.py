"""parallelism.layout = "auto": one choice for all ranks, from a profile that is measured once."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.unit.planning.test_step_time import config_of, profile
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.planning import automatic
from titanlite.planning.automatic import agree_on_layout
from titanlite.planning.hardware.machine import Profile, dump_profile
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import ConfigError, UsageError

RANKS = 4


def auto(*settings: str) -> JobConfig:
    """A configuration for any layout."""
    batch = ("training.global_batch_size=8", "training.local_batch_size=1")
    return config_of(RANKS, ("parallelism.layout=auto", *batch, *settings), device="cpu")


def profile_file(folder: Path) -> str:
    file = folder / "machine.toml"
    file.write_text(dump_profile(profile("cpu", latency_s=1e-6, bytes_per_s=1e9)))
    return str(file)


def chosen(config: JobConfig, *kept: str) -> JobConfig:
    """The choice of rank 0, after a check that all others have the same one."""
    store = dist.HashStore()
    first, *others = (agree_on_layout(config, kept, World(rank, rank, RANKS, "cpu", RANKS), store) for rank in range(4))
    assert others == [first] * (RANKS - 1)
    return first


@pytest.mark.slow
def test_all_ranks_take_the_choice_of_rank_0(tmp_path: Path) -> None:
    """As a given layout that fits all ranks, with the numerics of the configuration."""
    config = auto(f"parallelism.hardware={profile_file(tmp_path)}")
    found = chosen(config)
    section = found.parallelism
    assert (section.layout, section.hardware) == ("given", config.parallelism.hardware)
    assert section.pp * section.dp_replicate * section.dp_shard * section.cp * section.tp == RANKS
    assert (found.model, found.optimizer, found.data) == (config.model, config.optimizer, config.data)
    assert found.training.global_batch_size == 8


@pytest.mark.slow
def test_given_keys_are_kept(tmp_path: Path) -> None:
    hardware = f"parallelism.hardware={profile_file(tmp_path)}"
    found = chosen(auto(hardware, "parallelism.cp=2", "parallelism.pp=2"), "parallelism.cp", "parallelism.pp")
    assert (found.parallelism.cp, found.parallelism.pp) == (2, 2)
    assert chosen(auto(hardware)).parallelism.cp == 1


def test_a_given_layout_stays() -> None:
    config = config_of(1, ())
    assert agree_on_layout(config, (), World(0, 0, 1, "cpu"), dist.HashStore()) is config


@pytest.mark.slow
def test_a_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks, since they measure the network together; another number of ranks is another machine."""
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path))
    measured: list[int] = []

    def calibrate(world: World, _store: dist.Store, _dtypes: list[str]) -> Profile | None:
        measured.append(world.rank)
        return profile("cpu") if world.rank == 0 else None

    monkeypatch.setattr(automatic, "calibrate", calibrate)
    first = chosen(auto())
    assert measured == [0, 1, 2, 3]
    assert chosen(auto()) == first
    assert measured == [0, 1, 2, 3]
    assert [file.suffix for file in (tmp_path / "hardware").iterdir()] == [".toml"]
    agree_on_layout(auto(), (), World(0, 0, 1, "cpu"), dist.HashStore())
    assert measured == [0, 1, 2, 3, 0]


def test_all_ranks_report_that_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "device_memory_bytes", lambda _device: 2**20)
    store, config = dist.HashStore(), auto(f"parallelism.hardware={profile_file(tmp_path)}")
    errors = []
    for rank in range(RANKS):
        with pytest.raises(UsageError, match="no layout of 4 ranks fits") as raised:
            agree_on_layout(config, (), World(rank, rank, RANKS, "cpu", RANKS), store)
        errors.append(raised.value)
    assert len({str(error) for error in errors}) == 1
    assert [error.is_shared for error in errors] == [False, True, True, True], "rank 0 prints it"


def test_the_batch_must_be_given() -> None:
    arguments = ["--model.flavor=debug", "--training.local_batch_size=1", "--parallelism.layout=auto"]
    with pytest.raises(ConfigError, match=r"training\.global_batch_size = -1"):
        load_config(arguments, world_size=RANKS, device_type="cpu", checks_files=False)
