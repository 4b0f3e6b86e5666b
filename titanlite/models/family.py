"""What a model family must supply."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

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
