"""The [samples] section."""

import math
from dataclasses import dataclass
from typing import ClassVar

from titanlite.runtime.errors import Problem, Rules
from titanlite.runtime.settings import Affects, Needs, setting

_SAMPLES = Needs("samples.prompts", lambda section: section.prompts)


@dataclass(frozen=True)
class SamplesConfig:
    """Texts that the model writes during training."""

    AFFECTS: ClassVar[Affects] = "nothing"

    prompts: tuple[str, ...] = ()
    """Texts to continue, after every interval-th step and after the last one. Empty: no samples."""
    interval: int = setting(1000, "1 after every step", least=1, needs=_SAMPLES)
    """Steps between samples."""
    max_new_tokens: int = setting(64, "set a positive number", least=1, needs=_SAMPLES)
    """Maximum tokens per prompt; fewer if the model has fewer positions left, or the document ends."""
    temperature: float = setting(0.0, "write 0 for the most likely token", least=0, below=math.inf, needs=_SAMPLES)
    """Divides the logits; 0: always the most likely token. Each step draws with the same seed."""


def check_samples(section: SamplesConfig, *, has_tokenizer: bool) -> list[Problem]:
    """Check [samples]. has_tokenizer: whether the run will have a tokenizer."""
    rules = Rules("samples", section)
    rule, remedy = "empty without a tokenizer: the data are tokens", "set tokenizer.path, or remove the prompts"
    rules.require("prompts", has_tokenizer or not section.prompts, rule, remedy)
    return rules.problems
