"""Recomputation (activation checkpointing): blocks that keep less for backward, and compute it again there."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from titanlite.models.family import Plan
from titanlite.parallel.compile import can_split_compiled_backward
from titanlite.runtime.errors import Problem, check_ranges, ranged, require

SAVED_OPS: tuple[Any, ...] = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
)
"""What selective_policy "op" keeps: the results that cost most to compute, or to communicate. The rest (norms,
rotations, activations, gathers) is computed again."""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """What is kept from the forward pass for backward, and what is computed again there. Never changes numbers."""

    mode: Literal["none", "full", "selective"] = "none"
    """full: a block keeps its input only; selective: by selective_policy."""
    selective_policy: Literal["layer", "op"] = "op"
    """layer: every selective_every-th block keeps its input only, the others all; op: all blocks keep the results of
    matrix products, attention and reductions."""
    selective_every: int = ranged(2, "1 recomputes every block, 2 every other one", least=1)
    """layer: blocks 0, selective_every, 2 x selective_every, ... are recomputed."""
    preserve_rng_state: bool = True
    """Random numbers are the same in the recomputation."""
    determinism_check: Literal["default", "none"] = "default"
    """default: shapes, dtypes and devices of what is recomputed are compared with the forward pass."""
    early_stop: bool = True
    """A recomputation ends as soon as it has what backward needs."""
    debug: bool = False
    """Errors of a recomputation name the operations of both passes; slow."""


def check_activation_checkpoint(
    section: ActivationCheckpointConfig, *, compiled: bool, pp_schedule: str, splits_backward: bool
) -> list[Problem]:
    """compiled: whether blocks are. splits_backward: whether the pipeline, running `pp_schedule`, computes gradients of
    weights apart from those of inputs: each recomputes, and what torch has kept of operations can be read once only,
    unless compilation has made one backward pass of it."""
    key = "activation_checkpoint"
    return [
        *check_ranges(section, key),
        *require(
            compiled or not splits_backward or not inside_compilation(section),
            f"{key}.selective_policy",
            section.selective_policy,
            f'"layer" with parallelism.pp_schedule = {pp_schedule} where blocks are not compiled: it splits the '
            "backward pass in two, and results kept by operation can be read once",
            ("compile.enable = true, " if can_split_compiled_backward() else "")
            + 'selective_policy = "layer", mode = "full", or pp_schedule = "1F1B"',
        ),
    ]


def inside_compilation(section: ActivationCheckpointConfig) -> bool:
    """Whether recomputation belongs into what is compiled, and not around it.

    A policy for operations must see them, and a compiled block shows none: outside, it would recompute everything.
    One that keeps nothing must be outside, since inside it breaks with tensor parallelism.
    """
    return section.mode == "selective" and section.selective_policy == "op"


def apply_recompute(model: nn.Module, plan: Plan, section: ActivationCheckpointConfig) -> list[str]:
    """Lets the blocks that the section asks for recompute, in place; returns what was applied, for the start log.

    A block's forward is replaced, so that no name of a parameter changes. Before or after compilation: see
    `inside_compilation`.
    """
    if section.mode == "none":
        return []
    for name, index in plan.blocks.items():
        if recomputes(section, index):
            block = model.get_submodule(name)
            block.forward = _recomputed(block.forward, section)
    what = section.mode if section.mode == "full" else f"selective ({section.selective_policy})"
    return [f"{what} activation checkpointing"]


def recomputes(section: ActivationCheckpointConfig, index: int) -> bool:
    """Whether the block of that index in the whole model keeps less than everything."""
    by_layer = section.mode == "selective" and section.selective_policy == "layer"
    return section.mode != "none" and (not by_layer or index % section.selective_every == 0)


def _recomputed(forward: Callable[..., Any], section: ActivationCheckpointConfig) -> Callable[..., Any]:
    by_op = section.mode == "selective" and section.selective_policy == "op"
    options = {"context_fn": partial(create_selective_checkpoint_contexts, list(SAVED_OPS))} if by_op else {}
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
