"""What products in float8 need: where they run, and memory."""

from functools import lru_cache

from torch import nn

from titanlite.config.schema import JobConfig
from titanlite.models.experts import Experts
from titanlite.models.float8 import RECIPES
from titanlite.models.parts import Column, OwnPositions, Row
from titanlite.parallel.float8 import Float8Config, could_multiply_on_device, float8_layers
from titanlite.planning.activations import MicrobatchShape
from titanlite.planning.stages import Blueprint
from titanlite.planning.work import Float8Products
from titanlite.precision import DTYPES


def float8_products(config: JobConfig, device_type: str) -> Float8Products | None:
    """How linear layers multiply; None: not in float8. GPUs are taken to have the matrix unit."""
    section = config.float8
    if section.recipe == "none":
        return None
    compute = DTYPES[config.training.mixed_precision_param]
    on_device = could_multiply_on_device(section, device_type, compute)
    return Float8Products(on_device, RECIPES[section.recipe].of_tokens)


@lru_cache(maxsize=1024)  # the same for many layouts of a search
def rounded_bytes(
    section: Float8Config, model: nn.Module, plan: Blueprint, shape: MicrobatchShape, products: Float8Products
) -> int:
    """Peak bytes of the operands and the product of a linear layer in its backward pass, of the largest one, beside
    what a layer needs without float8. model: the full one."""
    tp, config, structure = shape.tp, plan.hyper_parameters, plan.structure
    wide, casts = max(shape.element_bytes, 4), shape.element_bytes < 4
    largest = 0
    for _, layer in float8_layers(model, structure, section.exclude):
        rows, of_tokens = shape.positions, products.of_tokens
        if isinstance(layer, Experts):
            _, outputs, inputs = layer.w1.shape
            rows, outputs, of_tokens = rows * config.n_active_experts // config.n_experts, outputs // tp, False
        else:
            inputs = layer.in_features // (tp if isinstance(layer, Row) else 1)
            outputs = layer.out_features // (tp if isinstance(layer, Column) else 1)
            rows //= tp if isinstance(layer, OwnPositions) else 1
        # per element: while it is rounded, as an operand, and of the result; one more for a transposed one
        chain, operand, result = (4 + casts) * wide, wide, casts * wide
        if products.on_device and not isinstance(layer, Experts):
            chain, operand, result = 2 * wide + 1, 1, 0
        x, weight, gradient = rows * inputs, inputs * outputs, rows * outputs
        moments = [
            chain * gradient,
            operand * gradient + (chain + wide) * weight,
            operand * (gradient + weight) + result * x,
        ]
        if of_tokens:
            moments += [operand * gradient + chain * x, operand * (gradient + x) + result * weight]
        largest = max(largest, *moments)
    return largest
