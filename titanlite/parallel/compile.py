"""torch.compile for each block, and for the cross-entropy."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from titanlite.models.experts import mixtures_of
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
    """Compile each transformer block separately, and the cross-entropy; no other loss. Blocks with experts are compiled
    on GPUs in bfloat16, without ep."""
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


def compiles_blocks(section: CompileConfig, hyper_parameters: Any, *, reads_counts: bool = True) -> bool:
    """Whether all transformer blocks are compiled. reads_counts: see Experts.reads_counts."""
    return section.enable and (getattr(hyper_parameters, "n_experts", 1) == 1 or not reads_counts)


def apply_compile(
    model: nn.Module,
    structure: Structure,
    section: CompileConfig,
    device_type: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Compile the forward of each block, and the cross-entropy, in place, without renaming parameters; return
    descriptions for the start log. Not blocks with experts for which the host waits: see Experts.reads_counts.

    device_type, dtype: of the computation.
    """
    if not section.enable:
        return []
    applied = []
    for head in (head for head in output_layers_of([model]) if not head.computation.loss.needs_logits):
        compiled = torch.compile(exponentials_, backend=section.backend)
        head.computation = replace(head.computation, exponentials=compiled)
        applied.append(f"compile ({section.backend}) to the loss")
    set_compiler(allow_unspec_int_on_nn_module=True)
    num_compiled = 0
    for block in map(model.get_submodule, structure.blocks):
        mixtures = mixtures_of([block])
        if any(mixture.experts.reads_counts(device_type, dtype) for mixture in mixtures):
            continue
        for mixture in mixtures:
            mixture.prepare_compilation()
        block.forward = torch.compile(block.forward, backend=section.backend, fullgraph=True)
        num_compiled += 1
    total = len(structure.blocks)
    where = "each block"
    if num_compiled < total:
        where = f"{num_compiled} of {total} blocks: not to those with experts for which the host waits"
    return [*applied, f"compile ({section.backend}) to {where}"]
