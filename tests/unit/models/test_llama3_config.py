"""Llama 3: published sizes, FLOPs, and the rules for hyper-parameters."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.models.counting import count_parameters
from titanlite.models.family import ModelConfig, resolve_model
from titanlite.models.llama3 import FLAVORS, LLAMA3
from titanlite.models.registry import FAMILIES, check_model

PUBLISHED = {  # flavor: parameters, dim, layers, heads, key/value heads, feed-forward, rotary factor, tied
    "debug": (6_139_136, 256, 6, 16, 16, 768, 1.0, False),
    "1B": (1_235_814_400, 2048, 16, 32, 8, 8192, 32.0, True),
    "3B": (3_212_749_824, 3072, 28, 24, 8, 8192, 32.0, True),
    "8B": (8_030_261_248, 4096, 32, 32, 8, 14_336, 8.0, False),
    "70B": (70_553_706_496, 8192, 80, 64, 8, 28_672, 8.0, False),
    "405B": (405_853_388_800, 16_384, 126, 128, 8, 53_248, 8.0, False),
}


def test_published_sizes_cover_every_flavor() -> None:
    assert FLAVORS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_sizes(flavor: str) -> None:
    expected, *hyper = PUBLISHED[flavor]
    config = FLAVORS[flavor]
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "rope_scaling_factor", "tie_embeddings")
    assert [getattr(config, name) for name in names] == hyper
    assert config.vocab_size == (2000 if flavor == "debug" else 128_256)
    assert (config.norm_eps, config.rope_theta) == (1e-5, 500_000.0)
    assert (config.rope_low_freq_factor, config.rope_high_freq_factor) == (1.0, 4.0)
    assert (config.rope_original_seq_len, config.max_seq_len) == (8192, 131_072)
    assert count_parameters(LLAMA3, config) == expected
    assert LLAMA3.check(config, 8192, 8, 1) == []


def test_overrides_replace_values_of_the_flavor() -> None:
    family, config = resolve_model(ModelConfig(flavor="8B", overrides={"vocab_size": 4096, "norm_eps": 1e-6}))
    assert family is FAMILIES["llama3"]
    assert config == replace(FLAVORS["8B"], vocab_size=4096, norm_eps=1e-6)
    assert resolve_model(ModelConfig()) == (family, FLAVORS["debug"])


def test_flops_of_8b() -> None:
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096  # without the embedding and the norms
    assert LLAMA3.flops_per_token(FLAVORS["8B"], 8192) == 6 * weights + 12 * 32 * 8192 * 4096


INVALID: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, f"model.{name}") for name in ("dim", "n_layers", "n_heads", "n_kv_heads") for value in (0, -8)),
    *(({name: 0}, f"model.{name}") for name in ("ffn_dim", "rope_original_seq_len")),
    *(({"norm_eps": value}, "model.norm_eps") for value in (0.0, -1e-5, float("nan"), float("inf"))),
    *(({"rope_theta": value}, "model.rope_theta") for value in (0.0, 1.0, float("nan"))),
    *(({"rope_scaling_factor": value}, "model.rope_scaling_factor") for value in (0.5, float("nan"), float("inf"))),
    ({"rope_low_freq_factor": 4.0}, "model.rope_low_freq_factor"),
    ({"rope_high_freq_factor": 1.0}, "model.rope_low_freq_factor"),
    ({"rope_low_freq_factor": float("nan")}, "model.rope_low_freq_factor"),
    ({"n_kv_heads": 32}, "model.n_kv_heads"),
    ({"dim": 48}, "model.dim"),  # heads of 3
]


def test_invalid_hyper_parameters_are_named() -> None:
    for overrides, key in INVALID:
        problems = check_model(ModelConfig(overrides=overrides), seq_len=128, tp=1, pp=1)
        assert {problem.key for problem in problems} == {key}, overrides


def test_all_problems_are_reported_at_once() -> None:
    overrides = {"dim": -1, "ffn_dim": 0, "norm_eps": 0.0, "rope_scaling_factor": 0.0, "max_seq_len": 4}
    problems = check_model(ModelConfig(overrides=overrides), seq_len=128, tp=1, pp=1)
    assert {problem.key for problem in problems} == {
        "model.dim",
        "model.ffn_dim",
        "model.norm_eps",
        "model.rope_scaling_factor",
        "training.seq_len",
    }


@pytest.mark.parametrize(("dim", "nearest"), [(250, (224, 256)), (48, (32, 64)), (258, (256, 288))])
def test_the_remedy_for_a_width_is_valid(dim: int, nearest: tuple[int, int]) -> None:
    (problem,) = check_model(ModelConfig(overrides={"dim": dim}), seq_len=128, tp=1, pp=1)
    assert problem.remedy == f"set model.dim = {nearest[0]} or {nearest[1]}, or change model.n_heads"
    for valid in nearest:
        assert check_model(ModelConfig(overrides={"dim": valid}), seq_len=128, tp=1, pp=1) == []


@pytest.mark.parametrize(
    ("tp", "overrides", "keys"),
    [(2, {}, []), (16, {}, []), (32, {}, ["model.n_heads", "model.n_kv_heads"]), (4, {"vocab_size": 131}, [])],
)
def test_tensor_parallelism_requires_divisible_dimensions(tp: int, overrides: dict[str, Any], keys: list[str]) -> None:
    problems = check_model(ModelConfig(overrides=overrides), seq_len=128, tp=tp, pp=1)
    assert [problem.key for problem in problems] == keys


def test_each_tensor_parallel_rank_needs_a_part_of_the_vocabulary() -> None:
    overrides = {"n_heads": 8, "n_kv_heads": 8, "vocab_size": 9}
    (problem,) = check_model(ModelConfig(overrides=overrides), seq_len=128, tp=8, pp=1)
    assert problem.key == "model.vocab_size"
    assert check_model(ModelConfig(overrides=overrides | {"vocab_size": 15}), seq_len=128, tp=8, pp=1) == []
