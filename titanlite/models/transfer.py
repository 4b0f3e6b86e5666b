"""µP: how initial values, learning rate, eps and weight decay of a parameter follow from the width and the depth of the
model, so that those of a small base model also hold for a large one (docs/optimizers.md has the table).

Width: Yang et al., "Tensor Programs V", 2022, table 8. Depth: Dey et al., "CompleteP", 2025, with alpha = 1. Both have
factors in the forward pass, of the logits and of the residual branches. Here they are a part of the weights: the model
is an ordinary one. Adam and Muon do not see the scale of a gradient, so a weight that is x times as large, with x times
the learning rate and 1/x of eps, is trained alike.
"""

import math
from dataclasses import replace

from torch import nn

from titanlite.models.family import DecoderConfig, Structure
from titanlite.models.parts import BASE, Init, Role, Transfer, declared_roles

STD = 0.02
"""Of usual initial values, in a configuration without init_std."""


def roles_of(model: nn.Module, config: object, structure: Structure) -> dict[str, Role]:
    """The roles of the parameters of a full model, on any device, by their first names, with the initial values and the
    factors of this configuration. Parameters for which nothing is declared have none."""
    found, blocks = {}, tuple(f"{name}." for name in structure.blocks)
    for name, role in declared_roles(model):
        if role is None:
            continue
        transfer = BASE
        if isinstance(config, DecoderConfig):
            transfer = transfer_of(config, role, in_block=name.startswith(blocks))
        found[name] = replace(role, transfer=transfer, init=_initial(config, role, transfer))
    return found


def _initial(config: object, role: Role, transfer: Transfer) -> Init:
    """That of the role times the factor of its Transfer, less the offset of a norm. With init_by_depth, the std of
    matrices that write into the residual stream is multiplied by 1/sqrt(number of such matrices) =
    1/sqrt(2 * n_layers), so that the variance of the residual stream does not grow with depth (Radford et al., "GPT-2",
    2019, section 2.3); with a base model, n_layers is that of the base model."""
    if role.init is None:
        if not isinstance(config, DecoderConfig):
            return Init("normal", STD)
        std = config.init_std * transfer.std
        if config.init_by_depth and role.writes:
            std /= math.sqrt(2 * (config.base_layers or config.n_layers))
        return Init("normal", std)
    if role.init.kind == "normal":
        return Init("normal", role.init.value * transfer.std)
    if role.init.kind == "ones":
        value = transfer.std - role.offset
        return Init("ones") if value == 1 else Init("constant", value)
    return role.init


def transfer_of(config: DecoderConfig, role: Role, *, in_block: bool) -> Transfer:
    """The Transfer of a parameter with this role. Only the configuration decides: no shard of it."""
    if not config.transfers:
        return BASE
    width = config.dim / (config.base_dim or config.dim)
    layers = (config.base_layers or config.n_layers) / config.n_layers
    base = replace(config, dim=config.base_dim or config.dim)  # type: ignore[type-var]
    growth = config.embedding_scale / base.embedding_scale
    is_hidden = role.width == "hidden"
    scale = 1.0
    if role.width == "input":
        scale = 1 / growth
    elif role.width == "output":
        scale = 1 / width
    elif role.width == "last" and config.tie_embeddings:  # the weights of the output are the embeddings
        scale = growth / width
    elif role.writes == ("product" if config.norms == "before" else "norm"):
        scale = layers
    return Transfer(width, layers if in_block else 1.0, scale, is_hidden=is_hidden)
