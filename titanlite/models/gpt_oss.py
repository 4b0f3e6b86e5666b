"""gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): attention with sinks, to the last positions only in
every second layer, biases in all layers, and a mixture of experts with a clamped SwiGLU in every block."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from titanlite.models.decoder import (
    Block,
    Decoder,
    ExpertHyperParameters,
    HyperParameters,
    WindowHyperParameters,
    check_decoder,
    check_head_width,
    check_windows,
    decoder_family,
)
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import StoredPart
from titanlite.models.hugging_face import YARN, DecoderFormat, window_fields, written_windows
from titanlite.models.layers import Attention, YarnScaling
from titanlite.models.qwen3 import NEEDS, check_yarn, yarn
from titanlite.runtime.errors import Problem, UserError


@dataclass(frozen=True)
class GptOssConfig(ExpertHyperParameters, WindowHyperParameters, HyperParameters):
    """Hyper-parameters of the gpt_oss family. Each may be given in [model] and overrides the flavor's value."""

    head_dim: int = 64
    """Width of each head; n_heads x head_dim may differ from dim."""
    rope_theta: float = 150_000.0
    max_seq_len: int = 131_072
    n_active_experts: int = 4
    sliding_window: int = 128
    rope_scaling_factor: float = 32.0
    """Factor by which YaRN stretches long rotary wavelengths; 1.0: no scaling."""
    rope_beta_fast: float = 32.0
    """Pairs that make more turns than this within rope_original_seq_len are not stretched."""
    rope_beta_slow: float = 1.0
    """Pairs that make fewer turns than this within rope_original_seq_len are stretched by the full factor."""
    rope_original_seq_len: int = 4096
    """Context length before the scaling."""
    clamped: ClassVar[bool] = True
    expert_biases: ClassVar[bool] = True


_20B = GptOssConfig(dim=2880, n_layers=24, n_heads=64, n_kv_heads=8, ffn_dim=2880, vocab_size=201_088, n_experts=32)

FLAVORS = {
    "debug": GptOssConfig(
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        ffn_dim=256,
        vocab_size=2000,
        n_experts=8,
        n_active_experts=2,
        sliding_window=64,
    ),
    "20B": _20B,
    "120B": replace(_20B, n_layers=36, n_experts=128),
}
"""Published sizes, and a debug size for a laptop."""


class GptOss(Decoder):
    """The decoder with sinks, windows, biases, and experts with biases and a clamped SwiGLU."""

    def __init__(self, config: GptOssConfig) -> None:
        def block(index: int) -> Block:
            experts = MixtureOfExperts(config, bias=config.expert_biases)
            return Block(config, attention(config, config.windows[index]), experts)

        super().__init__(config, block, _yarn(config))


def attention(config: GptOssConfig, window: int) -> Attention:
    """Attention module of one block."""
    heads = (config.n_heads, config.n_kv_heads, config.head_dim)
    return Attention(config.dim, *heads, bias=True, output_bias=True, sinks=True, window=window)


def _yarn(config: GptOssConfig) -> YarnScaling | None:
    scaling = yarn(config)
    return None if scaling is None else replace(scaling, truncates=False)


def check(config: GptOssConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    problems = [*check_decoder(config, seq_len, tp, pp), *check_head_width(config)]
    return [*problems, *check_yarn(config), *check_windows(config)]


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of the published quantization, only the tensors tell; see hf/safetensors.py."""
    if not fields.get("rope_scaling") and not fields.get("rope_parameters"):
        raise UserError(
            'config.json: rope_scaling is missing: write the scaling of the model, or {"rope_type": "default"} for '
            "none; versions of transformers differ in what they take"
        )
    return {**window_fields(fields, 2, 128), "quantization_config": None}


def _written(config: GptOssConfig) -> dict[str, Any]:
    fields = written_windows(config)
    if config.rope_scaling_factor == 1.0:  # without it, transformers scales
        fields["rope_scaling"] = {"rope_type": "default"}
    return fields


_EXPERTS = "feed_forward.experts"
FORMAT = DecoderFormat(
    GptOssConfig,
    check,
    fields={
        "n_experts": "num_local_experts",
        "sliding_window": "sliding_window",
        "full_interval": "full_attention_interval",
    },
    block_names={"feed_forward.router": "mlp.router"},
    own_names={
        "attention.sinks.weight": "self_attn.sinks",
        f"{_EXPERTS}.w1": StoredPart("mlp.experts.gate_up_proj", 0, 2),
        f"{_EXPERTS}.w2": StoredPart("mlp.experts.down_proj"),
        f"{_EXPERTS}.w3": StoredPart("mlp.experts.gate_up_proj", 1, 2),
        f"{_EXPERTS}.w1_bias": StoredPart("mlp.experts.gate_up_proj_bias", 0, 2),
        f"{_EXPERTS}.w2_bias": "mlp.experts.down_proj_bias",
        f"{_EXPERTS}.w3_bias": StoredPart("mlp.experts.gate_up_proj_bias", 1, 2),
    },
    biases=("attention.wq", "attention.wk", "attention.wv", "attention.wo", "feed_forward.router"),
    supported={"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
    scaling=replace(YARN, supported=YARN.supported | {"truncate": False}, required=("truncate",)),
    default_theta=GptOssConfig.rope_theta,
    prepared=_prepared,
    written=_written,
)

GPT_OSS = decoder_family(
    "gpt_oss",
    FLAVORS,
    check,
    GptOss,
    replace(FORMAT.hugging_face("gpt_oss", "GptOssForCausalLM"), quantization="mxfp4"),
    needs=NEEDS,
)
