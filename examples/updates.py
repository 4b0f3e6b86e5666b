"""Of each parameter, at the steps that are logged: the norm of its gradient after clipping, as watch/norm/NAME, and the
norm of its update by that of its weights, as watch/update/NAME. Use it with

[job]
plugins = ["updates.py"]
[metrics]
statistics = ["updates"]
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn

import titanlite


@contextmanager
def updates(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            titanlite.watch(f"norm/{name}", parameter.grad.square() * parameter.numel(), root=True)
    yield
    for name, parameter in parameters.items():
        change = (parameter.detach() - before[name]).square()
        titanlite.watch(f"update/{name}", change, per=before[name].square(), root=True)


titanlite.register_statistic("updates", updates)
