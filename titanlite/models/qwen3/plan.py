"""How parallelism reaches Qwen3: as any decoder, and the norms of queries and keys beside."""

from titanlite.models.decoder.plan import TENSOR_STYLES as OF_ANY_DECODER
from titanlite.models.decoder.plan import decoder_plan
from titanlite.models.family import Plan, TensorStyle
from titanlite.models.qwen3.config import Qwen3Config

TENSOR_STYLES: dict[str, TensorStyle] = {
    **OF_ANY_DECODER,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
}


def plan(config: Qwen3Config) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)
