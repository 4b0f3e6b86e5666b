"""Activation checkpointing: blocks save fewer activations in forward and recompute them in backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import titanlite.models.capped_attention  # registers its operation
import titanlite.models.delta_rule  # registers its operation
import titanlite.models.linear  # noqa: F401  # registers its operation
from titanlite.models.family import Structure
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting
from titanlite.runtime.torch_internals import (
    compiled_region_operation,
    functional_collectives,
    fused_attention_operations,
    is_host_copy,
    product_operations,
    set_activation_memory_budget,
)

SAVED_OPS: frozenset[Any] = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        *product_operations(),
        *fused_attention_operations(),
        torch.ops.higher_order.flex_attention,  # in a compiled block
        compiled_region_operation(),  # FlexAttention in other blocks
        torch.ops.titanlite.linear.default,
        torch.ops.titanlite.capped_attention.default,
        torch.ops.titanlite.gated_delta_rule.default,
        functional_collectives().reduce_scatter_tensor.default,
    )
)
"""Operations whose results selective_policy "op" saves: the most expensive ones to compute or communicate. The rest
(norms, rotations, activation functions, gathers, exchanges) is recomputed. See also by_operation."""
_EXCHANGE = functional_collectives().all_to_all_single.default

PARTITIONING_BACKENDS = ("inductor", "aot_eager")
"""Backends of torch.compile whose partition of forward and backward follows the memory budget."""


_SELECTS = Needs('activation_checkpoint.mode = "selective"', lambda section: section.mode == "selective")
_BUDGETS = Needs('activation_checkpoint.mode = "memory_budget"', lambda section: section.mode == "memory_budget")
_RECOMPUTES = Needs(
    'activation_checkpoint.mode = "full" or "selective"', lambda section: section.mode in ("full", "selective")
)


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """Activation checkpointing; it does not change the numerics."""

    AFFECTS: ClassVar[Affects] = "layout"

    mode: Literal["none", "full", "selective", "memory_budget"] = setting("none", affects="search")
    """full: a block saves only its input; selective: see selective_policy; memory_budget: the compiler chooses what to
    recompute, see memory_budget."""
    selective_policy: Literal["layer", "op"] = setting("op", needs=_SELECTS)
    """layer: every other block saves only its input, the others all activations; op: all blocks save the results of
    matrix products, attention and reductions."""
    memory_budget: float = setting(0.5, "0.5 is a start", least=0.0, most=1.0, needs=_BUDGETS)
    """memory_budget: share of the activations that a compiled block may save, of those that it saves with mode "none".
    0: only its input. The compiler recomputes the cheapest operations."""
    preserve_rng_state: bool = setting(True, needs=_RECOMPUTES)
    """Restore torch's random state, so that a recomputation draws the same numbers as the forward pass."""
    determinism_check: Literal["default", "none"] = setting("default", needs=_RECOMPUTES)
    """default: compares shapes, dtypes and devices of recomputed tensors with those of the forward pass."""
    early_stop: bool = setting(True, needs=_RECOMPUTES)
    """Stop a recomputation as soon as backward has all the tensors that it needs."""
    debug: bool = setting(False, needs=_RECOMPUTES)
    """Errors of a recomputation list the operations of both passes; slow."""


def check_activation_checkpoint(
    section: ActivationCheckpointConfig,
    *,
    compiled: bool,
    backend: str,
    tp: int,
    pp_schedule: str,
    splits_backward: bool,
) -> list[Problem]:
    """Check the section against the compiler and the pipeline schedule.

    compiled: whether blocks are compiled, with `backend`. splits_backward: whether `pp_schedule` computes gradients of
    weights separately from those of inputs. Each of the two passes recomputes, but torch's saved results of operations
    can be read only once, unless compilation merges the two.
    """
    rules = Rules("activation_checkpoint", section)
    if section.mode == "memory_budget":
        rule = f"only for compiled blocks, with a backend of {', '.join(PARTITIONING_BACKENDS)}"
        remedy = 'compile.enable = true with compile.backend = "inductor", or mode = "selective"'
        rules.require("mode", compiled and backend in PARTITIONING_BACKENDS, rule, remedy)
        rule = f"only with parallelism.tp = 1, and it is {tp}: the compiler does not know the cost of communication"
        rules.require("mode", tp == 1, rule, 'mode = "selective"')
    twice = splits_backward and not compiled and inside_compilation(section)
    rule = f'"layer" with parallelism.pp_schedule = {pp_schedule}, whose backward pass needs the results of "op" twice'
    remedy = 'compile.enable = true, "layer", mode = "full", or pp_schedule = "1F1B"'
    rules.require("selective_policy", not twice, rule, remedy)
    return rules.problems


def inside_compilation(section: ActivationCheckpointConfig) -> bool:
    """Whether recomputation is applied before compilation, so that it is part of the compiled block.

    The policy "op" must be inside: a compiled block hides its operations, so outside it would recompute everything.
    Policies that save only the input must be outside, since inside they fail with tensor parallelism.
    """
    return section.mode == "selective" and section.selective_policy == "op"


def by_operation(_context: Any, operation: Any, *args: Any, **keys: Any) -> CheckpointPolicy:
    """The selective_policy "op". Beside SAVED_OPS it saves copies to the host, for which a recomputation would wait,
    and exchanges of integers, which are the numbers of rows for experts. Exchanged rows would take nearly as much
    memory as all other results of a block with experts."""
    is_saved = operation in SAVED_OPS or is_host_copy(operation, args, keys)
    if operation is _EXCHANGE:
        is_saved = not args[0].is_floating_point()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(model: nn.Module, structure: Structure, section: ActivationCheckpointConfig) -> list[str]:
    """Apply activation checkpointing to the blocks, in place; return descriptions for the start log.

    Replaces a block's forward, so that parameter names do not change. To be called before the blocks are compiled if
    `inside_compilation(section)`, else after. The memory budget is a setting of the process, for all blocks that are
    compiled later.
    """
    set_activation_memory_budget(section.memory_budget if section.mode == "memory_budget" else 1.0)
    if section.mode == "none":
        return []
    if section.mode == "memory_budget":
        return [f"recomputation with a memory budget of {section.memory_budget:g}"]
    for name, index in structure.blocks.items():
        if recomputes(section, index):
            block = model.get_submodule(name)
            block.forward = _recomputed(block.forward, section)
    what = section.mode if section.mode == "full" else f"selective ({section.selective_policy})"
    return [f"{what} activation checkpointing"]


def recomputes(section: ActivationCheckpointConfig, index: int) -> bool:
    """Whether the block `index` of the full model is recomputed, in full or by operation."""
    by_layer = section.mode == "selective" and section.selective_policy == "layer"
    return section.mode in ("full", "selective") and (not by_layer or index % 2 == 0)


def recomputed_blocks(section: ActivationCheckpointConfig, blocks: Sequence[int]) -> Sequence[int]:
    """Those of these blocks that are recomputed."""
    if section.mode == "full" or inside_compilation(section):
        return blocks
    return [index for index in blocks if recomputes(section, index)]


def _recomputed(forward: Callable[..., Any], section: ActivationCheckpointConfig) -> Callable[..., Any]:
    by_op = partial(create_selective_checkpoint_contexts, by_operation)
    options = {"context_fn": by_op} if inside_compilation(section) else {}
    return partial(
        checkpoint,
        forward,
        use_reentrant=False,
        preserve_rng_state=section.preserve_rng_state,
        determinism_check=section.determinism_check,
        early_stop=section.early_stop,
        debug=section.debug,
        **options,
    )
