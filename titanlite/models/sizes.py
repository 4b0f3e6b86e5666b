"""Sizes that are smaller, and divisible by the same numbers."""

import math


def size_alike(size: int, target: int, ranks: int) -> int:
    """The smallest size from `target` on which shares with `ranks` the divisors that `size` does; at most `size`."""
    shared = math.gcd(size, ranks)
    return next((smaller for smaller in range(target, size) if math.gcd(smaller, ranks) == shared), size)
