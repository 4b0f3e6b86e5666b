"""The changes that a comparison makes to a configuration, and the properties that shrinking keeps."""

from dataclasses import replace

import pytest
import torch

from tests.configuration import EACH_SCHEDULE
from tests.distributed.reference import small_config
from titanlite.models.family import ModelConfig, resolve_model
from titanlite.models.registry import FAMILIES, check_model
from titanlite.optim.muon import muon_dtype
from titanlite.tools.parity.layouts import ONE_PROCESS, Layout, candidate_layouts, check_layout, layout_from_text
from titanlite.tools.parity.shrink import (
    comparable_config,
    describe_shrinking,
    gradient_config,
    resolved_config,
    shrink_config,
    shrink_model,
    size_alike,
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 12])
@pytest.mark.parametrize("size", [1, 7, 48, 81, 768, 14_336])
def test_a_smaller_size_has_the_same_divisors(size: int, ranks: int) -> None:
    small = size_alike(size, 32, ranks)
    assert min(size, 32) <= small <= size
    assert small < 32 + ranks or small == size
    for divisor in (n for n in range(1, ranks + 1) if ranks % n == 0):
        assert (small % divisor == 0) == (size % divisor == 0)


@pytest.mark.parametrize(("name", "flavor"), [(name, size) for name in FAMILIES for size in FAMILIES[name].flavors])
def test_a_shrunk_model_accepts_the_same_tp_degrees(name: str, flavor: str) -> None:
    for ranks in (1, 2, 4, 6, 8):
        verify_shrunk(name, flavor, ranks)


def verify_shrunk(name: str, flavor: str, ranks: int) -> None:
    family, model = resolve_model(ModelConfig(name, flavor))
    small = shrink_model(model, ranks)
    assert family.check(small, 32, 1, 1) == []
    assert small.dim <= 128
    assert (small.vocab_size, small.tie_embeddings) == (model.vocab_size, model.tie_embeddings)
    assert (small.n_heads > small.n_kv_heads) == (model.n_heads > model.n_kv_heads)
    assert small.n_layers == min(model.n_layers, 2 * ranks)
    for tp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        section = ModelConfig(name, flavor)
        shrunk = ModelConfig(name, flavor, overrides={name: getattr(small, name) for name in vars(small)})
        accepted = check_model(section, seq_len=64, tp=tp, pp=1) == []
        assert (check_model(shrunk, seq_len=64, tp=tp, pp=1) == []) == accepted


@EACH_SCHEDULE
@pytest.mark.parametrize("sync", ["hybrid", "every"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_shrunk_batch_fits_every_layout(ranks: int, sync: str) -> None:
    config = small_config(
        1, "model.flavor=debug", "model.n_layers=40", "model.n_kv_heads=8", "model.n_heads=8", "model.dim=128",
        "training.global_batch_size=3", "data.num_streams=8",
        "parallelism.pp_microbatch_size=2", f"parallelism.gradient_sync={sync}",
    )  # fmt: skip
    small = resolved_config(shrink_config(comparable_config(config, ranks), ranks))
    refused = {
        str(layout): check_layout(small, layout)
        for candidates in candidate_layouts(ranks, "1F1B")
        for layout in candidates
        if check_layout(small, layout)
    }
    assert refused == {}


@pytest.mark.parametrize("form", ["heads", "gather"])
def test_a_shrunk_sequence_is_divided_over_three_ranks(form: str) -> None:
    settings = ("training.seq_len=768", f"parallelism.context_parallel={form}", "model.n_heads=3", "model.n_kv_heads=3")
    config = small_config(1, *settings, "model.dim=24", "model.max_seq_len=768")
    small = resolved_config(shrink_config(comparable_config(config, 3), 3))
    assert small.training.seq_len < 48
    layout = layout_from_text("1x1x1x1-cp3", "1F1B")
    assert isinstance(layout, Layout)
    assert check_layout(small, layout) == []


def test_shrinking_lists_its_changes_and_keeps_the_rest() -> None:
    config = small_config(1, "model.ffn_dim=480", "training.local_batch_size=4", "model.rope_scaling_factor=8.0")
    small = shrink_config(config, 2)
    assert describe_shrinking(config, small) == (
        "model.ffn_dim 480 -> 64, model.vocab_size 131 -> 32769, training.local_batch_size 4 -> 1, "
        "training.global_batch_size 16 -> 4"
    )
    assert resolve_model(small.model)[1].rope_scaling_factor == 8.0
    assert small.data == config.data
    assert describe_shrinking(small, shrink_config(small, 2)).startswith("nothing")


def test_updates_of_muon_are_compared_in_float64() -> None:
    config = small_config(1, "optimizer.name=Muon", "training.mixed_precision_param=bfloat16")
    assert muon_dtype(config.optimizer, torch.float64) == torch.bfloat16
    assert muon_dtype(resolved_config(comparable_config(config, 2)).optimizer, torch.float64) == torch.float64


def test_an_automatic_batch_size_is_the_same_for_all_layouts() -> None:
    config = small_config(1)
    config = replace(config, training=replace(config.training, global_batch_size=-1, local_batch_size=2, max_norm=1.0))
    fitted = replace(config, training=replace(config.training, local_batch_size=-1))
    assert comparable_config(fitted, 4).training.local_batch_size == 1, "layouts are compared, not devices"
    same = resolved_config(comparable_config(config, 4))
    assert same.training.global_batch_size == 8
    assert same.data.num_streams == config.data.num_streams
    assert (same.training.max_norm, same.optimizer) == (1.0, config.optimizer)
    steps = gradient_config(same)
    assert (steps.training.max_norm, steps.optimizer.name, steps.optimizer.weight_decay) == (0.0, "SGD", 0.0)
    assert check_layout(same, ONE_PROCESS) == []
