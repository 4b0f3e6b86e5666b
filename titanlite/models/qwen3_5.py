"""Qwen3.5, its text model, dense and with experts (Qwen Team, 2026): gated linear attention in most layers, attention
with gated results in the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from titanlite.models.decoder import (
    Block,
    Decoder,
    ExpertHyperParameters,
    FurtherBlock,
    HybridHyperParameters,
    HyperParameters,
    check_decoder,
    decoder_structure,
    flops_per_token,
    norm_of,
)
from titanlite.models.experts import MixtureOfExperts, Router
from titanlite.models.family import Family, StoredGroups, StoredName
from titanlite.models.hugging_face import (
    EXPERT_NAMES,
    HEAD_NORM_NAMES,
    PRE_NORM_NAMES,
    DecoderFormat,
    expert_names,
    fixed_interval,
    layer_kinds,
    prefixed,
    read_field,
)
from titanlite.models.layers import FeedForward, GatedAttention
from titanlite.models.linear import gated
from titanlite.models.linear_attention import GatedDeltaNet
from titanlite.runtime.errors import Problem, Rules, UserError
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class Qwen35Config(HybridHyperParameters, HyperParameters):
    """Hyper-parameters of the qwen3_5 family. Each may be given in [model] and overrides the flavor's value."""

    head_dim: int = 256
    """Width of each head of full attention; n_heads x head_dim may differ from dim."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000_000.0
    max_seq_len: int = 262_144
    n_further_tokens: int = 0
    """Tokens after the next one that training also predicts, 0 or 1, with a block of full attention for each: see
    loss.further_tokens_weight. Evaluation and generation do not use them."""
    norm_offset: ClassVar[float] = 1.0


@dataclass(frozen=True)
class Qwen35MoeConfig(ExpertHyperParameters, Qwen35Config):
    """Hyper-parameters of the qwen3_5_moe family. Each may be given in [model] and overrides the flavor's value."""

    n_experts: int = 256
    n_shared_experts: int = 1
    """Width of the feed-forward layer that each position uses besides its experts, in widths of an expert."""
    gates_shared: ClassVar[bool] = True


_SMALL = Qwen35Config(1024, 24, 8, 2, 3584, 248_320, tie_embeddings=True, linear_value_heads=16)
_9B = Qwen35Config(4096, 32, 16, 4, 12_288, 248_320)
_DEBUG = {
    "head_dim": 64,
    "max_seq_len": 4096,
    "linear_key_heads": 4,
    "linear_value_heads": 8,
    "linear_key_dim": 32,
    "linear_value_dim": 32,
}

FLAVORS = {
    "debug": Qwen35Config(256, 4, 4, 2, 768, 2000, **_DEBUG),  # type: ignore[arg-type]
    "0.8B": _SMALL,
    "2B": replace(_SMALL, dim=2048, ffn_dim=6144),
    "4B": replace(_9B, dim=2560, ffn_dim=9216, tie_embeddings=True),
    "9B": _9B,
    "27B": replace(_9B, dim=5120, n_layers=64, n_heads=24, ffn_dim=17_408, linear_value_heads=48),
}
"""Published sizes, without the layer that predicts a further token, and a debug size for a laptop."""

MOE_FLAVORS = {
    "debug": Qwen35MoeConfig(256, 4, 4, 2, 128, 2000, n_experts=8, n_active_experts=2, **_DEBUG),  # type: ignore[arg-type]
    "35B-A3B": Qwen35MoeConfig(2048, 40, 16, 2, 512, 248_320),
    "122B-A10B": Qwen35MoeConfig(3072, 48, 32, 2, 1024, 248_320, linear_value_heads=64),
    "397B-A17B": Qwen35MoeConfig(
        *(4096, 60, 32, 2, 1024, 248_320), n_experts=512, n_active_experts=10, linear_value_heads=64
    ),
}
"""Published sizes, without the layer that predicts a further token, and a debug size for a laptop."""


class Qwen35(Decoder):
    """The decoder with gated linear attention in all layers but each full_interval-th one. block: see Decoder; None:
    that of Qwen3.5."""

    def __init__(self, config: Any, block: Callable[[int], nn.Module] | None = None) -> None:
        super().__init__(config, block or (lambda index: hybrid_block(config, index)))


class GatedFeedForward(FeedForward):
    """A feed-forward layer of shared experts, times the sigmoid of a score of each position."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(dim, hidden_dim, is_shared=True)
        self.gate = Router(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = gated(self.activation, self.w1(x), self.w3(x))
        out: Tensor = self.w2(hidden * self.gate(x).sigmoid().to(x.dtype))
        return out


def hybrid_block(config: Any, index: int) -> Block:
    """The block of a layer, by its index."""
    kind = Block if index < config.n_layers else FurtherBlock
    has_experts = config.n_experts > 1
    attention: Any
    if config.linear_layers[index]:
        heads = (config.linear_key_heads, config.linear_value_heads)
        widths = (config.linear_key_dim, config.linear_value_dim)
        attention = GatedDeltaNet(config.dim, *heads, *widths, config.linear_taps, config.norm_eps)
    else:
        norms = [norm_of(config, config.head_dim) for _ in range(2)]
        attention = GatedAttention(config.dim, config.n_heads, config.n_kv_heads, config.head_dim, *norms)
    if not has_experts:
        return kind(config, attention, FeedForward(config.dim, config.ffn_dim))
    shared = GatedFeedForward(config.dim, config.n_shared_experts * config.ffn_dim)
    return kind(config, attention, MixtureOfExperts(config, shared=shared))


def check(config: Any, seq_len: int, tp: int, pp: int) -> list[Problem]:
    problems = check_decoder(config, seq_len, tp, pp)
    if problems:
        return problems
    rules = Rules("model", config)
    rule = f"such that head_dim x it = {config.rotary_dim} is even and above 0"
    if config.n_experts > 1:
        rules.require("n_shared_experts", config.n_shared_experts >= 1, "at least 1", "1 is usual")
    is_even = config.rotary_dim > 0 and config.rotary_dim % 2 == 0
    rules.require("partial_rotary_factor", is_even, rule, "0.25 is usual")
    if not any(config.linear_layers):
        return rules.problems
    keys = config.linear_key_heads
    rule = f"a multiple of model.linear_key_heads = {keys}"
    rules.require("linear_value_heads", config.linear_value_heads % keys == 0, rule, "change one of them")
    rules.divides("linear_key_heads", "parallelism.tp", tp)
    return rules.problems


def linear_names(config: Any) -> dict[str, StoredName]:
    """Names of linear attention in Qwen3.5, which stores queries, keys and values one after the other."""
    key_heads, value_heads = config.linear_key_heads, config.linear_value_heads
    widths = [key_heads * config.linear_key_dim] * 2 + [value_heads * config.linear_value_dim]
    found: dict[str, StoredName] = dict(zip(("wq", "wk", "wv"), parts("in_proj_qkv.weight", 1, widths), strict=True))
    return found | {"wg": "in_proj_z.weight", "wa": "in_proj_a.weight", "wb": "in_proj_b.weight"}


def parts(name: str, groups: int, widths: list[int]) -> list[StoredGroups]:
    """Where parameters are stored that are one after the other in each group, with these numbers of rows there."""
    ends = [sum(widths[: index + 1]) for index in range(len(widths))]
    return [StoredGroups(name, groups, ends[-1], end - width, end) for width, end in zip(widths, ends, strict=True)]


def names_of_block(
    config: Any, index: int, linear: Callable[[Any], Mapping[str, StoredName]] = linear_names
) -> dict[str, StoredName]:
    """Names of the parameters of a block. linear: of the projections of linear attention."""
    plain = dict(PRE_NORM_NAMES)
    found: dict[str, StoredName] = {}
    if config.linear_layers[index]:
        keys = config.linear_key_heads * config.linear_key_dim
        taps = parts("conv1d.weight", 1, [keys, keys, config.linear_value_heads * config.linear_value_dim])
        own: dict[str, Any] = {**linear(config), **dict(zip(("conv_q", "conv_k", "conv_v"), taps, strict=True))}
        own |= {"a_log": "A_log", "dt_bias": "dt_bias", "out_norm": "norm.weight", "wo": "out_proj.weight"}
        for ours, theirs in own.items():
            name = f"linear_attn.{theirs if isinstance(theirs, str) else theirs.name}"
            found[f"attention.{ours}.weight"] = name if isinstance(theirs, str) else replace(theirs, name=name)
    else:
        plain |= HEAD_NORM_NAMES | {f"attention.w{kind}": f"self_attn.{kind}_proj" for kind in "kvo"}
        both = parts("self_attn.q_proj.weight", config.n_heads, [config.head_dim] * 2)
        found |= dict(zip(("attention.wq.weight", "attention.wg.weight"), both, strict=True))
    if config.n_experts > 1:
        plain |= {"feed_forward.router": "mlp.gate", "feed_forward.shared.gate": "mlp.shared_expert_gate"}
        found |= expert_names(config.n_experts)
    ours, theirs = ("feed_forward.shared", "mlp.shared_expert") if config.n_experts > 1 else ("feed_forward", "mlp")
    plain |= {f"{ours}.{own}": f"{theirs}.{stored}" for own, stored in EXPERT_NAMES.items()}
    found |= {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in plain.items()}
    if index < config.n_layers:
        return found
    own = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden"}
    own |= {"projection": "fc", "output_norm": "norm"}
    in_block = {ours: prefixed(theirs, "layers.0.") for ours, theirs in found.items()}
    return in_block | {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in own.items()}


_KINDS = partial(layer_kinds, other="linear_attention")


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    interval = read_field(fields, "full_attention_interval", int, 4)
    interval = fixed_interval(fields, "layer_types", _KINDS, interval)
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = dict(read_field(fields, name, dict, {}))
    # of images and videos; texts have the same position in all sections
    rope = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    factor = rope.pop("partial_rotary_factor", None)
    factor = read_field(fields, "partial_rotary_factor", float, 0.25) if factor is None else factor
    further = {"mtp_num_hidden_layers": 0, "num_nextn_predict_layers": 0}
    own = {"layer_types": None, "full_attention_interval": interval, "partial_rotary_factor": factor, name: rope}
    return {**further, **fields, **own}


def _prepared_moe(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = _prepared(fields)
    shared, width = (
        read_field(fields, name, int, 512) for name in ("shared_expert_intermediate_size", "moe_intermediate_size")
    )
    if width < 1 or shared < 1 or shared % width:
        raise UserError(
            f"config.json: shared_expert_intermediate_size = {shared}: this family supports only multiples of "
            f"moe_intermediate_size = {width}"
        )
    return {**found, "moe_intermediate_size": width, "n_shared_experts": shared // width}


def _written(config: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    rope |= {"partial_rotary_factor": config.partial_rotary_factor}
    return {"layer_types": _KINDS(config.full_interval, config.n_layers), "rope_parameters": rope}


FORMAT = DecoderFormat(
    Qwen35Config,
    check,
    fields={
        "full_interval": "full_attention_interval",
        "n_further_tokens": "mtp_num_hidden_layers",
        "partial_rotary_factor": "partial_rotary_factor",
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "linear_taps": "linear_conv_kernel_dim",
    },
    block=names_of_block,
    further_prefix="mtp.",
    supported={"attn_output_gate": True},
    prepared=_prepared,
    written=_written,
)
MOE_FORMAT = replace(
    FORMAT,
    config_type=Qwen35MoeConfig,
    fields=FORMAT.fields | {"ffn_dim": "moe_intermediate_size", "n_shared_experts": "n_shared_experts"},
    prepared=_prepared_moe,
    written=lambda config: (
        _written(config) | {"shared_expert_intermediate_size": config.n_shared_experts * config.ffn_dim}
    ),
)

_IS_HYBRID = Needs("model.full_interval above 1", lambda config: config.full_interval > 1)
_OF_LINEAR = ("linear_key_heads", "linear_value_heads", "linear_key_dim", "linear_value_dim", "linear_taps")

QWEN3_5 = Family(
    name="qwen3_5",
    config_type=Qwen35Config,
    flavors=FLAVORS,
    check=check,
    build=Qwen35,
    structure=decoder_structure,
    flops_per_token=flops_per_token,
    hugging_face=FORMAT.hugging_face("qwen3_5_text", "Qwen3_5ForCausalLM"),
    needs=dict.fromkeys(_OF_LINEAR, _IS_HYBRID),
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe",
    config_type=Qwen35MoeConfig,
    flavors=MOE_FLAVORS,
    hugging_face=MOE_FORMAT.hugging_face("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
)
