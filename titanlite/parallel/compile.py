"""torch.compile for each block, and for the cross-entropy."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.models.experts import MixtureOfExperts
from titanlite.models.family import Structure
from titanlite.models.head import exponentials_, output_layers_of
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting
from titanlite.runtime.torch_internals import set_compiler

_COMPILES = Needs("compile.enable = true", lambda section: section.enable)


@dataclass(frozen=True)
class CompileConfig:
    """torch.compile."""

    AFFECTS: ClassVar[Affects] = "layout"

    enable: bool = False
    """Compile each transformer block without experts separately, and the cross-entropy; no other loss."""
    backend: str = setting("inductor", needs=_COMPILES)
    """Backend of torch.compile."""


def check_compile(section: CompileConfig) -> list[Problem]:
    """Check that the backend exists."""
    rules = Rules("compile", section)
    if not section.enable:
        return []
    backends = torch.compiler.list_backends(exclude_tags=())
    remedy = 'compile.backend = "inductor"'
    rules.require("backend", section.backend in backends, f"one of {', '.join(backends)}", remedy)
    return rules.problems


def compiles_blocks(section: CompileConfig, hyper_parameters: Any) -> bool:
    """Whether transformer blocks are compiled: those with experts, whose sizes depend on the data, are not yet."""
    return section.enable and getattr(hyper_parameters, "n_experts", 1) == 1


def apply_compile(model: nn.Module, structure: Structure, section: CompileConfig) -> list[str]:
    """Compile the forward of each block without experts, and the cross-entropy, in place, without renaming parameters;
    return descriptions for the start log."""
    if not section.enable:
        return []
    applied = []
    for head in (head for head in output_layers_of([model]) if not head.computation.loss.needs_logits):
        compiled = torch.compile(exponentials_, backend=section.backend)
        head.computation = replace(head.computation, exponentials=compiled)
        applied.append(f"compile ({section.backend}) to the loss")
    blocks = [model.get_submodule(name) for name in structure.blocks]
    dense = [block for block in blocks if not any(isinstance(each, MixtureOfExperts) for each in block.modules())]
    set_compiler(allow_unspec_int_on_nn_module=True)
    for block in dense:
        block.forward = torch.compile(block.forward, backend=section.backend, fullgraph=True)
    where = (
        "each block" if len(dense) == len(blocks) else f"{len(dense)} of {len(blocks)} blocks: those without experts"
    )
    return [*applied, f"compile ({section.backend}) to {where}"]
