"""DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024): latent attention, and a mixture of experts with
shared experts, chosen by groups, in all blocks but the first ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from titanlite.models.decoder import (
    Block,
    Decoder,
    DenseBlock,
    ExpertHyperParameters,
    FurtherBlock,
    HyperParameters,
    check_decoder,
    decoder_structure,
    flops_per_token,
)
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import CHOICE_BIAS, Family, StoredName
from titanlite.models.hugging_face import EXPERT_NAMES, PRE_NORM_NAMES, YARN, DecoderFormat, expert_names, read_field
from titanlite.models.latent_attention import LatentAttention
from titanlite.models.layers import FeedForward, YarnScaling
from titanlite.models.qwen3 import NEEDS as YARN_NEEDS
from titanlite.models.qwen3 import check_yarn, yarn
from titanlite.runtime.errors import Problem, Rules, UserError
from titanlite.runtime.settings import Needs


@dataclass(frozen=True)
class DeepseekV3Config(ExpertHyperParameters, HyperParameters):
    """Hyper-parameters of the deepseek_v3 family. Each may be given in [model] and overrides the flavor's value."""

    norm_eps: float = 1e-6
    max_seq_len: int = 163_840
    n_experts: int = 256
    balance_loss: float = 0.0001
    bias_rate: float = 0.001
    """Change per step of the biases that balance the choice of experts; 0.0: they stay. May change at a resume, but not
    from or to 0."""
    q_lora_rank: int = 1536
    """Width of the latent vector of queries; 0: queries are a projection of the residual stream."""
    kv_lora_rank: int = 512
    """Width of the latent vector of keys and values."""
    qk_nope_head_dim: int = 128
    """Width of the part of each query and key that is not rotated."""
    qk_rope_head_dim: int = 64
    """Width of the part that is rotated; all heads share that of keys."""
    v_head_dim: int = 128
    """Width of the values of each head."""
    n_dense_layers: int = 3
    """First blocks, which have one feed-forward layer in place of experts."""
    dense_ffn_dim: int = 18_432
    """Width of the hidden layer of the feed-forward layers of these blocks."""
    n_shared_experts: int = 1
    """Experts that each position uses besides those that the router chooses."""
    n_groups: int = 8
    """Groups of experts."""
    n_active_groups: int = 4
    """Groups that the experts of a position are chosen from."""
    route_scale: float = 2.5
    """Factor of the weights of the chosen experts."""
    rope_scaling_factor: float = 1.0
    """Factor by which YaRN stretches long rotary wavelengths; 1.0: no scaling."""
    rope_beta_fast: float = 32.0
    """Pairs that make more turns than this within rope_original_seq_len are not stretched."""
    rope_beta_slow: float = 1.0
    """Pairs that make fewer turns than this within rope_original_seq_len are stretched by the full factor."""
    rope_original_seq_len: int = 4096
    """Context length before the scaling."""
    rope_mscale: float = 1.0
    """With YaRN, attention scores grow by (0.1 x rope_mscale x ln(rope_scaling_factor) + 1)^2."""
    n_further_tokens: int = 0
    """Tokens after the next one that training also predicts, 0 or 1, with a block of its own for each: see
    loss.further_tokens_weight. Evaluation and generation do not use them."""
    scoring: ClassVar[Any] = "sigmoid"
    always_biased: ClassVar[bool] = True

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        return self.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        return self.v_head_dim

    @property
    def attention_parameters(self) -> int:
        queries = self.n_heads * self.head_dim
        of_queries = (self.dim + queries) * self.q_lora_rank if self.q_lora_rank else self.dim * queries
        down = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim)
        up = self.kv_lora_rank * self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_queries + down + up + self.n_heads * self.v_head_dim * self.dim


FLAVORS = {
    "debug": DeepseekV3Config(
        *(256, 4, 4, 4, 128, 2000),
        n_experts=8,
        n_active_experts=2,
        q_lora_rank=96,
        kv_lora_rank=64,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=48,
        n_dense_layers=1,
        dense_ffn_dim=512,
        n_groups=4,
        n_active_groups=2,
        max_seq_len=4096,
    ),
    "16B-A3B": DeepseekV3Config(
        *(2048, 27, 16, 16, 1408, 163_840),
        norm_eps=1e-5,
        rope_theta=50_000.0,
        max_seq_len=8192,
        n_experts=64,
        n_active_experts=6,
        q_lora_rank=0,
        n_dense_layers=1,
        dense_ffn_dim=11_264,
        n_shared_experts=2,
        n_groups=1,
        n_active_groups=1,
        route_scale=2.446,
        balance_loss=0.001,
    ),
    "671B-A37B": DeepseekV3Config(
        *(7168, 61, 128, 128, 2048, 129_280), rope_scaling_factor=40.0, init_std=0.006, init_by_depth=False
    ),
}
"""Published sizes (16B-A3B is that of Moonlight, Liu et al., "Muon is Scalable for LLM Training", 2025), and a debug
size for a laptop.

671B-A37B: initial values and balance loss of the report, section 4.2; without the block that predicts a further token.
16B-A3B: the balance loss is aux_loss_alpha of its config.json; initial values are not published.
"""


class ScoreYarn(YarnScaling):
    """YaRN that scales the scores of attention by the factor of its queries, not by the tables."""

    @property
    def table_factor(self) -> float:
        return 1.0


class DeepseekV3(Decoder):
    """The decoder with latent attention, and experts in all blocks but the first n_dense_layers."""

    def __init__(self, config: DeepseekV3Config) -> None:
        scaling = yarn(config)
        factor = 1.0
        if scaling is not None:
            factor = (1.0 + config.rope_mscale * (scaling.table_factor - 1.0)) ** 2
            scaling = ScoreYarn(**vars(scaling))

        def block(index: int) -> Block:
            if index < config.n_dense_layers:
                return DenseBlock(config, attention(config, factor), FeedForward(config.dim, config.dense_ffn_dim))
            width = config.n_shared_experts * config.ffn_dim
            shared = FeedForward(config.dim, width, is_shared=True) if width else None
            kind = Block if index < config.n_layers else FurtherBlock
            return kind(config, attention(config, factor), MixtureOfExperts(config, shared=shared))

        super().__init__(config, block, scaling)


def attention(config: DeepseekV3Config, factor: float) -> LatentAttention:
    """Attention module of one block. factor: of the scores."""
    return LatentAttention(
        *(config.dim, config.n_heads, config.head_dim),
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        rope_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        query_factor=factor,
    )


def check(config: DeepseekV3Config, seq_len: int, tp: int, pp: int) -> list[Problem]:
    problems = check_decoder(config, seq_len, tp, pp)
    if problems:
        return problems
    rules = Rules("model", config)
    even = config.qk_rope_head_dim % 2 == 0
    rules.require("qk_rope_head_dim", even, "even, since rotary embeddings rotate pairs", "64 is usual")
    own = config.n_kv_heads == config.n_heads
    rule, remedy = f"model.n_heads = {config.n_heads}: each head has its own keys", f"set it to {config.n_heads}"
    rules.require("n_kv_heads", own, rule, remedy)
    rule = f"at most qk_nope_head_dim + qk_rope_head_dim = {config.head_dim}"
    rules.require("v_head_dim", config.v_head_dim <= config.head_dim, rule, "128 is usual")
    rule = f"below model.n_layers = {config.n_layers}"
    rules.require("n_dense_layers", config.n_dense_layers < config.n_layers, rule, "fewer, or the family llama3")
    if config.n_dense_layers and tp > 1:
        rules.divides("dense_ffn_dim", "parallelism.tp", tp)
    groups, experts = config.n_groups, config.n_experts
    rule = f"divides model.n_experts = {experts}, with at least two experts in each group"
    rules.require("n_groups", experts % groups == 0 and experts >= 2 * groups, rule, "1 for no groups")
    rule = f"at most model.n_groups = {groups}"
    rules.require("n_active_groups", config.n_active_groups <= groups, rule, "1 with n_groups = 1")
    fitting = experts // groups * config.n_active_groups
    rule = f"at most the {fitting} experts of model.n_active_groups = {config.n_active_groups} groups"
    rules.require("n_active_experts", config.n_active_experts <= fitting, rule, "fewer, or more groups")
    rule = "0.0: the scores of a sigmoid have no common sum"
    rules.require("z_loss", config.z_loss == 0, rule, "leave it out")
    return [*rules.problems, *check_yarn(config)]


def _prepared(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {"num_nextn_predict_layers": 0, **fields, "head_dim": None, "quantization_config": None}
    if fields.get("q_lora_rank") is None and "q_lora_rank" in fields:
        found["q_lora_rank"] = 0
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    scaling = read_field(fields, name, dict, {})
    if (scaling.get("rope_type") or scaling.get("type") or "default") != "default":
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale != all_dim or not mscale:
            raise UserError(
                f"config.json: {name}.mscale = {mscale!r}, mscale_all_dim = {all_dim!r}: this family supports only "
                "equal numbers above 0"
            )
        found[name] = {key: value for key, value in scaling.items() if key != "mscale_all_dim"}
    return found


def _written(config: DeepseekV3Config) -> dict[str, Any]:
    scaling = _YARN.written(config)
    both = {} if scaling is None else {"rope_scaling": scaling | {"mscale_all_dim": config.rope_mscale}}
    # head_dim: that of rotary embeddings, for transformers
    widths = {"head_dim": config.qk_rope_head_dim, "qk_head_dim": config.head_dim}
    return both | widths | {"q_lora_rank": config.q_lora_rank or None}


def _block(config: DeepseekV3Config, index: int) -> dict[str, StoredName]:
    names = dict(PRE_NORM_NAMES)
    if config.q_lora_rank:
        queries = {"wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj"}
    else:
        queries = {"wq_b": "q_proj"}
    others = {"wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj"}
    names |= {f"attention.{ours}": f"self_attn.{theirs}" for ours, theirs in (queries | others).items()}
    has_experts = index >= config.n_dense_layers
    if has_experts:
        names["feed_forward.router"] = "mlp.gate"
    if not has_experts or config.n_shared_experts:
        ours, theirs = ("feed_forward.shared", "mlp.shared_experts") if has_experts else ("feed_forward", "mlp")
        names |= {f"{ours}.{own}": f"{theirs}.{stored}" for own, stored in EXPERT_NAMES.items()}
    if index >= config.n_layers:
        names |= {"embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj"}
        names["output_norm"] = "shared_head.norm"
    found: dict[str, StoredName] = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}
    if has_experts:
        found |= expert_names(config.n_experts) | {CHOICE_BIAS: "mlp.gate.e_score_correction_bias"}
    return found


_YARN = replace(
    YARN,
    fields=YARN.fields | {"rope_mscale": "mscale"},
    supported={name: value for name, value in YARN.supported.items() if "mscale" not in name},
    attention_factor=lambda _: 1.0,  # with equal mscale and mscale_all_dim
)
FORMAT = DecoderFormat(
    DeepseekV3Config,
    check,
    fields={
        "ffn_dim": "moe_intermediate_size",
        "dense_ffn_dim": "intermediate_size",
        "n_dense_layers": "first_k_dense_replace",
        "n_experts": "n_routed_experts",
        "n_shared_experts": "n_shared_experts",
        "n_groups": "n_group",
        "n_active_groups": "topk_group",
        "route_scale": "routed_scaling_factor",
        "balance_loss": "aux_loss_alpha",
        "n_further_tokens": "num_nextn_predict_layers",
        **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
        **{name: name for name in ("qk_rope_head_dim", "v_head_dim")},
    },
    block=_block,
    supported={
        "norm_topk_prob": True,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    scaling=_YARN,
    prepared=_prepared,
    written=_written,
)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    config_type=DeepseekV3Config,
    flavors=FLAVORS,
    check=check,
    build=DeepseekV3,
    structure=decoder_structure,
    flops_per_token=flops_per_token,
    hugging_face=replace(FORMAT.hugging_face("deepseek_v3", "DeepseekV3ForCausalLM"), quantization="fp8"),
    needs=YARN_NEEDS
    | {
        "rope_mscale": YARN_NEEDS["rope_beta_fast"],
        "dense_ffn_dim": Needs("model.n_dense_layers above 0", lambda config: config.n_dense_layers > 0),
        "n_active_groups": Needs("model.n_groups above 1", lambda config: config.n_groups > 1),
    },
)
