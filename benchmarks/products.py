"""Matrix products in float32 on a CPU: those of oneDNN, which linear layers use, beside those of torch.

The three products of a linear layer: its output, and the gradients of its input and of its weight. GFLOP/s by torch,
and the speed of oneDNN in the same rounds.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.measuring import Row, in_turns, ratios, report
from titanlite.models import linear

SIZES = ((64, 256, 256), (512, 256, 768), (4096, 256, 256), (4096, 768, 256), (2048, 1024, 1024))
"""positions, inputs, outputs."""


def main(rounds: int = 9, calls: int = 10, threads: int = 1, json: Path | None = None) -> None:
    """json: folder of products.json."""
    torch.set_num_threads(threads)
    with patch.multiple(linear, HAS_ONEDNN=True, LEAST_PRODUCTS=1):
        rows = [measure(*sizes, rounds, calls) for sizes in SIZES]
    report("products", {f"{torch.backends.cpu.get_cpu_capability()}, threads: {threads}": rows}, json)


def measure(positions: int, inputs: int, outputs: int, rounds: int, calls: int) -> Row:
    row: dict[str, str | list[float]] = {"positions, inputs, outputs": f"{positions:,}, {inputs:,}, {outputs:,}"}
    sizes = ((positions, inputs), (outputs, inputs), (positions, outputs))
    x, weight, gradient = (torch.randn(size) for size in sizes)
    products: dict[str, Callable[[], Tensor]] = {
        "output": partial(linear.product, x, weight),
        "input gradient": partial(linear.product, gradient, weight.T),
        "weight gradient": partial(linear.weight_gradient, gradient, x),
    }

    def choose(side: str) -> None:
        linear.LEAST_PRODUCTS = 1 if side == "oneDNN" else math.inf

    for name, product in products.items():
        found = in_turns({"torch": product, "oneDNN": product}, rounds, calls, lambda: None, choose)
        own, others = ([elapsed for elapsed, _ in found[side]] for side in ("oneDNN", "torch"))
        row[f"{name} (GFLOP/s)"] = [2e-9 * positions * inputs * outputs / each for each in others]
        row[f"{name}, oneDNN / torch"] = ratios(others, own)
    return row
