"""Find tensors that the program has left on the host: in a rehearsal, the device is the CPU, too."""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from titanlite.runtime.torch_internals import is_fake, tree_leaves
from titanlite.tools.plan.rehearsal.recorder import place_of

_FACTORIES = {
    *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint),
    *(torch.randn, torch.randperm, torch.tensor, torch.zeros),
}
_TAKE_BOTH = {Tensor.copy_, Tensor.__setitem__}


class HostTensors(TorchFunctionMode):
    """Counts, by place, the functions that get a tensor made without a device, or on "cpu", together with others, which
    fails on a GPU. Numbers (tensors without dimensions) may be on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in _FACTORIES:
            device = kwargs.get("device")  # the program's is a torch.device
            if (device is None or isinstance(device, str)) and isinstance(out, Tensor):
                out._is_of_host = True  # type: ignore[attr-defined]
            return out
        if func is Tensor.cuda or (func is Tensor.to and _names_device(args[1:], kwargs)):
            out._is_of_host = False  # which may be args[0], since it is already there
            return out
        if func in _TAKE_BOTH:
            return out
        if func is Tensor.__getitem__:  # by indexes of the host, too
            out._is_of_host = getattr(args[0], "_is_of_host", False)
            return out
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor) and each.dim() > 0]
        of_host = [getattr(each, "_is_of_host", False) for each in tensors]
        others = [each for each, is_of_host in zip(tensors, of_host, strict=True) if not is_of_host]
        if any(of_host) and any(is_fake(each) and each.device.type == "cpu" for each in others):
            self.places[place_of(sys._getframe(1))] += 1
        elif any(of_host):
            for each in tree_leaves(out):
                if isinstance(each, Tensor):
                    each._is_of_host = True  # type: ignore[attr-defined]
        return out


def _names_device(args: Any, kwargs: Any) -> bool:
    """Whether arguments of Tensor.to are of a device."""
    return kwargs.get("device") is not None or any(isinstance(each, torch.device | str | Tensor) for each in args)
