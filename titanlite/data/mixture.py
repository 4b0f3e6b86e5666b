"""Which source each sequence comes from: shares that follow the weights closely, from the first sequences on."""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import numpy as np

from titanlite.data.permutation import mix

_WORD = 2**64
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_SQRT_TWO = 0x6A09E667F3BCC909


class Mixture:
    """Sources of a run by their weights, each as its share of the sequences.

    Sequence `count` of a stream takes the source whose interval of [0, 1) holds the point
    hash(seed) + count x golden ratio + stream x sqrt(2), modulo 1: along a stream and across the streams of a step an
    additive recurrence of an irrational step, whose points lie evenly in every stretch (Weyl 1916). So no source is
    ever more than a few sequences away from its share; drawn at random it would stray by the square root of their
    number. All of it is integer arithmetic modulo 2^64, the same on every machine.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        """weights: positive, one for each source; only their ratios count."""
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        self.shares = tuple(float(weight / total) for weight in exact)
        """Of each source, adding up to 1."""
        self._ends = [int(end / total * _WORD) for end in accumulate(exact)][:-1]
        self._start = int(mix(np.array([seed], np.uint64))[0])

    def source(self, stream: int, count: int) -> int:
        """Index of the source of sequence `count` (from 0) of the stream."""
        if not self._ends:
            return 0
        return bisect_right(self._ends, (self._start + count * _GOLDEN_RATIO + stream * _SQRT_TWO) % _WORD)
