"""How parallelism reaches a decoder."""

from collections.abc import Mapping

from titanlite.models.decoder.config import DecoderConfig
from titanlite.models.family import Plan, TensorStyle

TENSOR_STYLES: dict[str, TensorStyle] = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wk": "column",
    "layers.*.attention.wv": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "column",
    "layers.*.feed_forward.w3": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "norm",
    "output": "logits",
}


def decoder_plan(config: DecoderConfig, tensor_styles: Mapping[str, TensorStyle]) -> Plan:
    """The embedding, each block, and the end are units; tied, the embedding and the end share a parameter: one unit."""
    blocks = {f"layers.{index}": index for index in range(config.n_layers)}
    units: list[tuple[str, ...]] = [(block,) for block in blocks]
    if config.tie_embeddings:
        units = [*units, ("tok_embeddings", "norm", "output")]
    else:
        units = [("tok_embeddings",), *units, ("norm", "output")]
    return Plan(tuple(units), blocks, tensor_styles)
