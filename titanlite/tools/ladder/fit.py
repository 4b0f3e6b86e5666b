"""Fit of the scaling law L = E + A / N^alpha + B / D^beta to measured losses, and its bootstrap.

N: parameters without embeddings. D: trained tokens. The fit is approach 3 of Hoffmann et al., "Training Compute-Optimal
Large Language Models" (2022): the Huber loss, with a threshold of 1e-3, of the difference between the logarithms of the
law and of the measured loss, minimized by L-BFGS from a grid of starts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

NUM_CONSTANTS = 5
MIN_SIZES = 3
"""Different N, and different D: to fewer, several laws fit equally well."""
THRESHOLD = 1e-3
"""Difference of logarithms from which the Huber loss is linear."""
MAX_EXPONENT = 2.0
"""Exponents are between 0 and this: beyond it, a term only matters at the smallest runs."""
STARTS = 4
"""Points of the grid from which L-BFGS begins: those with the lowest objective."""
RESAMPLES = 100


@dataclass(frozen=True)
class Law:
    """The constants of L = E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss of a model with so many parameters, without embeddings, after so many tokens."""
        return float(self.E + self.A / float(parameters) ** self.alpha + self.B / float(tokens) ** self.beta)


@dataclass(frozen=True)
class Point:
    """The result of a run: N, D and the validation loss after its last step."""

    parameters: int
    tokens: int
    loss: float


def determines_law(points: Sequence[Point]) -> bool:
    """Whether the points determine the constants."""
    counts = [len(set(each)) for each in ((p.parameters for p in points), (p.tokens for p in points))]
    return len({(point.parameters, point.tokens) for point in points}) >= NUM_CONSTANTS and min(counts) >= MIN_SIZES


def fit(points: Sequence[Point], start: Law | None = None) -> Law:
    """The law with the lowest objective that L-BFGS finds from `start`, or from the best points of a grid."""
    objective = _Objective(points)
    found = [objective.minimize(row) for row in (objective.grid() if start is None else [objective.raw(start)])]
    return objective.law(min(found, key=lambda raw: objective(raw).item()))


def bootstrap(points: Sequence[Point], law: Law, count: int = RESAMPLES) -> list[Law]:
    """The laws of `count` samples of the points, drawn with replacement; samples that do not determine a law are drawn
    again. law: that of all points, from which the fits start."""
    generator, laws = np.random.default_rng(0), list[Law]()
    while len(laws) < count:
        sample = [points[index] for index in generator.integers(len(points), size=len(points))]
        if determines_law(sample):
            laws.append(fit(sample, law))
    return laws


class _Objective:
    """The sum of the Huber losses in units of THRESHOLD squared, a function of raw constants: log E, log of A's term at
    the mean of log N, log of B's term at the mean of log D, and the logits of alpha and beta as parts of MAX_EXPONENT.
    Centered in this way, they depend little on each other, which L-BFGS needs."""

    def __init__(self, points: Sequence[Point]) -> None:
        table = [[point.parameters, point.tokens, point.loss] for point in points]
        logs = torch.tensor(table, dtype=torch.float64).log()
        self._log_loss, self._means = logs[:, 2], logs[:, :2].mean(0)
        log_n, log_d = (logs[:, :2] - self._means).T
        # the logarithms of the three terms of each point, as a linear function of these logarithms and the exponents
        self._terms = torch.zeros(3, len(points), 5, dtype=torch.float64)
        self._terms[[0, 1, 2], :, [0, 1, 2]] = 1.0
        self._terms[1, :, 3], self._terms[2, :, 4] = -log_n, -log_d

    def __call__(self, raw: Tensor) -> Tensor:
        constants = torch.cat([raw[:3], MAX_EXPONENT * raw[3:].sigmoid()])
        difference = (self._terms @ constants).logsumexp(0) - self._log_loss
        return functional.huber_loss(difference / THRESHOLD, torch.zeros_like(difference), reduction="sum")

    def grid(self) -> Tensor:
        """The best STARTS points of a grid of shares of the mean loss, and of exponents."""
        mean, exponents = float(self._log_loss.mean().exp()), (0.1, 0.3, 0.5, 0.8, 1.2)
        rows = [
            [mean * share, mean * (1 - share) * of_a, mean * (1 - share) * (1 - of_a), alpha, beta]
            for share, of_a, alpha, beta in product((0.1, 0.4, 0.7, 0.9), (0.2, 0.5, 0.8), exponents, exponents)
        ]
        raw = _raw(torch.tensor(rows, dtype=torch.float64).T).T
        return raw[torch.stack([self(row) for row in raw]).argsort()[:STARTS]]

    def minimize(self, start: Tensor) -> Tensor:
        raw = start.clone().requires_grad_()

        def closure() -> Tensor:
            raw.grad = None
            objective = self(raw)
            objective.backward()
            return objective

        for _ in range(2):  # again without a history: a kink of the objective may have ended the search
            torch.optim.LBFGS(
                [raw], max_iter=300, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
            ).step(closure)
        return raw.detach()

    def raw(self, law: Law) -> Tensor:
        n, d = self._means.exp().tolist()
        terms = [law.E, law.A / n**law.alpha, law.B / d**law.beta]
        return _raw(torch.tensor([*terms, law.alpha, law.beta], dtype=torch.float64))

    def law(self, raw: Tensor) -> Law:
        n, d = self._means.exp().tolist()
        e, of_n, of_d = raw[:3].exp().tolist()
        alpha, beta = (MAX_EXPONENT * raw[3:].sigmoid()).tolist()
        return Law(e, of_n * n**alpha, of_d * d**beta, alpha, beta)


def _raw(constants: Tensor) -> Tensor:
    """The raw constants of (E, the terms of A and B, alpha, beta), along the first dimension."""
    return torch.cat([constants[:3].clamp_min(1e-300).log(), (constants[3:] / MAX_EXPONENT).logit(1e-6)])
