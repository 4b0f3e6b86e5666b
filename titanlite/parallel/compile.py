"""torch.compile for each block, and for the loss."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from titanlite.models.family import Plan
from titanlite.models.head import exponentials_, output_layers_of
from titanlite.models.losses import CROSS_ENTROPY
from titanlite.runtime.errors import Needs, Problem, Rules


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""
    backend: str = "inductor"
    """Backend of torch.compile."""
    components: tuple[Literal["model", "loss"], ...] = ("model", "loss")
    """model: each transformer block separately; loss: the cross-entropy, no other loss."""


_ENABLED = Needs("compile.enable = true", lambda section: section.enable)
NEEDS = {
    "backend": Needs(f"{_ENABLED.condition} and components", lambda section: section.enable and section.components),
    "components": _ENABLED,
}
"""See Needs."""


def check_compile(
    section: CompileConfig, *, pp_schedule: str, splits_backward: bool, has_experts: bool
) -> list[Problem]:
    """Check that the backend exists, and that this torch can compile blocks under `pp_schedule`.

    splits_backward: whether that schedule computes gradients of weights separately from those of inputs. has_experts:
    whether blocks have experts, whose sizes depend on the data.
    """
    rules = Rules("compile", section)
    if not section.enable:
        return []
    backends = torch.compiler.list_backends(exclude_tags=())
    remedy = 'compile.backend = "inductor"'
    rules.require("backend", section.backend in backends, f"one of {', '.join(backends)}", remedy)
    compiles = compiles_blocks(section)
    rule = "without model for a mixture of experts, whose blocks are not compiled yet"
    remedy = 'compile.components = ["loss"], or compile.enable = false'
    rules.require("components", not (has_experts and compiles), rule, remedy)
    splits = compiles and splits_backward and not can_split_compiled_backward()
    rule = f"false with parallelism.pp_schedule = {pp_schedule} and torch {torch.__version__}, which is older than 2.13"
    rules.require("enable", not splits, rule, "another schedule, such as Interleaved1F1B, or a newer torch")
    return rules.problems


def can_split_compiled_backward() -> bool:
    """Whether this torch can compute gradients of weights separately from those of inputs in compiled blocks."""
    return torch.__version__ >= "2.13"  # TorchVersion compares versions, not strings


def compiles_blocks(section: CompileConfig) -> bool:
    """Whether transformer blocks are compiled."""
    return section.enable and "model" in section.components


def apply_compile(model: nn.Module, plan: Plan, section: CompileConfig) -> list[str]:
    """Compile each block's forward and the loss in place, without renaming parameters; return descriptions for the
    start log."""
    applied = []
    if section.enable and "loss" in section.components:
        for head in (head for head in output_layers_of([model]) if head.loss is CROSS_ENTROPY):
            head.exponentials = torch.compile(exponentials_, backend=section.backend)
            applied.append(f"compile ({section.backend}) to the loss")
    if compiles_blocks(section):
        for name in plan.blocks:
            block = model.get_submodule(name)
            block.forward = torch.compile(block.forward, backend=section.backend, fullgraph=True)
        applied.append(f"compile ({section.backend}) to each block")
    return applied
