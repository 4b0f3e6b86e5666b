"""The verdict on the planned memory, the choice of local_batch_size = -1, the message of a run out of memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.reference import small_config
from titanlite.config.schema import JobConfig
from titanlite.parallel.mesh import Mesh
from titanlite.planning import automatic
from titanlite.planning import estimate as estimate_module
from titanlite.planning.automatic import agree_on_memory, fit_local_batch_size
from titanlite.planning.estimate import estimate
from titanlite.planning.memory_check import Need, explained_out_of_memory, plan_memory, verdict
from titanlite.planning.pipeline_order import Action, schedule_order
from titanlite.planning.rank_memory import Memory
from titanlite.planning.search import with_settings
from titanlite.planning.stages import split_by_parameters
from titanlite.ranks.distributed import World
from titanlite.runtime.errors import ConfigError, UserError
from titanlite.runtime.memory import GIB, USABLE

ITEMS = {"parameters": 4 * GIB, "optimizer": 8 * GIB, "activations": 6 * GIB}


def need(rank: int, lower_bound: int, available: int, device: int | None = None) -> Need:
    return Need(rank, "node1", rank if device is None else device, lower_bound * GIB, ITEMS, available * GIB)


def config_with(check: str) -> JobConfig:
    config = small_config(1)
    return replace(config, memory=replace(config.memory, check=check))


def test_a_run_that_is_certainly_too_large_is_refused_with_items_and_remedies() -> None:
    refused, lines = verdict(config_with("refuse"), [need(0, 12, 40), need(1, 12, 11), need(2, 12, 40)])
    assert refused
    assert lines == [
        "the model does not fit: rank 1 on node1 needs at least 12.0 GiB and has 11.0 GiB; nothing was allocated",
        "  largest items of the plan, per rank: optimizer 8.0 GiB, activations 6.0 GiB, parameters 4.0 GiB",
        "  remedy: a larger parallelism.dp_shard, tp or pp (more ranks share the model)",
        '  remedy: training.dtype = "bfloat16" (less precise updates)',
        *("  remedy: a smaller model (model.flavor)", '  or start anyway, with memory.check = "warn"'),
    ]
    refused, lines = verdict(config_with("warn"), [need(0, 12, 11)])
    assert not refused
    assert 'the run starts anyway (memory.check = "warn")' in lines[0]


def test_the_ranks_of_a_node_share_its_memory() -> None:
    assert verdict(config_with("refuse"), [need(0, 6, 100, device=0), need(1, 6, 100, device=0)]) == (False, [])
    refused, lines = verdict(config_with("refuse"), [need(0, 6, 11, device=0), need(1, 6, 11, device=0)])
    assert refused
    assert "ranks 0 to 1 on node1 need at least 12.0 GiB and have 11.0 GiB" in lines[0]


def test_a_peak_above_the_usable_share_is_a_warning() -> None:
    assert verdict(config_with("refuse"), [need(0, 12, 20)]) == (False, [])  # 18 GiB, exactly 90 %
    assert not verdict(config_with("refuse"), [need(0, 12, 12)])[0]  # it certainly needs no more than it has
    refused, lines = verdict(config_with("refuse"), [need(0, 12, 19)])
    assert not refused
    assert lines[0].startswith(
        "the run may be out of memory: rank 0 on node1 needs about 18.0 GiB and has 19.0 GiB (90%"
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", [[], ["parallelism.pp=2"], ["parallelism.dp_replicate=2", "optimizer.name=AdamW"]])
def test_the_lower_bound_is_below_the_planned_peak(layout: list[str], recompute: str) -> None:
    config = small_config(2, "training.seq_len=64", f"activation_checkpoint.mode={recompute}", *layout)
    for rank in estimate(config, 2, device_type="cpu").ranks:
        memory = rank.memory
        assert memory.parameters + memory.optimizer + memory.gradients <= memory.lower_bound <= memory.total


def planned(config: JobConfig, rows: int) -> Memory:
    fixed = replace(config, training=replace(config.training, local_batch_size=rows))
    return estimate(fixed, 2, device_type="cpu").largest.memory


def test_the_local_batch_is_the_largest_that_fits_without_much_filler() -> None:
    config = small_config(2, "training.global_batch_size=24", "training.local_batch_size=-1")
    enough = round(planned(config, 4).total / USABLE) + 1
    fitted = [fit_local_batch_size(config, 2, device_type="cpu", memory_bytes=size) for size in (enough, enough - 2, 1)]
    assert fitted == [4, 3, 1]  # of 24 / 2 sequences
    assert fit_local_batch_size(config, 2, device_type="cpu", memory_bytes=2**50) == 12
    uneven = small_config(3, "training.global_batch_size=32", "training.local_batch_size=-1")
    assert fit_local_batch_size(uneven, 3, device_type="cpu", memory_bytes=2**50) == 11
    half = round(planned(uneven, 10).total / USABLE) + 1
    assert fit_local_batch_size(uneven, 3, device_type="cpu", memory_bytes=half) == 6  # 2 x 6 for 11


def test_the_choice_does_not_list_the_microbatches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(2, f"training.global_batch_size={2**20}", "training.local_batch_size=-1")
    listed = 0

    def counted(*arguments: Any) -> list[list[Action]]:
        nonlocal listed
        order = schedule_order(*arguments)
        listed += sum(map(len, order))
        return order

    monkeypatch.setattr(estimate_module, "schedule_order", counted)
    fit_local_batch_size(config, 2, device_type="cpu", memory_bytes=GIB)
    assert 0 < listed <= 2 * 21, "a forward and a backward pass for each step of a bisection of 2^19"


def test_all_ranks_take_the_local_batch_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config(2, "training.global_batch_size=24", "training.local_batch_size=-1")
    shared = 2 * (round(planned(config, 6).total / USABLE) + 1)
    store = dist.HashStore()
    monkeypatch.setattr(automatic, "device_memory_bytes", lambda _: shared)
    with caplog.at_level("INFO"):
        first = agree_on_memory(config, World(0, 0, 2, "cpu", 2), store)
    assert "local_batch_size = -1: 6 sequences per microbatch, accumulation 2; planned peak" in caplog.text
    monkeypatch.setattr(automatic, "device_memory_bytes", lambda _: 1)
    assert agree_on_memory(config, World(1, 1, 2, "cpu", 2), store) == first
    assert first.training.local_batch_size == 6
    assert agree_on_memory(first, World(0, 0, 2, "cpu", 2), store) is first


def test_stages_of_equal_time_that_do_not_fit_give_way_to_stages_of_equal_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same on all ranks. A larger head is as large as the embedding, and takes longer."""
    settings = ("model.n_layers=8", "model.vocab_size=4096", "parallelism.pp=2", "training.global_batch_size=8")
    config = small_config(2, *settings, "training.local_batch_size=8")
    by_size = with_settings(config, {"parallelism.pp_split": split_by_parameters(config)})
    peaks = [estimate(each, 2, device_type="cpu").largest.memory.total for each in (config, by_size)]
    assert peaks[0] > peaks[1]
    for share, expected in ((1.01, config), (0.99, by_size)):
        memory, store = round(2 * share * peaks[0] / USABLE), dist.HashStore()
        monkeypatch.setattr(automatic, "device_memory_bytes", lambda _, memory=memory: memory)
        with caplog.at_level("INFO"):
            assert agree_on_memory(config, World(0, 0, 2, "cpu", 2), store) == expected
        assert ("pp_split balances parameters" in caplog.text) == (expected is by_size)
        monkeypatch.setattr(automatic, "device_memory_bytes", lambda _: 2**50)
        assert agree_on_memory(config, World(1, 1, 2, "cpu", 2), store) == expected
    assert agree_on_memory(by_size, World(0, 0, 2, "cpu", 2), store) is by_size


def test_a_failed_allocation_shows_the_plan_beside_the_peak() -> None:
    config, memory = small_config(1), planned(small_config(2), 1)
    world = World(3, 0, 4, "cpu")
    with pytest.raises(UserError) as raised, explained_out_of_memory(config, memory, world, lambda: "in step 7"):
        torch.empty(2**60, dtype=torch.uint8)
    head, items, *rest = str(raised.value).splitlines()
    assert head.startswith("rank 3 is out of memory in step 7: planned 0.0 GiB, peak ")
    assert items.startswith("  largest items of the plan: ")
    assert [line[:9] for line in rest[:-1]] == ["  remedy:"] * 3
    assert "can't allocate memory" in rest[-1]
    with pytest.raises(UserError, match=r"\n\(MemoryError\)$"), explained_out_of_memory(config, None, world, str):
        raise MemoryError  # without a text
    with pytest.raises(UserError, match="out of memory"), explained_out_of_memory(config, None, world, str):
        raise RuntimeError("stage 0 failed") from MemoryError()  # as torch's pipelines do
    with pytest.raises(RuntimeError, match="shapes"), explained_out_of_memory(config, memory, world, str):
        raise RuntimeError("shapes")


def test_a_family_without_an_estimate_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(estimate_module, "DecoderConfig", str)
    config = small_config(2, "training.global_batch_size=24", "training.local_batch_size=-1")
    assert plan_memory(config, Mesh(config.parallelism, World(0, 0, 2, "cpu"))) is None
    assert "the family llama3 cannot be planned, so it is not checked" in caplog.text
    with pytest.raises(ConfigError, match="only for families whose hyper-parameters are a DecoderConfig"):
        fit_local_batch_size(config, 2, device_type="cpu", memory_bytes=2**40)
