"""How parallelism reaches Llama 3."""

from titanlite.models.family import Plan
from titanlite.models.llama3.config import Llama3Config


def plan(config: Llama3Config) -> Plan:
    """The embedding, each block, and the end are units; tied, the embedding and the end share a parameter: one unit."""
    blocks = tuple((f"layers.{index}",) for index in range(config.n_layers))
    if config.tie_embeddings:
        return Plan(data_units=(*blocks, ("tok_embeddings", "norm", "output")))
    return Plan(data_units=(("tok_embeddings",), *blocks, ("norm", "output")))
