"""SGD, with momentum if optimizer.momentum is above 0 (Sutskever et al., "On the importance of initialization and
momentum in deep learning", 2013, in torch's form: momentum <- decay * momentum + gradient)."""

import torch

from titanlite.optim.optimizer import Arguments, OptimizerKind, without_compiler

EagerSGD = without_compiler(torch.optim.SGD)


def build(arguments: Arguments) -> torch.optim.SGD:
    return EagerSGD(arguments.groups, lr=arguments.section.lr, foreach=arguments.implementation == "foreach")


SGD = OptimizerKind(build, options=("momentum",))
