"""A linear layer in float8 beside bfloat16, and beside torchao if it is installed: time and error of each recipe.

Forward and backward, compiled, on the GPU if there is one; the median of rounds in which all take turns. The error is
that of the result, relative to the product in float64. torchao's rowwise_with_gw_hp has the weight gradient in
bfloat16, as titanlite's rowwise.
"""

import statistics
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measuring import Row, ratios, report
from titanlite.models.float8 import RECIPES, Float8
from titanlite.models.linear import multiplied
from titanlite.parallel.float8 import Float8Config, multiplies_on_device
from titanlite.planning.hardware.calibration import Clock

OF_TORCHAO = ("rowwise", "rowwise_with_gw_hp")
Layer = Callable[[Tensor], Tensor]


def layers(weight: nn.Parameter) -> dict[str, Layer]:
    found: dict[str, Layer] = {"bfloat16": partial(functional.linear, weight=weight)}
    for recipe, blocks in RECIPES.items():
        on_device = multiplies_on_device(Float8Config(recipe=recipe), weight.device.type, weight.dtype)
        settings = Float8(blocks, "ceil", on_device=on_device)
        name = f"{recipe}, {'matrix unit' if on_device else 'emulated'}"
        found[name] = partial(multiplied, weight=weight, products=settings)
    if find_spec("torchao") is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # type: ignore[import-not-found]

        for name in OF_TORCHAO:
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
            model[0].weight = weight
            found[f"torchao, {name}"] = convert_to_float8_training(
                model, config=Float8LinearConfig.from_recipe_name(name)
            )
    return found


def main(
    positions: int = 8192,
    inputs: int = 4096,
    outputs: int = 14336,
    rounds: int = 5,
    eager: bool = False,
    json: Path | None = None,
) -> None:
    """eager: do not compile. json: folder of float8_layer.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    x, weight, upstream = draw(1, positions, inputs), nn.Parameter(draw(outputs, inputs)), draw(1, positions, outputs)
    x.requires_grad_()
    exact = x.detach().double() @ weight.detach().double().T
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    clock = Clock(device, None)
    functions = {name: layer if eager else torch.compile(layer) for name, layer in layers(weight).items()}
    for _ in range(rounds):
        for name, layer in functions.items():
            errors[name] = float((layer(x).detach().double() - exact).norm() / exact.norm())
            work = lambda layer=layer: torch.autograd.grad(layer(x), [x, weight], upstream)  # noqa: E731
            seconds.setdefault(name, []).append(clock.seconds(work))
    rows: list[Row] = [
        {
            "layer": name,
            "ms": 1000 * statistics.median(found),
            "time / bfloat16": ratios(found, seconds["bfloat16"]),
            "error": errors[name],
        }
        for name, found in seconds.items()
    ]
    report("float8_layer", {f"{positions:,} x {inputs:,} by {inputs:,} x {outputs:,}, {device}": rows}, json)
