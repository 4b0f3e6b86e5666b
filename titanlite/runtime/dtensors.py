"""DTensors, without the import of torch.distributed.tensor: it takes 0.7 seconds of CPU time.

Commands that read a configuration and build no model, such as `titanlite inspect`, do without it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Before the import of torch.distributed.tensor, no tensor is one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, without its autograd graph; shares its memory."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()
