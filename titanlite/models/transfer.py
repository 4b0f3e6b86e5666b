"""µP: how initial values, learning rate, eps and weight decay of a parameter follow from the width and the depth of the
model, so that those of a small base model also hold for a large one (docs/optimizers.md has the table).

Width: Yang et al., "Tensor Programs V", 2022, table 8. Depth: Dey et al., "CompleteP", 2025, with alpha = 1. Both have
factors in the forward pass, of the logits and of the residual branches. Here they are a part of the weights: the model
is an ordinary one. Adam and Muon do not see the scale of a gradient, so a weight that is x times as large, with x times
the learning rate and 1/x of eps, is trained alike.
"""

from dataclasses import replace

from titanlite.models.family import BASE, DecoderConfig, Transfer

MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "wq_a", "wq_b", "wkv_a", "wkv_b", "projection")
"""Modules of blocks whose inputs and outputs grow with the width."""


def parts_of(name: str) -> tuple[str, bool]:
    """The module, or parameter of experts, that has a parameter, and whether it is a bias."""
    for end in (".bias", "_bias"):
        if name.endswith(end):
            return name.removesuffix(end).rpartition(".")[2], True
    return name.removesuffix(".weight").rpartition(".")[2], False


def transfer_of(config: DecoderConfig, name: str) -> Transfer:
    """The Transfer of the parameter `name` of the full model. Only the configuration decides: no shard of it."""
    if not config.transfers:
        return BASE
    width = config.dim / (config.base_dim or config.dim)
    layers = (config.base_layers or config.n_layers) / config.n_layers
    base = replace(config, dim=config.base_dim or config.dim)  # type: ignore[type-var]
    growth = config.embedding_scale / base.embedding_scale
    module, is_bias = parts_of(name)
    scale = 1.0
    if module == "tok_embeddings":
        scale = 1 / growth
    elif module in ("output", "router") and not is_bias:
        scale = 1 / width
    elif module == "norm" and config.tie_embeddings:  # of the logits: the weights of the output are the embeddings
        scale = growth / width
    elif module in (("wo", "w2") if config.norms == "before" else ("attention_post_norm", "ffn_post_norm")):
        scale = layers
    depth = layers if name.startswith("layers.") else 1.0
    return Transfer(width, depth, scale, is_hidden=module in MATRICES and not is_bias)
