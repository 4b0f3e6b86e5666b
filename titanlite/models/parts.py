"""What modules say of themselves: the type of a layer is its form over tensor parallelism (parallel/tensor.py), and
each parameter has a role. In one process the layers are torch's own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import nn

from titanlite.runtime.errors import UserError

LOG_UNIFORM_LEAST = 0.01


@dataclass(frozen=True)
class Init:
    """Distribution of one parameter: "normal" (mean 0, standard deviation `value`, clamped at three of them), "uniform"
    (from -value to value), "log_uniform" (the logarithm of a number from 0.01 to `value`, uniform), "constant"
    (`value`), or "ones"."""

    kind: Literal["normal", "uniform", "log_uniform", "constant", "ones"]
    value: float = 1.0

    def __post_init__(self) -> None:
        kinds = ("normal", "uniform", "log_uniform", "constant", "ones")
        least = -math.inf if self.kind == "constant" else LOG_UNIFORM_LEAST if self.kind == "log_uniform" else 0
        is_number = isinstance(self.value, int | float) and math.isfinite(self.value) and self.value >= least
        if self.kind not in kinds or not is_number:
            rule = f"at least 0 unless constant, of log_uniform at least {LOG_UNIFORM_LEAST}"
            raise UserError(f"{self}: the kinds are {', '.join(kinds)}, and the value is a finite number, {rule}")

    @property
    def is_random(self) -> bool:
        """Whether values are drawn."""
        return self.kind not in ("constant", "ones")


@dataclass(frozen=True)
class Transfer:
    """What a parameter has other than in the base model, see titanlite/models/transfer.py.

    width: of the model, relative to that of the base model. depth: of a parameter of a block, base_layers / n_layers.
    scale: of the weights, from factors of the forward pass. is_hidden: whether it is a matrix whose rows and columns
    both grow with the width.
    """

    width: float = 1.0
    depth: float = 1.0
    scale: float = 1.0
    is_hidden: bool = False

    @property
    def std(self) -> float:
        """Factor of the standard deviation of the initial values."""
        return self.scale * (self.width**-0.5 if self.is_hidden else 1.0)

    @property
    def lr(self) -> float:
        """Factor of the learning rate of AdamW and Lion, whose updates of elements do not depend on the width."""
        return self.scale / (self.width if self.is_hidden else 1.0)

    @property
    def eps(self) -> float:
        """Factor of AdamW's eps: that of the gradients."""
        return self.depth / self.width / self.scale


BASE = Transfer()
"""That of all parameters of the base model."""


Width = Literal["hidden", "vector", "input", "output", "last", "unknown"]
Writes = Literal["", "product", "norm"]
Updates = Literal["matrix", "vector", "other"]


@dataclass(frozen=True)
class Role:
    """What is known of a parameter beside its shape.

    init: its distribution in a model without a base model. None: normal with init_std of the configuration, by default
        0.02; by init_by_depth, that of what writes a product is smaller.
    width: what grows with the width of the model: rows and columns ("hidden"), neither ("vector"), the outputs of an
        embedding ("input"), the inputs of the logits or of the scores of a router ("output"), or the final norm, which
        with tied embeddings has a part of the factor of the logits ("last"). "unknown": there is no rule of µP.
    writes: whether it scales what is added to the residual stream: the last product of a branch, or the norm after it.
    optimizer: "matrix": Muon, if [optimizer] names it; "vector": an optimizer of vectors, also for a stack of them.
    offset: of a norm, which is added to the weight.
    transfer: what it has other than in the base model; `roles_of` in models/transfer.py fills it in.
    """

    init: Init | None = None
    width: Width = "vector"
    writes: Writes = ""
    optimizer: Updates = "other"
    offset: float = 0.0
    transfer: Transfer = BASE

    def __post_init__(self) -> None:
        if not isinstance(self.init, Init | None):
            raise UserError(f'init of a Role is {self.init!r}: write an Init, such as Init("normal", 0.02), or None')
        for name, kinds in (("width", Width), ("writes", Writes), ("optimizer", Updates)):
            if (value := getattr(self, name)) not in get_args(kinds):
                raise UserError(f"{name} of a Role is {value!r}: it is one of {', '.join(map(repr, get_args(kinds)))}")


HIDDEN = Role(width="hidden", optimizer="matrix")
WRITING = Role(width="hidden", writes="product", optimizer="matrix")
BIAS = Role(Init("constant", 0.0), optimizer="vector")
WRITING_BIAS = Role(Init("constant", 0.0), writes="product", optimizer="vector")
NORM = Role(Init("ones"))
POST_NORM = Role(Init("ones"), writes="norm")
LAST_NORM = Role(Init("ones"), "last")
EMBEDDING = Role(width="input")
SCORES = Role(width="output")
VECTOR = Role()

Roles = Mapping[str, Role]
"""By the name of a parameter in its module."""


class Column(nn.Linear):
    """A linear layer of which each tp rank has a part of the outputs. Its input has all positions of the rows: a module
    around it `gathers`, or it is behind a WholeRows."""

    roles: ClassVar[Roles] = {"weight": HIDDEN, "bias": BIAS}


class Row(nn.Linear):
    """A linear layer of which each tp rank has a part of the inputs. Its output is summed over tp, and each rank has a
    part of the positions."""

    roles: ClassVar[Roles] = {"weight": WRITING, "bias": WRITING_BIAS}


class RowPart(Row):
    """A Row whose output is a part of a sum that the module around it adds up, as that of shared experts."""


class OwnPositions(nn.Linear):
    """A linear layer that all tp ranks have, each for a part of the positions."""

    roles: ClassVar[Roles] = {"weight": HIDDEN, "bias": BIAS}


def gathers(module: nn.Module) -> bool:
    """Whether the first input of a module has all positions of the rows; between modules, a tp rank has a part."""
    return bool(getattr(module, "gathers", False))


def declared_roles(model: nn.Module) -> Iterator[tuple[str, Role | None]]:
    """Each parameter of a full model by its first name, with what its module declares; None: nothing."""
    names = {name for name, _ in model.named_parameters()}
    for prefix, module in model.named_modules(remove_duplicate=False):
        roles: Any = {"weight": EMBEDDING} if type(module) is nn.Embedding else getattr(module, "roles", {})
        if not isinstance(roles, Mapping) or not all(isinstance(role, Role) for role in roles.values()):
            raise UserError(f'roles of {prefix} are {roles!r}: write {{"weight": Role(...)}}, by names of parameters')
        for key, _ in module.named_parameters(recurse=False):
            if (name := f"{prefix}.{key}") in names:
                yield name, roles.get(key)
