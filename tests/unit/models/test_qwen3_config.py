"""Qwen3: published sizes, and the rules specific to it."""

from typing import Any

import pytest

from tests.unit.models.counting import count_parameters
from titanlite.models.family import ModelConfig
from titanlite.models.qwen3 import FLAVORS, QWEN3, Qwen3Config
from titanlite.models.registry import check_model

PUBLISHED = {  # flavor: parameters, dim, layers, heads, key/value heads, feed-forward, tied
    "0.6B": (596_049_920, 1024, 28, 16, 8, 3072, True),
    "1.7B": (1_720_574_976, 2048, 28, 16, 8, 6144, True),
    "4B": (4_022_468_096, 2560, 36, 32, 8, 9728, True),
    "8B": (8_190_735_360, 4096, 36, 32, 8, 12_288, False),
    "14B": (14_768_307_200, 5120, 40, 40, 8, 17_408, False),
    "32B": (32_762_123_264, 5120, 64, 64, 8, 25_600, False),
}


def parameters_by_arithmetic(config: Qwen3Config) -> int:
    """Count the parameters tensor by tensor, as described in the technical report."""
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    block = [
        *[config.dim * queries, config.dim * keys, config.dim * keys, queries * config.dim],
        *[config.head_dim, config.head_dim],  # the norms of queries and keys
        *[config.dim * config.ffn_dim] * 3,
        *[config.dim, config.dim],
    ]
    vocabulary = config.vocab_size * config.dim
    return config.n_layers * sum(block) + vocabulary * (1 if config.tie_embeddings else 2) + config.dim


def test_published_sizes_cover_every_flavor() -> None:
    assert FLAVORS.keys() == {"debug", *PUBLISHED}


@pytest.mark.parametrize("flavor", PUBLISHED)
def test_published_sizes(flavor: str) -> None:
    expected, *hyper = PUBLISHED[flavor]
    config = FLAVORS[flavor]
    names = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "tie_embeddings")
    assert [getattr(config, name) for name in names] == hyper
    assert (config.head_dim, config.vocab_size, config.max_seq_len) == (128, 151_936, 40_960)
    assert (config.norm_eps, config.rope_theta) == (1e-6, 1_000_000.0)
    assert count_parameters(QWEN3, config) == expected
    assert parameters_by_arithmetic(config) == expected
    assert QWEN3.check(config, 8192, 8, 1) == []


def test_the_debug_flavor_is_small_and_sets_its_head_dim() -> None:
    config = FLAVORS["debug"]
    assert config.n_heads * config.head_dim != config.dim
    assert config.n_heads > config.n_kv_heads
    assert parameters_by_arithmetic(config) < 10e6


def test_flops_of_8b() -> None:
    weights = 8_190_735_360 - 151_936 * 4096 - 73 * 4096 - 36 * 2 * 128  # without the embedding and the norms
    assert QWEN3.flops_per_token(FLAVORS["8B"], 8192) == 6 * weights + 12 * 36 * 8192 * 32 * 128


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ({"head_dim": 0}, ["model.head_dim"]),
        ({"head_dim": -2}, ["model.head_dim"]),
        ({"head_dim": 7}, ["model.head_dim"]),
        ({"head_dim": 2}, []),
        ({"dim": 250}, []),  # not a multiple of n_heads
        ({"n_heads": 2**63 - 1}, ["model.n_heads"]),
        ({"dim": 0, "n_heads": 0, "norm_eps": 0.0}, ["model.dim", "model.n_heads", "model.norm_eps"]),
        ({"rope_theta": 1.0, "max_seq_len": 64}, ["model.rope_theta", "training.seq_len"]),
    ],
    ids=str,
)
def test_invalid_hyper_parameters_are_named(overrides: dict[str, Any], keys: list[str]) -> None:
    problems = check_model(ModelConfig("qwen3", "debug", overrides), seq_len=128, tp=1, pp=1)
    assert [problem.key for problem in problems] == keys
