"""Benchmark of the output layer with its loss: in chunks, against a linear layer with the cross-entropy of all logits.

    python benchmarks/head.py [--vocab-size 128256] [--dim 512] [--tokens 1024] [--dtype float32] [--rounds 5]

Every case runs in a process of its own, with one thread. A round is a forward and a backward pass of each case. The
table shows the peak of the resident memory over that before the first pass (which has weights, inputs and their
gradients), the CPU time of the fastest pass, and the median over the rounds, minimum and maximum, of the ratio to all
logits in the same round.
"""

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from measuring import spread
from torch import Tensor
from torch.nn import functional

from titanlite.models.head import OutputLayer
from titanlite.runtime.launch import run_ranks

CASES = ("all logits", "gradients in forward", "logits again in backward")
SAMPLE_S = 0.002


@dataclass
class Peak:
    """The highest resident memory while it is watched, in MiB. It is sampled: peaks of less than 2 ms may be missed."""

    mebibytes: float = 0.0
    _watching: bool = True

    def watch(self) -> None:
        while self._watching:
            self.mebibytes = max(self.mebibytes, resident_mebibytes())
            time.sleep(SAMPLE_S)

    def stop(self) -> None:
        self._watching = False


def resident_mebibytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def shares(case: str, head: OutputLayer, x: Tensor, labels: Tensor, num_valid: Tensor) -> Tensor:
    head.recomputes = case == "logits again in backward"
    if case != "all logits":
        found: Tensor = head(x, labels, num_valid)
        return found
    scores = head(x).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    losses = functional.cross_entropy(scores, labels.flatten(), ignore_index=-1, reduction="none")
    return losses.view(labels.shape).sum(1) / num_valid


def measure(case: str, vocab_size: int, dim: int, tokens: int, dtype: str, rounds: int) -> tuple[float, list[float]]:
    """(peak over the start in MiB, CPU seconds of each pass)"""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    head = OutputLayer(dim, vocab_size).to(getattr(torch, dtype))
    x = torch.randn(1, tokens, dim, generator=generator).to(head.weight.dtype).requires_grad_()
    labels = torch.randint(vocab_size, (1, tokens), generator=generator)
    labels[:, ::7] = -1
    num_valid = (labels >= 0).sum().expand(1)
    head.weight.grad, x.grad = torch.zeros_like(head.weight), torch.zeros_like(x)
    start, peak, seconds = resident_mebibytes(), Peak(), []
    watcher = threading.Thread(target=peak.watch)
    watcher.start()
    for _ in range(rounds):
        begin = time.thread_time()
        shares(case, head, x, labels, num_valid).sum().backward()
        seconds.append(time.thread_time() - begin)
    peak.stop()
    watcher.join()
    return peak.mebibytes - start, seconds


def main(
    vocab_size: int = 128_256,
    dim: int = 512,
    tokens: int = 1024,
    dtype: Literal["float32", "bfloat16"] = "float32",
    rounds: int = 5,
) -> None:
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    peaks = dict.fromkeys(CASES, 0.0)
    for _ in range(rounds):
        for case in CASES:
            peak, passes = run_ranks(measure, 1, case, vocab_size, dim, tokens, dtype, 2, timeout_s=3600)[0]
            peaks[case] = max(peaks[case], peak)
            seconds[case].append(min(passes))
    print(f"{'':<26}{'peak MiB':>9}{'ratio':>7}{'CPU s':>8}   ratio")
    for case in CASES:
        ratios = [own / plain for own, plain in zip(seconds[case], seconds["all logits"], strict=True)]
        peak_ratio = peaks[case] / peaks["all logits"]
        print(f"{case:<26}{peaks[case]:>9.0f}{peak_ratio:>7.3f}{min(seconds[case]):>8.2f}   {spread(ratios, '.2f')}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
