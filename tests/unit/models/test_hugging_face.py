"""Reading config.json, and errors that name a missing, invalid or unsupported field."""

import json
from dataclasses import replace
from typing import Any

import pytest

from titanlite.models.hugging_face import layer_kinds, unknown_fields
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError

# As in the published model folders.
LLAMA_3_2_1B = """{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_cache": true,
    "vocab_size": 128256
}"""
QWEN3_8B = """{
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936
}"""
OLMOE_1B_7B = """{
    "architectures": ["OlmoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "clip_qkv": null,
    "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": false,
    "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
    "num_key_value_heads": 16, "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 50304
}"""
QWEN3_30B_A3B = """{
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
    "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936
}"""
GPT_OSS_20B = """{
    "architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": [LAYERS], "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": false
    },
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "use_cache": true, "vocab_size": 201088
}""".replace("LAYERS", ", ".join(12 * ['"sliding_attention", "full_attention"']))
PUBLISHED = {
    "gpt_oss": (GPT_OSS_20B, "20B"),
    "llama3": (LLAMA_3_2_1B, "1B"),
    "qwen3": (QWEN3_8B, "8B"),
    "olmoe": (OLMOE_1B_7B, "1B-7B"),
    "qwen3_moe": (QWEN3_30B_A3B, "30B-A3B"),
}


def read(family: str, changes: dict[str, Any] | None = None) -> Any:
    """The hyper-parameters of the published fields with `changes`; None removes a field."""
    fields = json.loads(PUBLISHED[family][0]) | (changes or {})
    remaining = {name: value for name, value in fields.items() if value is not None or name not in (changes or {})}
    return FAMILIES[family].hugging_face.config_from_json(remaining)


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_folders(family: str) -> None:
    config, flavor = read(family), FAMILIES[family].flavors[PUBLISHED[family][1]]
    # these flavors have coefficients of titanlite's balance loss, which is another one
    coefficients = {"gpt_oss": 0.9, "olmoe": 0.01}
    assert config == (replace(flavor, balance_loss=coefficients[family]) if family in coefficients else flavor)
    published, written = json.loads(PUBLISHED[family][0]), FAMILIES[family].hugging_face.config_json(config)
    tokens = {"pad_token_id", "eos_token_id"} if family == "olmoe" else set()
    assert {name for name, value in written.items() if published.get(name, value) != value} <= tokens
    assert written["intermediate_size"] == published["intermediate_size"]


SCALING = json.loads(LLAMA_3_2_1B)["rope_scaling"]
QWEN3_ROPE = {"rope_type": "default", "rope_theta": 1e6}
BY_KIND = ("gemma3", "olmo3")
"""Families with rotary embeddings by kind of layer."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}  # as in Qwen3's model cards


def of_both_kinds(theta: float) -> dict[str, Any]:
    return {kind: {"rope_type": "default", "rope_theta": theta} for kind in ("full_attention", "sliding_attention")}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama3", {"rope_scaling": None, "rope_theta": None, "rope_parameters": SCALING | {"rope_theta": 500000.0}}),
        ("llama3", {"rope_scaling": None, "rope_parameters": SCALING}),
        ("llama3", {"head_dim": None, "attention_bias": None, "mlp_bias": None, "hidden_act": None}),
        ("qwen3", {"rope_theta": None, "rope_parameters": QWEN3_ROPE}),
        ("qwen3", {"rope_parameters": QWEN3_ROPE | {"rope_theta": 1e6}, "rope_theta": 5.0}),
        ("qwen3", {"rope_scaling": {"type": "default"}}),
        ("qwen3", {"head_dim": None, "use_sliding_window": None, "tie_word_embeddings": None}),
        ("qwen3", {"sliding_window": 4096, "layer_types": ["full_attention"] * 36}),
        ("olmoe", {"num_experts": None, "num_local_experts": 64}),  # transformers 5
        ("qwen3_moe", {"num_experts": None, "num_local_experts": 128}),
    ],
    ids=str,
)
def test_equivalent_forms(family: str, changes: dict[str, Any]) -> None:
    assert read(family, changes) == read(family)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": {("type" if name == "rope_type" else name): value for name, value in YARN.items()}},
        {"rope_scaling": YARN | {"beta_fast": 32, "beta_slow": 1.0, "truncate": True, "attention_factor": None}},
        {"rope_scaling": None, "rope_theta": None, "rope_parameters": YARN | {"rope_theta": 1e6}},
    ],
    ids=str,
)
def test_qwen3_with_yarn(changes: dict[str, Any]) -> None:
    assert read("qwen3", changes) == replace(read("qwen3"), rope_scaling_factor=4.0)


@pytest.mark.parametrize(
    ("family", "changes", "config"),
    [
        (
            "gemma3",
            {"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 8}},
            {"rope_scaling_factor": 8.0},
        ),
        ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, {}),
        ("gemma3", {"rope_scaling": {"type": "default"}}, {}),
        ("gemma3", {"hidden_act": "gelu"}, {}),
        ("gemma2", {"hidden_act": "relu"}, {}),
        ("olmo3", {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": None}, {}),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": None}}, {}),
        ("olmo3", {"rope_theta": None, "rope_parameters": of_both_kinds(2e4)}, {"rope_theta": 2e4}),
        (
            "olmo3",
            {"rope_theta": 2e4, "rope_parameters": {"sliding_attention": {"rope_theta": 2e4}}},
            {"rope_theta": 2e4},
        ),
        ("smollm3", {"tie_word_embeddings": None}, {"tie_embeddings": True}),
        ("mistral", {"head_dim": None}, {"head_dim": 32}),
        ("qwen3_moe", {"head_dim": None}, {"head_dim": 64}),
        ("qwen3", {"head_dim": None}, {"head_dim": 128}),
        ("mistral", {"layer_types": ["full_attention"] * 6}, {"sliding_window": 0}),
        ("mistral", {"layer_types": ["sliding_attention"] * 6}, {}),
        *(
            (family, {"rope_scaling": YARN | {"attention_factor": 1.138629436111989}}, {"rope_scaling_factor": 4.0})
            for family in ("qwen3", "qwen3_moe", "olmo3")
        ),
        (
            "deepseek_v3",
            {"rope_scaling": YARN | {"attention_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            {"rope_scaling_factor": 4.0},
        ),
    ],
    ids=str,
)
def test_forms_that_transformers_reads(family: str, changes: dict[str, Any], config: dict[str, Any]) -> None:
    """Changes of what a debug model writes, None: without the field, and what they change of the model."""
    hf, debug = FAMILIES[family].exported, FAMILIES[family].flavors["debug"]
    fields = without(hf.config_json(debug) | changes, *(name for name, value in changes.items() if value is None))
    found = hf.config_from_json(fields)
    expected = replace(debug, **config)
    if config.get("rope_scaling_factor") == 4.0:
        expected = replace(expected, rope_original_seq_len=YARN["original_max_position_embeddings"])
    assert found == expected


def test_older_llamas_are_unscaled_and_share_no_heads() -> None:
    config = read("llama3", {"rope_scaling": None, "num_key_value_heads": None, "tie_word_embeddings": None})
    assert (config.rope_scaling_factor, config.n_kv_heads, config.tie_embeddings) == (1.0, 32, False)


def test_a_factor_of_one_means_no_scaling() -> None:
    assert read("llama3", {"rope_scaling": SCALING | {"factor": 1}}).rope_scaling_factor == 1.0


REQUIRED = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
REQUIRED += ["rms_norm_eps", "max_position_embeddings", "rope_theta"]
WRONG: list[tuple[str, Any]] = [
    *((name, None) for name in REQUIRED),
    *((name, value) for name in REQUIRED for value in (0, -1, "8", True, [], {}, 10**400)),
    *((name, value) for name in ("rms_norm_eps", "rope_theta") for value in (float("nan"), float("inf"))),
    *(("num_key_value_heads", value) for value in (0, 3, 64, "8", 2.0)),
    *(("head_dim", value) for value in (0, 7, -128, "128", 10**400)),
    ("tie_word_embeddings", "yes"),
    ("tie_word_embeddings", 1),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("quantization_config", {"bits": 4}),
    ("partial_rotary_factor", 0.5),
    ("rope_scaling", "llama3"),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", {"rope_type": ["llama3"]}),
    ("rope_parameters", [1]),
]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "olmoe"])
def test_a_wrong_field_is_named(family: str) -> None:
    def error(name: str, value: Any) -> str:
        try:
            read(family, {"rope_scaling": None, name: value} if name == "rope_parameters" else {name: value})
        except UserError as raised:
            return str(raised)
        return "accepted"

    cases = [(name, str(value)[:20], error(name, value)) for name, value in WRONG]
    assert [case for case in cases if not (case[2].startswith("config.json: ") and case[0] in case[2])] == []


@pytest.mark.parametrize(
    ("family", "changes", "name"),
    [
        ("llama3", {"mlp_bias": True}, "mlp_bias"),
        ("llama3", {"head_dim": 128}, "head_dim"),
        ("llama3", {"num_attention_heads": 24, "num_key_value_heads": 8}, "hidden_size"),
        *(("llama3", {"rope_scaling": {**SCALING, field: None}}, field) for field in SCALING if "fac" in field),
        *(("llama3", {"rope_scaling": {**SCALING, field: 0}}, field) for field in SCALING if field != "rope_type"),
        ("llama3", {"rope_scaling": SCALING | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ("llama3", {"rope_scaling": SCALING | {"factor": float("nan")}}, "factor"),
        ("llama3", {"rope_scaling": SCALING | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama3", {"rope_scaling": YARN}, "rope_scaling.rope_type = 'yarn'"),
        ("qwen3", {"rope_scaling": SCALING}, "rope_scaling.rope_type = 'llama3'"),
        *(
            ("qwen3", {"rope_scaling": YARN | {name: value}}, name)
            for name, value in {
                "attention_factor": 1.5,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "truncate": False,
                "factor": 0.5,
                "beta_slow": 32.0,
                "beta_fast": "32",
                "original_max_position_embeddings": None,
            }.items()
        ),
        ("qwen3", {"rope_theta": None, "rope_parameters": {"full_attention": QWEN3_ROPE}}, "rope_theta is missing"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 35}, "use_sliding_window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = 'sliding_attention'"),
        ("qwen3", {"layer_types": [["full_attention"]]}, "layer_types"),
        ("qwen3", {"layer_types": "full_attention"}, "layer_types"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("olmoe", {"head_dim": 64}, "head_dim = 64: this family supports only 128"),
        ("olmoe", {"rope_scaling": YARN}, "rope_type = 'yarn': this family supports only 'default'"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False"),
        ("gpt_oss", {"rope_scaling": YARN}, "truncate is missing"),
        ("gpt_oss", {"rope_scaling": YARN | {"truncate": True}}, "truncate = True"),
        ("gpt_oss", {"rope_scaling": None}, "rope_scaling is missing"),
        ("gpt_oss", {"original_max_position_embeddings": 8192}, "original_max_position_embeddings = 8192"),
        ("gpt_oss", {"sliding_window": None, "layer_types": ["full_attention"]}, "layer_types = "),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers = "),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3_moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide'"),
        ("qwen3_moe", {"output_router_logits": True}, "a balance loss over all positions of a microbatch"),
        *(
            case
            for family, most in {"olmoe": 64, "qwen3_moe": 128}.items()
            for case in (
                (family, {"num_experts": None}, "num_experts is missing"),
                (family, {"num_experts_per_tok": most + 1}, f"= {most + 1}: at most model.n_experts = {most}"),
                (family, {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef = -1.0: a finite number, 0 or more"),
            )
        ),
    ],
    ids=str,
)
def test_an_unsupported_feature_is_named(family: str, changes: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError) as raised:
        read(family, changes)
    assert name in str(raised.value)


def test_older_versions_read_the_written_config() -> None:
    """rope_theta is outside rope_scaling, which is null or has a rope_type: for transformers 4.43 and later."""
    written = {name: FAMILIES[name].hugging_face.config_json(read(name)) for name in PUBLISHED}
    assert written["llama3"]["rope_theta"] == 500_000.0
    assert written["llama3"]["rope_scaling"] == SCALING
    assert (written["qwen3"]["rope_theta"], written["qwen3"]["rope_scaling"]) == (1_000_000.0, None)
    assert not any("rope_parameters" in fields for fields in written.values())


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1, 1]}, r"no_rope_layers = \[1, 0, .*at a fixed interval"),
        ("smollm3", {"no_rope_layers": "1"}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval"),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types = .*at a fixed interval"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 6}, "layer_types = .*at a fixed interval"),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta = 10000.0: versions of transformers differ"),
        ("olmo3", {"sliding_window": -1}, "sliding_window = -1"),
        ("olmo3", {"sliding_window": None}, "sliding_window is null, but not all layers have full attention"),
        ("olmo3", {"sliding_window": 0}, "sliding_window = 0: at least 1 with model.full_interval above 1"),
        ("olmo3", {"num_hidden_layers": 8}, "layer_types = .*at a fixed interval"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters.sliding_attention",
        ),
        ("olmo3", {"rope_scaling": YARN | {"attention_factor": 1.0}}, "attention_factor"),
        *((family, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "without rope_type") for family in BY_KIND),
        *((family, {"rope_parameters": QWEN3_ROPE | {"rope_theta": 2e4}}, "5.24 ignores it") for family in BY_KIND),
        *((family, {"rope_scaling": {"full_attention": QWEN3_ROPE}}, "rename rope_scaling") for family in BY_KIND),
        *(
            (family, {"rope_parameters": {"sliding_attention": {"rope_type": ["linear"]}}}, "sliding_attention")
            for family in BY_KIND
        ),
        ("olmo3", {"rope_parameters": YARN | {"rope_theta": 5e5}}, "5.0 to 5.3 take it in all layers, .*= 500000.0 "),
        ("olmo3", {"rope_parameters": {"full_attention": {"rope_theta": 2e4}}}, "some layers, 20000.0 or 500000.0"),
        (
            "olmo3",
            {"rope_theta": 2e4, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}},
            "some layers, 20000.0 or 500000.0",
        ),
        ("olmo3", {"rope_scaling": YARN, "rope_parameters": of_both_kinds(2e4)}, "some layers, 20000.0 or 500000.0"),
        ("olmo3", {"rope_scaling": YARN, "rope_parameters": QWEN3_ROPE}, "only one of both"),
        ("olmo3", {"rope_theta": [1.0]}, "rope_theta is"),
        ("gemma2", {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention: all layers"),
        ("gemma2", {"hidden_act": "gelu", "hidden_activation": None}, "hidden_act = 'gelu'"),
        *(
            (family, {"rope_theta": None}, f"transformers would take {theta}$")
            for family, theta in {"smollm3": 2e6, "olmo3": 5e5, "gpt_oss": 1.5e5, "llama3": 1e4}.items()
        ),
        ("mistral", {"sliding_window": "64"}, "sliding_window"),
        ("qwen2", {"attention_bias": False}, "attention_bias = False"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "use_sliding_window = True"),
        ("gemma2", {"sliding_window": None}, "sliding_window is null"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "only one kind for all 6 layers"),
        ("mistral", {"layer_types": ["full_attention"] * 5}, "only one kind for all 6 layers"),
        ("mistral", {"layer_types": ["linear_attention"] * 6}, "only one kind for all 6 layers"),
        ("mistral", {"layer_types": [["full_attention"]] * 6}, "only one kind for all 6 layers"),
        ("mistral", {"layer_types": ["sliding_attention"] * 6, "sliding_window": None}, "no sliding_window is set"),
        ("mistral", {"layer_types": ["full_attention"] * 6, "wrapper": "mistral3"}, "in a model that wraps this one"),
        ("smollm3", {"no_rope_layers": [0] * 6}, "no_rope_layers has no 1"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 3}, "layer_types = .*at a fixed interval"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"rope_scaling": YARN}, "rope_type = 'yarn'"),
        ("gemma3", {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "only one of both"),
        ("gemma3", {"wrapper": "gemma3", "final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        *(
            (
                "gemma3",
                {"rope_parameters": {"full_attention": {}, "sliding_attention": {kind: "linear", "factor": 2.0}}},
                "rope_parameters.sliding_attention",
            )
            for kind in ("rope_type", "type")
        ),
    ],
)
def test_layers_that_a_family_does_not_have(family: str, changes: dict[str, Any], message: str) -> None:
    hf = FAMILIES[family].hugging_face
    assert hf is not None
    with pytest.raises(UserError, match=message):
        hf.config_from_json(hf.config_json(FAMILIES[family].flavors["debug"]) | changes)


def test_the_published_forms_of_layers_with_a_window() -> None:
    """transformers has a window if the field is missing; published OLMo 3 has the attention_factor of the formula."""
    mistral, olmo3 = FAMILIES["mistral"].exported, FAMILIES["olmo3"].exported
    fields = mistral.config_json(FAMILIES["mistral"].flavors["7B"])
    assert fields.pop("sliding_window") is None
    assert mistral.config_from_json(fields).sliding_window == 4096
    published = olmo3.config_json(FAMILIES["olmo3"].flavors["7B"])
    published["rope_scaling"]["attention_factor"] = 1.2079441541679836
    assert olmo3.config_from_json(published) == FAMILIES["olmo3"].flavors["7B"]


def test_fields_that_no_family_reads_are_named() -> None:
    for name, (text, flavor) in PUBLISHED.items():
        written = FAMILIES[name].exported.config_json(FAMILIES[name].flavors[flavor])
        assert unknown_fields(written, json.loads(text)) == []
        assert unknown_fields(written, {"new_gate": 1.0, "old_gate": None, "a_scale": 2}) == ["a_scale", "new_gate"]


def test_switches_of_qwen2_that_are_off_are_not_named() -> None:
    written = FAMILIES["qwen2"].exported.config_json(FAMILIES["qwen2"].flavors["7B"])
    published = written | {"use_mrope": False, "sliding_window": 131_072, "max_window_layers": 28}
    assert unknown_fields(written, published) == []
    assert unknown_fields(written, published | {"use_mrope": True}) == ["use_mrope"]


def test_the_published_forms_of_gemma() -> None:
    """Without the fields that transformers has by default, and with those of transformers 4 and 5."""
    gemma2, gemma3 = FAMILIES["gemma2"], FAMILIES["gemma3"]
    fields = gemma2.exported.config_json(gemma2.flavors["2B"])
    left_out = ("layer_types", "tie_word_embeddings", "final_logit_softcapping")
    for pattern in (2, 3):  # transformers does not read it
        fields["sliding_window_pattern"] = pattern
        assert gemma2.exported.config_from_json(without(fields, *left_out)) == gemma2.flavors["2B"]
    assert gemma2.exported.config_from_json(fields | {"final_logit_softcapping": None}).logit_cap == 0
    sizes = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    older = sizes | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    assert gemma3.exported.config_from_json(older) == gemma3.flavors["4B"]
    kinds = {"full_attention": {"rope_theta": 2e6, "rope_type": "linear", "factor": 4.0}}
    kinds["sliding_attention"] = {"rope_theta": 2e4, "rope_type": "default"}
    changed = {"rope_theta": 2e6, "rope_local_theta": 2e4, "rope_scaling_factor": 4.0, "full_interval": 5}
    newer = sizes | {"rope_parameters": kinds, "layer_types": layer_kinds(5, 34)}
    assert gemma3.exported.config_from_json(newer) == replace(gemma3.flavors["4B"], **changed)
    for left_out, key in {"full_attention": "rope_theta", "sliding_attention": "rope_local_theta"}.items():
        read_config = gemma3.exported.config_from_json(newer | {"rope_parameters": without(kinds, left_out)})
        assert getattr(read_config, key) == getattr(gemma3.flavors["4B"], key)
    olmo3 = FAMILIES["olmo3"].exported
    with pytest.raises(UserError, match="with the base of full_attention"):
        olmo3.config_from_json(olmo3.config_json(FAMILIES["olmo3"].flavors["debug"]) | {"rope_parameters": kinds})


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
