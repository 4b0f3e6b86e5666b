"""Initial weights that are the same on every mesh."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Init:
    """Distribution of one parameter: "normal" (mean 0, `std`, cut at 3 standard deviations) or "ones"."""

    kind: Literal["normal", "ones"]
    std: float = 0.0
