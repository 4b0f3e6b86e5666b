"""How parallelism reaches Llama 3: as any decoder."""

from titanlite.models.decoder.plan import TENSOR_STYLES, decoder_plan
from titanlite.models.family import Plan
from titanlite.models.llama3.config import Llama3Config


def plan(config: Llama3Config) -> Plan:
    return decoder_plan(config, TENSOR_STYLES)
