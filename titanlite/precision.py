"""Dtypes by their names in the configuration."""

from typing import Literal

import torch

DtypeName = Literal["float32", "float64", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}
