"""Dtypes by their names in the configuration, and settings that they cannot represent."""

from collections.abc import Mapping
from typing import Literal

import torch

from titanlite.runtime.errors import Problem, require

DtypeName = Literal["float32", "float64", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


def check_precision(values: Mapping[str, float], below_one: Mapping[str, float], dtype: str) -> list[Problem]:
    """Problems of settings that vanish or overflow in the arithmetic, in promote_types(dtype, float32).

    values: by key; 0 is valid here. below_one: settings that must stay below 1. dtype: of the tensors they apply to.
    """
    used = torch.promote_types(DTYPES[dtype], torch.float32)
    name, info = str(used).removeprefix("torch."), torch.finfo(used)
    problems: list[Problem] = []
    for key, value in values.items():
        problems += require(
            value == 0 or info.tiny <= abs(value) <= info.max,
            key,
            value,
            f"from {info.tiny:.1e} to {info.max:.1e}, the range of {name}, in which it is used",
            "write a value inside this range",
        )
    for key, value in below_one.items():
        problems += require(
            value >= 1 or torch.tensor(value, dtype=used).item() < 1,
            key,
            value,
            f"below 1 also in {name}, in which it is used; it is rounded to 1",
            f"write at most {1 - info.eps:.8g}",
        )
    return problems
