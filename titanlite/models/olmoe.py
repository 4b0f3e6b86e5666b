"""OLMoE (Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models", 2024): the decoder with a mixture of
experts in every block, and with RMSNorm over all heads of queries, and over all of keys, before the rotation."""

from dataclasses import dataclass

from titanlite.models.decoder import (
    Block,
    Decoder,
    ExpertHyperParameters,
    HyperParameters,
    check_decoder,
    check_width,
    decoder_family,
)
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.hugging_face import HEAD_NORM_NAMES, NO_SPECIAL_TOKENS, DecoderFormat
from titanlite.models.layers import Attention, WideNorm
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class OlmoeConfig(ExpertHyperParameters, HyperParameters):
    """Hyper-parameters of the olmoe family. Each may be given in [model] and overrides the flavor's value."""

    n_experts: int = 64
    balance_loss: float = 0.01 / 16
    z_loss: float = 0.001 / 16
    init_by_depth: bool = False


FLAVORS = {
    "debug": OlmoeConfig(
        dim=256, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=2000, n_experts=8, n_active_experts=2
    ),
    "1B-7B": OlmoeConfig(dim=2048, n_layers=16, n_heads=16, n_kv_heads=16, ffn_dim=1024, vocab_size=50_304),
}
"""The published size, and a debug size for a laptop.

Initial values and losses are those of configs/OLMoE-1B-7B-0924.yml of its training: normal with a standard deviation of
0.02, cut at three of them, in all matrices; 0.01 and 0.001 for the two losses of routers, divided by the 16 blocks.
"""


class Olmoe(Decoder):
    """The decoder with experts whose weights are not normalized, and RMSNorm over all heads of queries and of keys."""

    def __init__(self, config: OlmoeConfig) -> None:
        super().__init__(config, lambda _: Block(config, attention(config), MixtureOfExperts(config, normalize=False)))


def attention(config: OlmoeConfig) -> Attention:
    """Attention module of one block."""
    heads = (config.n_heads, config.n_kv_heads)
    norms = [WideNorm(number * config.head_dim, config.norm_eps) for number in heads]
    return Attention(config.dim, *heads, config.head_dim, *norms)


def check(config: OlmoeConfig, seq_len: int, tp: int, pp: int) -> list[Problem]:
    return [*check_decoder(config, seq_len, tp, pp), *check_width(config)]


FORMAT = DecoderFormat(
    OlmoeConfig,
    check,
    block_names=HEAD_NORM_NAMES,
    supported={"norm_topk_prob": False, "clip_qkv": None},
    written=lambda _: NO_SPECIAL_TOKENS,
)

OLMOE = decoder_family("olmoe", FLAVORS, check, Olmoe, FORMAT.hugging_face("olmoe", "OlmoeForCausalLM"))
