"""Dtypes by their names in the configuration, and settings that they cannot represent."""

from collections.abc import Mapping
from typing import Literal

import torch

from titanlite.runtime.errors import Problem

DtypeName = Literal["float32", "float64", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def check_precision(values: Mapping[str, float], below_one: Mapping[str, float], dtype: str) -> list[Problem]:
    """Problems of settings that vanish or overflow in the arithmetic, in promote_types(dtype, float32).

    values: by key; 0 is valid here. below_one: settings that must stay below 1. dtype: of the tensors they apply to.
    """
    used = torch.promote_types(DTYPES[dtype], torch.float32)
    name, info = str(used).removeprefix("torch."), torch.finfo(used)
    in_range, is_one = f"from {info.tiny:.1e} to {info.max:.1e}, the range of {name}", f"below 1 also in {name}"
    return [
        *(
            Problem(key, value, f"{in_range}, in which it is used", "write a value inside this range")
            for key, value in values.items()
            if value != 0 and not info.tiny <= abs(value) <= info.max
        ),
        *(
            Problem(key, value, f"{is_one}, in which it is used", f"write at most {1 - info.eps:.8g}")
            for key, value in below_one.items()
            if value < 1 and torch.tensor(value, dtype=used).item() == 1
        ),
    ]
