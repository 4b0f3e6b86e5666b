"""The [float8] section: which layers multiply in float8, on which sizes, and on any mesh alike."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn

from titanlite.models.experts import Experts
from titanlite.models.family import Structure
from titanlite.models.float8 import RECIPES, UNIT, Float8, RecipeName, Scale
from titanlite.models.linear import multiplied, use_own_products
from titanlite.models.parts import Column, OwnPositions, Row
from titanlite.parallel.collectives import all_maximum
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting
from titanlite.runtime.text import counted

_IS_USED = Needs("a float8.recipe", lambda section: section.recipe != "none")


@dataclass(frozen=True)
class Float8Config:
    """Matrix products in float8 (docs/numerics.md)."""

    AFFECTS: ClassVar[Affects] = "numbers"

    recipe: Literal["none", RecipeName] = "none"
    """Blocks of the operands of linear layers and experts that share a scale; not of the output layer and of routers.
    mxfp8: 32 elements. blockwise: 128, of weights 128 x 128. rowwise: a row; weight gradients have the dtype of the
    computation."""
    scale: Scale = setting("ceil", needs=_IS_USED)
    """ceil, floor: a power of two, rounded up so that no element is clamped, or down as in the specification of MX.
    float32: the largest magnitude / 448, not for mxfp8."""
    exclude: tuple[str, ...] = setting((), needs=_IS_USED)
    """Linear layers and experts that keep the dtype of the computation: full names, or shell patterns for them, such as
    "layers.0.*"."""
    product: Literal["auto", "emulated"] = setting("auto", needs=_IS_USED, affects="layout")
    """auto: by the matrix unit of a GPU from compute capability 9.0 on, if the recipe is rowwise and the computation is
    in bfloat16, of layers whose sizes are multiples of 16; else emulated: in float32, slower than without float8."""


def float8_layers(
    model: nn.Module, structure: Structure, exclude: tuple[str, ...] = ()
) -> Iterator[tuple[str, nn.Linear | Experts]]:
    """The layers of the blocks that multiply in float8, by name. Those with a forward of their own do not: routers."""
    for block in structure.blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
            if (is_linear or isinstance(module, Experts)) and not any(fnmatchcase(name, each) for each in exclude):
                yield name, module


def could_multiply_on_device(section: Float8Config, device_type: str, dtype: torch.dtype) -> bool:
    """Whether products are those of a device with a matrix unit for them. dtype: of the computation."""
    fits = section.recipe == "rowwise" and section.product == "auto"
    return fits and dtype == torch.bfloat16 and device_type == "cuda"


def multiplies_on_device(section: Float8Config, device_type: str, dtype: torch.dtype) -> bool:
    """Whether products are those of this machine's device. dtype: of the computation."""
    fits = could_multiply_on_device(section, device_type, dtype)
    if not fits or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


def apply_float8(
    model: nn.Module,
    structure: Structure,
    section: Float8Config,
    tp: dist.ProcessGroup | None,
    *,
    on_device: bool = False,
) -> list[str]:
    """Let the layers multiply in float8, in place, after tensor and expert parallelism; return descriptions for the
    start log.

    The model must have no `check_float8` problems. tp: None: one rank. on_device: see Float8; experts are emulated.
    """
    if section.recipe == "none":
        return []
    layers = dict(float8_layers(model, structure, section.exclude))
    use_own_products(layers.values())
    recipe, maximum = RECIPES[section.recipe], None
    if recipe.block == 0 and tp is not None and tp.size() > 1:
        maximum = partial(all_maximum, group=tp)
    # Shared by all blocks, so that one compiled graph is that of all.
    uncut = Float8(recipe, section.scale, on_device=on_device)
    cut = {Row: replace(uncut, maximum=maximum), Column: replace(uncut, gradient_maximum=maximum)}
    # Which positions meet in a block of an expert's rows would depend on the layout.
    cut_experts = (
        replace(cut[kind], recipe=replace(recipe, of_tokens=False), on_device=False) for kind in (Column, Row)
    )
    inner, outer = (partial(multiplied, products=settings) for settings in cut_experts)
    for module in layers.values():
        if isinstance(module, Experts):
            products: dict[str, Any] = {"products": (inner, outer)}
            module.feed_forward = partial(module.feed_forward, **products)
            continue
        own = (settings for kind, settings in cut.items() if isinstance(module, kind))
        module.products = next(own, uncut)  # type: ignore[assignment]
    degree = 1 if tp is None else tp.size()
    fits = (_fits_device(module, degree) for module in layers.values())
    by_device = sum(fits) if on_device else 0
    how = [f"{counted(by_device, 'layer')} by the matrix unit"] * (by_device > 0)
    how += [f"{counted(len(layers) - by_device, 'layer')} emulated"] * (by_device < len(layers))
    return [f"float8 ({section.recipe}, {', '.join(how)})"]


def check_float8(
    section: Float8Config, model: nn.Module, structure: Structure, layout: ParallelismConfig, seq_len: int
) -> list[Problem]:
    """Problems between the blocks of the recipe, the sizes of a full model, and the parts that ranks have of them."""
    rules, tp, cp = Rules("float8", section), layout.tp, layout.cp
    if section.recipe == "none":
        return []
    rule, remedy = "ceil or floor with mxfp8, whose scales are powers of two", 'leave it out, or recipe = "blockwise"'
    rules.require("scale", section.recipe != "mxfp8" or section.scale != "float32", rule, remedy)
    names = [name for name, _ in float8_layers(model, structure)]
    rule = "none with a family whose blocks have neither nn.Linear nor Experts"
    if not rules.require("recipe", names, rule, "leave it out"):
        return rules.problems
    for pattern in section.exclude:
        is_used = any(fnmatchcase(name, pattern) for name in names)
        rule = f"the linear layers and experts of the blocks, such as {names[0]}; {pattern} is none of them"
        rules.require("exclude", is_used, rule, "correct it, or leave it out")
    layers = dict(float8_layers(model, structure, section.exclude))
    rules.require("exclude", layers, "leaves at least one layer", 'shorten it, or set recipe = "none"')
    block, of_tokens = RECIPES[section.recipe].block, RECIPES[section.recipe].of_tokens
    if not block:
        return rules.problems
    misfits, row_parts = [], cp * (2 if cp > 1 and layout.context_parallel == "gather" else 1)
    for name, module in layers.items():
        if isinstance(module, OwnPositions):
            row_parts = math.lcm(row_parts, cp * tp)
        for what, size, parts in _sizes(module, tp):
            if size % (block * parts):
                of_ranks = f" for tp = {parts} ranks" if parts > 1 else ""
                following = -(-size // (block * parts)) * block * parts
                misfits.append((name, f"{size} {what}{of_ranks} (the next size is {following})"))
    if misfits:
        name, first = misfits[0]
        others = len(misfits) - 1
        more = f", and {others} more {'size does' if others == 1 else 'sizes do'} not fit" if others else ""
        rule = f"a rank has full blocks of {block} elements: {name} has {first}{more}"
        remedy = "change these sizes (those of heads are model.n_heads or n_kv_heads x the width of a head) or "
        remedy += "parallelism.tp"
        patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name, _ in misfits)  # of all blocks
        exclude = (*section.exclude, *patterns)
        if any(float8_layers(model, structure, exclude)):
            remedy += f", or set float8.exclude = {json.dumps(exclude)}"
        rules.require("recipe", False, rule, remedy)
    if of_tokens and seq_len % (block * row_parts):
        least = block * row_parts
        nearest = dict.fromkeys((max(seq_len // least, 1) * least, (seq_len // least + 1) * least))
        rule = f"divisible by {least}: with float8.recipe = {section.recipe!r}, a rank's part of a row is full blocks"
        remedy = f"set training.seq_len = {' or '.join(map(str, nearest))}"
        rules.problems.append(Problem("training.seq_len", seq_len, rule, remedy))
    return rules.problems


def _fits_device(module: nn.Linear | Experts, tp: int) -> bool:
    sizes = _sizes(module, tp)
    return isinstance(module, nn.Linear) and not any(size % (UNIT * parts) for _, size, parts in sizes)


def _sizes(module: nn.Linear | Experts, tp: int) -> list[tuple[str, int, int]]:
    """(what, size, ranks that share it) of the dimensions that products contract: inputs, and outputs in backward."""
    if isinstance(module, Experts):
        _, hidden, inputs = module.w1.shape
        return [("inputs", inputs, 1), ("hidden features", hidden, tp)]
    inputs, outputs = (tp if isinstance(module, kind) else 1 for kind in (Row, Column))
    return [("inputs", module.in_features, inputs), ("outputs", module.out_features, outputs)]
