"""Published sizes of all families, and the rules for hyper-parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from titanlite.models.family import Family, ModelConfig, resolve_model
from titanlite.models.registry import FAMILIES, check_model
from titanlite.runtime.errors import Problem

SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "tie_embeddings")
PUBLISHED: dict[tuple[str, str], tuple[Any, ...]] = {  # parameters, then SIZES
    ("llama3", "debug"): (6_139_136, 256, 6, 16, 16, 768, False),
    ("llama3", "1B"): (1_235_814_400, 2048, 16, 32, 8, 8192, True),
    ("llama3", "3B"): (3_212_749_824, 3072, 28, 24, 8, 8192, True),
    ("llama3", "8B"): (8_030_261_248, 4096, 32, 32, 8, 14_336, False),
    ("llama3", "70B"): (70_553_706_496, 8192, 80, 64, 8, 28_672, False),
    ("llama3", "405B"): (405_853_388_800, 16_384, 126, 128, 8, 53_248, False),
    ("mistral", "debug"): (6_925_568, 256, 6, 8, 4, 768, False),
    ("mistral", "7B-v0.1"): (7_241_732_096, 4096, 32, 32, 8, 14_336, False),
    ("mistral", "7B"): (7_248_023_552, 4096, 32, 32, 8, 14_336, False),
    ("mistral", "12B"): (12_247_782_400, 5120, 40, 32, 8, 14_336, False),
    ("mistral", "24B"): (23_572_403_200, 5120, 40, 32, 8, 32_768, False),
    ("qwen2", "debug"): (5_748_992, 256, 6, 8, 4, 768, False),
    ("qwen2", "0.5B"): (494_032_768, 896, 24, 14, 2, 4864, True),
    ("qwen2", "1.5B"): (1_543_714_304, 1536, 28, 12, 2, 8960, True),
    ("qwen2", "3B"): (3_085_938_688, 2048, 36, 16, 2, 11_008, True),
    ("qwen2", "7B"): (7_615_616_512, 3584, 28, 28, 4, 18_944, False),
    ("qwen2", "14B"): (14_770_033_664, 5120, 48, 40, 8, 13_824, False),
    ("qwen2", "32B"): (32_763_876_352, 5120, 64, 40, 8, 27_648, False),
    ("qwen2", "72B"): (72_706_203_648, 8192, 80, 64, 8, 29_568, False),
    ("qwen3", "debug"): (6_926_336, 256, 6, 8, 4, 768, False),
    ("qwen3", "0.6B"): (596_049_920, 1024, 28, 16, 8, 3072, True),
    ("qwen3", "1.7B"): (1_720_574_976, 2048, 28, 16, 8, 6144, True),
    ("qwen3", "4B"): (4_022_468_096, 2560, 36, 32, 8, 9728, True),
    ("qwen3", "8B"): (8_190_735_360, 4096, 36, 32, 8, 12_288, False),
    ("qwen3", "14B"): (14_768_307_200, 5120, 40, 40, 8, 17_408, False),
    ("qwen3", "32B"): (32_762_123_264, 5120, 64, 64, 8, 25_600, False),
    ("qwen3_moe", "debug"): (8_112_896, 256, 4, 4, 2, 256, False),
    ("qwen3_moe", "30B-A3B"): (30_532_122_624, 2048, 48, 32, 4, 768, False),
    ("qwen3_moe", "235B-A22B"): (235_093_634_560, 4096, 94, 64, 4, 1536, False),
    ("olmo2", "debug"): (6_142_208, 256, 6, 8, 8, 768, False),
    ("olmo2", "1B"): (1_484_916_736, 2048, 16, 16, 16, 8192, False),
    ("olmo2", "7B"): (7_298_617_344, 4096, 32, 32, 32, 11_008, False),
    ("olmo2", "13B"): (13_716_198_400, 5120, 40, 40, 40, 13_824, False),
    ("olmo2", "32B"): (32_234_279_936, 5120, 64, 40, 8, 27_648, False),
    ("olmo3", "debug"): (6_142_208, 256, 6, 8, 8, 768, False),
    ("olmo3", "7B"): (7_298_011_136, 4096, 32, 32, 32, 11_008, False),
    ("olmo3", "32B"): (32_233_522_176, 5120, 64, 40, 8, 27_648, False),
    ("smollm3", "debug"): (5_745_920, 256, 6, 8, 4, 768, False),
    ("smollm3", "3B"): (3_075_098_624, 2048, 36, 16, 4, 11_008, True),
    ("gemma2", "debug"): (6_928_640, 256, 6, 8, 4, 768, False),
    ("gemma2", "2B"): (2_614_341_888, 2304, 26, 8, 4, 9216, True),
    ("gemma2", "9B"): (9_241_705_984, 3584, 42, 16, 8, 14_336, True),
    ("gemma2", "27B"): (27_227_128_320, 4608, 46, 32, 16, 36_864, True),
    ("gemma3", "debug"): (6_929_408, 256, 6, 8, 4, 768, False),
    ("gemma3", "270M"): (268_098_176, 640, 18, 4, 1, 2048, True),
    ("gemma3", "1B"): (999_885_952, 1152, 26, 4, 1, 6912, True),
    # the published ones have 416,866,032 parameters more in the vision tower, and 1152 x (dim + 1) in the projector
    ("gemma3", "4B"): (3_880_263_168, 2560, 34, 8, 4, 10_240, True),
    ("gemma3", "12B"): (11_766_034_176, 3840, 48, 16, 8, 15_360, True),
    ("gemma3", "27B"): (27_009_346_304, 5376, 62, 32, 16, 21_504, True),
    ("olmoe", "debug"): (8_376_576, 256, 4, 4, 4, 256, False),
    ("gpt_oss", "debug"): (8_140_080, 256, 4, 4, 2, 256, False),
    ("gpt_oss", "20B"): (20_914_757_184, 2880, 24, 64, 8, 2880, False),
    ("gpt_oss", "120B"): (116_829_156_672, 2880, 36, 64, 8, 2880, False),
    ("deepseek_v3", "debug"): (4_653_952, 256, 4, 4, 4, 128, False),
    ("deepseek_v3", "16B-A3B"): (15_960_108_544, 2048, 27, 16, 16, 1408, False),
    ("deepseek_v3", "671B-A37B"): (671_026_404_352, 7168, 61, 128, 128, 2048, False),
    ("qwen3_5", "debug"): (4_452_880, 256, 4, 4, 2, 768, False),
    ("qwen3_5", "0.8B"): (752_393_024, 1024, 24, 8, 2, 3584, True),
    ("qwen3_5", "2B"): (1_881_825_088, 2048, 24, 8, 2, 6144, True),
    ("qwen3_5", "4B"): (4_205_751_296, 2560, 32, 16, 4, 9216, True),
    ("qwen3_5", "9B"): (8_953_803_264, 4096, 32, 16, 4, 12_288, False),
    ("qwen3_5", "27B"): (26_895_998_464, 5120, 64, 24, 4, 17_408, False),
    ("qwen3_5_moe", "debug"): (5_641_744, 256, 4, 4, 2, 128, False),
    ("qwen3_5_moe", "35B-A3B"): (34_660_610_688, 2048, 40, 16, 2, 512, False),
    ("qwen3_5_moe", "122B-A10B"): (122_111_526_912, 3072, 48, 32, 2, 1024, False),
    ("qwen3_5_moe", "397B-A17B"): (396_346_350_336, 4096, 60, 32, 2, 1024, False),
    ("qwen3_next", "debug"): (5_641_744, 256, 4, 4, 2, 128, False),
    ("qwen3_next", "80B-A3B"): (79_674_391_296, 2048, 48, 16, 2, 512, False),
    ("olmoe", "1B-7B"): (6_919_161_856, 2048, 16, 16, 16, 1024, False),
}
LLAMA3 = {"norm_eps": 1e-5, "rope_theta": 500_000.0, "max_seq_len": 131_072, "rope_original_seq_len": 8192}
LLAMA3 |= {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
QWEN3 = {"norm_eps": 1e-6, "rope_theta": 1_000_000.0, "max_seq_len": 40_960, "rope_scaling_factor": 1.0}
OLMOE = {"norm_eps": 1e-5, "rope_theta": 10_000.0, "max_seq_len": 4096, "n_active_experts": 8}
OLMO2 = {"norm_eps": 1e-6, "rope_theta": 500_000.0, "max_seq_len": 4096}
SMOLLM3 = {"norm_eps": 1e-6, "rope_theta": 5_000_000.0, "max_seq_len": 65_536, "no_rope_interval": 4}
GEMMA = {"norm_eps": 1e-6, "norm_offset": 1.0}
GPT_OSS = {"norm_eps": 1e-5, "rope_theta": 150_000.0, "max_seq_len": 131_072, "rope_scaling_factor": 32.0}
HYBRID = {"head_dim": 256, "rope_theta": 1e7, "partial_rotary_factor": 0.25, "full_interval": 4, "norm_offset": 1.0}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama3": LLAMA3 | {"vocab_size": 128_256},
    "mistral": {"head_dim": 128, "norm_eps": 1e-5},
    "qwen2": {"rope_theta": 1_000_000.0},
    "olmo2": OLMO2 | {"vocab_size": 100_352},
    "olmo3": OLMO2 | {"vocab_size": 100_278, "max_seq_len": 65_536},
    "smollm3": SMOLLM3 | {"vocab_size": 128_256},
    "qwen3": QWEN3 | {"vocab_size": 151_936, "head_dim": 128},
    "qwen3_moe": QWEN3 | {"vocab_size": 151_936, "head_dim": 128, "n_experts": 128, "n_active_experts": 8},
    "gemma2": GEMMA | {"rope_theta": 10_000.0, "max_seq_len": 8192, "score_cap": 50.0, "logit_cap": 30.0},
    "gemma3": GEMMA | {"rope_theta": 1_000_000.0, "rope_local_theta": 10_000.0, "logit_cap": 0.0},
    "gpt_oss": GPT_OSS | {"vocab_size": 201_088, "head_dim": 64, "n_active_experts": 4},
    "olmoe": OLMOE | {"vocab_size": 50_304, "n_experts": 64},
    "qwen3_5": HYBRID | {"vocab_size": 248_320},
    "qwen3_5_moe": HYBRID | {"vocab_size": 248_320, "n_shared_experts": 1},
    "qwen3_next": HYBRID | {"vocab_size": 151_936, "n_experts": 512, "n_active_experts": 10},
    "deepseek_v3": {"bias_rate": 0.001, "scoring": "sigmoid", "rope_mscale": 1.0},
}
OF_DEBUG = {"vocab_size": 2000, "head_dim": 64, "n_experts": 8, "n_active_experts": 2}
LLAMA3_FACTORS = {"debug": 1.0, "1B": 32.0, "3B": 32.0, "8B": 8.0, "70B": 8.0, "405B": 8.0}


OF_FLAVOR: dict[str, dict[tuple[str, ...], dict[str, Any]]] = {  # of config.json and of the training: docs/models.md
    "qwen2": {
        ("debug", "0.5B", "3B"): {"max_seq_len": 32_768, "norm_eps": 1e-6},
        ("1.5B", "7B"): {"max_seq_len": 131_072, "norm_eps": 1e-6},
        ("14B", "32B", "72B"): {"max_seq_len": 131_072, "norm_eps": 1e-5},
    },
    "mistral": {("7B-v0.1", "7B", "24B"): {"max_seq_len": 32_768}, ("12B",): {"max_seq_len": 128_000}},
    "olmo2": {("debug", "1B", "7B", "13B", "32B"): {"init_std": 0.02, "init_by_depth": False}},
    "olmo3": {("debug", "7B", "32B"): {"init_std": 0.02, "init_by_depth": False}},
    "olmoe": {
        ("debug", "1B-7B"): {
            "init_std": 0.02, "init_by_depth": False, "balance_loss": 0.01 / 16, "z_loss": 0.001 / 16
        }
    },
    "gpt_oss": {("debug", "20B", "120B"): {"balance_loss": 0.001, "z_loss": 0.0}},
    "deepseek_v3": {
        ("debug",): {"balance_loss": 0.0001, "init_std": 0.02, "init_by_depth": True},
        ("16B-A3B",): {"balance_loss": 0.001, "init_std": 0.02, "init_by_depth": True},
        ("671B-A37B",): {"balance_loss": 0.0001, "init_std": 0.006, "init_by_depth": False},
    },
}  # fmt: skip


def count_parameters(family: Family, config: Any) -> int:
    """Count a configuration's parameters from models of one and two blocks on the meta device behind the first ones
    that differ; all others are alike, or in groups with one layer of full attention."""
    period = config.full_interval if any(config.linear_layers) else 1
    counts, first = [], config.n_dense_layers + period
    for n_layers in (first, first + period):
        with torch.device("meta"):
            model = family.build(replace(config, n_layers=n_layers))
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    one, two = counts
    return one + (config.n_layers - first) // period * (two - one)


def test_published_sizes_cover_every_flavor() -> None:
    assert {*PUBLISHED} == {(name, flavor) for name, family in FAMILIES.items() for flavor in family.flavors}


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED)
def test_published_sizes(name: str, flavor: str) -> None:
    family, (parameters, *sizes) = FAMILIES[name], PUBLISHED[name, flavor]
    config = family.flavors[flavor]
    assert [getattr(config, size) for size in SIZES] == sizes
    shared = OF_FAMILY[name]
    shared = shared | {key: OF_DEBUG[key] for key in OF_DEBUG.keys() & shared} if flavor == "debug" else shared
    assert {key: getattr(config, key) for key in shared} == shared
    if name == "llama3":
        assert config.rope_scaling_factor == LLAMA3_FACTORS[flavor]
    assert count_parameters(family, config) == parameters
    assert family.check(config, 4096, min(2, config.n_kv_heads), 1) == []


@pytest.mark.parametrize(
    ("name", "without", "heads"),
    [
        ("llama3", 128_256 * 4096 + 65 * 4096, 32 * 4096),  # the embedding and the norms; layers x heads' width
        ("qwen3", 151_936 * 4096 + 73 * 4096 + 36 * 2 * 128, 36 * 32 * 128),
    ],
)
def test_flops_of_8b(name: str, without: int, heads: int) -> None:
    weights = PUBLISHED[name, "8B"][0] - without
    assert FAMILIES[name].flops_per_token(FAMILIES[name].flavors["8B"], 8192) == 6 * weights + 12 * 8192 * heads


@pytest.mark.parametrize("name", FAMILIES)
def test_values_of_each_flavor(name: str) -> None:
    expected = {flavor: values for flavors, values in OF_FLAVOR.get(name, {}).items() for flavor in flavors}
    for flavor, config in FAMILIES[name].flavors.items():
        values = expected.get(flavor, {"init_std": 0.02})
        assert {key: getattr(config, key) for key in values} == values, flavor
        if name not in OF_FLAVOR:
            assert config.init_by_depth


def test_overrides_replace_values_of_the_flavor() -> None:
    family, config = resolve_model(ModelConfig(flavor="8B", overrides={"vocab_size": 4096, "norm_eps": 1e-6}))
    assert family is FAMILIES["llama3"]
    assert config == replace(family.flavors["8B"], vocab_size=4096, norm_eps=1e-6)
    assert resolve_model(ModelConfig()) == (family, family.flavors["debug"])


def problems_of(family: str, overrides: dict[str, Any], tp: int = 1) -> list[Problem]:
    return check_model(ModelConfig(family, "debug", overrides), seq_len=128, tp=tp, pp=1)


NAN, INF = float("nan"), float("inf")
INVALID: list[tuple[str, dict[str, Any], str]] = [  # family, overrides, keys of the problems
    *(("llama3", {name: value}, name) for name in ("dim", "n_layers", "n_heads", "n_kv_heads") for value in (0, -8)),
    *(("llama3", {name: 0}, name) for name in ("ffn_dim", "rope_original_seq_len")),
    *(("llama3", {"norm_eps": value}, "norm_eps") for value in (0.0, -1e-5, NAN, INF)),
    *(("llama3", {"rope_theta": value}, "rope_theta") for value in (0.0, 1.0, NAN)),
    *(("llama3", {"rope_scaling_factor": value}, "rope_scaling_factor") for value in (0.5, NAN, INF)),
    ("llama3", {"rope_low_freq_factor": 4.0}, "rope_low_freq_factor"),
    ("llama3", {"rope_high_freq_factor": 1.0}, "rope_low_freq_factor"),
    ("llama3", {"rope_low_freq_factor": NAN}, "rope_low_freq_factor"),
    ("llama3", {"n_kv_heads": 32}, "n_kv_heads"),
    ("llama3", {"dim": 48}, "dim"),  # heads of 3
    ("llama3", {"dim": -1, "ffn_dim": 0, "norm_eps": 0.0, "max_seq_len": 4}, "dim ffn_dim norm_eps training.seq_len"),
    *(("qwen3", {"head_dim": value}, "head_dim") for value in (0, -2, 7)),
    ("qwen3", {"head_dim": 2}, ""),
    ("qwen3", {"dim": 250}, ""),  # not a multiple of n_heads
    ("qwen3", {"n_heads": 2**63 - 1}, "n_heads"),
    ("qwen3", {"dim": 0, "n_heads": 0, "norm_eps": 0.0}, "dim n_heads norm_eps"),
    ("qwen3", {"rope_theta": 1.0, "max_seq_len": 64}, "rope_theta training.seq_len"),
    *(("qwen3_moe", {"n_active_experts": value}, "n_active_experts") for value in (0, 9)),
    ("qwen3_moe", {"n_experts": 0}, "n_experts"),
    ("qwen3_moe", {"balance_loss": INF}, "balance_loss"),
    *(("olmoe", {name: value}, name) for name, value in {"dim": 258, "n_active_experts": 9, "z_loss": -1.0}.items()),
    *(("smollm3", {"no_rope_interval": value}, "no_rope_interval") for value in (-1, 0, 1)),
    ("qwen2", {"dim": 250}, "dim"),
    ("mistral", {"sliding_window": -1}, "sliding_window"),
    ("mistral", {"head_dim": 7}, "head_dim"),
    *(
        ("olmo3", {name: value}, name)
        for name, value in {"full_interval": 0, "rope_beta_slow": 40.0, "dim": 250}.items()
    ),
    ("olmo2", {"dim": 250}, "dim"),
    *(
        ("gpt_oss", {name: value}, name)
        for name, value in {"head_dim": 7, "n_active_experts": 9, "rope_beta_slow": 40.0, "sliding_window": 0}.items()
    ),
    *(("gemma2", {name: -1.0}, name) for name in ("score_cap", "logit_cap")),
    (
        "gemma2",
        {"sliding_window": 0, "head_dim": 7, "query_pre_attn_scalar": 0},
        "sliding_window head_dim query_pre_attn_scalar",
    ),
    *(("gemma3", {name: 0.5}, name) for name in ("rope_local_theta", "rope_scaling_factor")),
    *(("olmoe", {name: 1.0}, name) for name in ("bias_rate", "rope_theta")),
    *(
        ("deepseek_v3", {name: value}, name)
        for name, value in {
            "n_kv_heads": 2,
            "n_groups": 3,
            "n_active_groups": 5,
            "n_active_experts": 5,
            "n_dense_layers": 4,
            "qk_rope_head_dim": 7,
            "v_head_dim": 65,
            "z_loss": 0.1,
            "route_scale": 0.0,
            "q_lora_rank": -1,
            "n_further_tokens": 2,
        }.items()
    ),
    ("deepseek_v3", {"n_groups": 8}, "n_groups"),
    *(
        ("qwen3_5", {name: value}, name)
        for name, value in {
            "full_interval": 0,
            "partial_rotary_factor": 0.01,
            "linear_value_heads": 6,
            "linear_taps": 0,
        }.items()
    ),
    ("qwen3_next", {"n_shared_experts": 0}, "n_shared_experts"),
    ("qwen3_5", {"full_interval": 1, "linear_value_heads": 6}, ""),
]


def test_invalid_hyper_parameters_are_named() -> None:
    for family, overrides, keys in INVALID:
        expected = {key if "." in key else f"model.{key}" for key in keys.split()}
        assert {problem.key for problem in problems_of(family, overrides)} == expected, (family, overrides)


@pytest.mark.parametrize(("dim", "nearest"), [(250, (224, 256)), (48, (32, 64)), (258, (256, 288))])
def test_the_remedy_for_a_width_is_valid(dim: int, nearest: tuple[int, int]) -> None:
    (problem,) = problems_of("llama3", {"dim": dim})
    assert problem.remedy == f"set model.dim = {nearest[0]} or {nearest[1]}, or change model.n_heads"
    assert [problems_of("llama3", {"dim": valid}) for valid in nearest] == [[], []]


@pytest.mark.parametrize(
    ("family", "tp", "overrides", "keys"),
    [
        ("llama3", 2, {}, []),
        ("llama3", 16, {}, []),
        ("llama3", 32, {}, ["model.n_heads", "model.n_kv_heads"]),
        ("llama3", 4, {"vocab_size": 131}, []),
        ("llama3", 8, {"n_heads": 8, "n_kv_heads": 8, "vocab_size": 9}, ["model.vocab_size"]),  # a rank without a part
        ("llama3", 8, {"n_heads": 8, "n_kv_heads": 8, "vocab_size": 15}, []),
        ("qwen3_moe", 2, {}, []),
        ("qwen3_moe", 2, {"ffn_dim": 255}, ["model.ffn_dim"]),
        ("olmoe", 2, {"n_heads": 4, "n_kv_heads": 1}, ["model.n_kv_heads"]),
    ],
)
def test_tensor_parallelism_requires_divisible_dimensions(
    family: str, tp: int, overrides: dict[str, Any], keys: list[str]
) -> None:
    assert [problem.key for problem in problems_of(family, overrides, tp)] == keys
