"""What a model family must supply, and how the [model] section chooses one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.init import Init
from titanlite.runtime.errors import Problem


@dataclass(frozen=True)
class ModelConfig:
    """The [model] section: a family, one of its flavors, and hyper-parameters that override the flavor's."""

    family: str = "llama3"
    """Model family."""
    flavor: str = "debug"
    """Named set of hyper-parameters of the family."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Hyper-parameters given beside the flavor, by name, e.g. {"vocab_size": 4096}; they stand in [model] itself."""


@dataclass(frozen=True)
class Plan:
    """How parallelism reaches a model from outside: names of submodules, nothing else.

    data_units: groups of submodules whose parameters are gathered, freed and reduced together by data parallelism,
    in the order in which the forward pass is done with them. Parameters outside all units belong to the root.
    may_skip_parameters: whether a microbatch may leave a parameter without gradient on some rank.
    """

    data_units: tuple[tuple[str, ...], ...]
    may_skip_parameters: bool = False


class LanguageModel(nn.Module, ABC):
    """A decoder in plain torch: int64 tokens in, logits out; it knows nothing of parallelism."""

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """tokens: int64 (batch, seq_len). Returns logits (batch, seq_len, vocab_size).

        positions: int64 (batch, seq_len); None: 0, 1, 2, ... in each row. document_ids: int64 (batch, seq_len),
        attention stays among equal ones; None: each row is one document.
        """

    @abstractmethod
    def tie_weights(self) -> None:
        """Let tied parameters be one again, where there are any: whatever replaces parameters breaks the tie."""

    @abstractmethod
    def init_buffers(self, device: torch.device) -> None:
        """Compute all non-persistent buffers on `device`."""


@dataclass(frozen=True)
class Family:
    """A model family. The hyper-parameters' type is the family's own frozen dataclass (`config_type`).

    check(config, seq_len): problems of the hyper-parameters, keys under "model.".
    build(config): the model; parameters on the default device (meta, in training), not initialised.
    plan(config): the Plan.
    init(config, name): the distribution of the parameter of that name.
    flops_per_token(config, seq_len): floating-point operations per trained token, forward and backward.
    """

    name: str
    config_type: type
    flavors: Mapping[str, Any]
    check: Callable[[Any, int], list[Problem]]
    build: Callable[[Any], LanguageModel]
    plan: Callable[[Any], Plan]
    init: Callable[[Any, str], Init]
    flops_per_token: Callable[[Any, int], int]
