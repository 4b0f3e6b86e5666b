"""Which optimizer updates a parameter, and with which weight decay."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from titanlite.models.family import Plan
from titanlite.optim.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Group:
    """Parameters, by name, that one optimizer of OPTIMIZERS updates with the same weight decay."""

    optimizer: str
    weight_decay: float
    parameters: Mapping[str, Tensor]


def divide(section: OptimizerConfig, named: Mapping[str, Tensor], plan: Plan) -> list[Group]:
    """The groups of these parameters. plan: of the full model, or of the stage that has them."""
    found: dict[tuple[str, float], dict[str, Tensor]] = {}
    for name, parameter in named.items():
        optimizer = "AdamW" if section.name == "Muon" and not takes_muon(plan, name, parameter) else section.name
        skips = any(fnmatchcase(name, pattern) for pattern in section.weight_decay_skip)
        found.setdefault((optimizer, 0.0 if skips else section.weight_decay), {})[name] = parameter
    return [Group(optimizer, decay, parameters) for (optimizer, decay), parameters in found.items()]


def takes_muon(plan: Plan, name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter by default: matrices of blocks, and stacks of them, but for routers."""
    in_block = any(name.startswith(f"{block}.") for block in plan.blocks)
    routers = (pattern for pattern, style in plan.tensor_styles.items() if style == "router")
    return in_block and parameter.dim() >= 2 and not any(fnmatchcase(name, f"{pattern}.*") for pattern in routers)
