"""The output layer with its loss: in chunks, against a linear layer with the cross-entropy of all logits.

Every case runs in a process of its own, with one thread. A round is two forward and backward passes of each case, of
which the faster one counts. The peak is that of the resident memory over the memory before the first pass, which has
weights, inputs and their gradients. Ratios are to all logits in the same round.
"""

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.measuring import compared, costs, report
from titanlite.models.head import LossComputation, OutputLayer

CASES = ("all logits", "gradients in forward", "logits again in backward")


def shares(case: str, head: OutputLayer, x: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    head.computation = LossComputation(recomputes=case == "logits again in backward")
    if case != "all logits":
        found: Tensor = head(x, labels, num_valid)
        return found
    scores = head(x).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=-1, reduction="none")
    return losses.view(labels.shape).sum(1) / num_valid


def measure(case: str, vocab_size: int, dim: int, tokens: int, dtype: str) -> tuple[float, float]:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    head = OutputLayer(dim, vocab_size).to(getattr(torch, dtype))
    x = torch.randn(1, tokens, dim, generator=generator).to(head.weight.dtype).requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens), generator=generator)
    labels[:, ::7] = -1
    num_valid = (labels >= 0).sum().expand(1)
    head.weight.grad, x.grad = torch.zeros_like(head.weight), torch.zeros_like(x)
    return costs(lambda: shares(case, head, x, labels, num_valid))


def main(
    vocab_size: int = 128_256,
    dim: int = 512,
    tokens: int = 1024,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 5,
    json: Path | None = None,
) -> None:
    """json: folder of head.json."""
    rows = compared(measure, CASES, rounds, CASES[0], vocab_size, dim, tokens, dtype)
    report("head", {"Output layer and loss": rows}, json)
