"""The [samples] section."""

import math
from dataclasses import dataclass

from titanlite.runtime.errors import Needs, Problem, Rules, ranged


@dataclass(frozen=True)
class SamplesConfig:
    """Texts that the model writes during training."""

    prompts: tuple[str, ...] = ()
    """Texts to continue, after every interval-th step and after the last one. Empty: no samples."""
    interval: int = ranged(1000, "1 after every step", least=1)
    """Steps between samples."""
    max_new_tokens: int = ranged(64, "set a positive number", least=1)
    """Maximum tokens per prompt; fewer if the model has fewer positions left, or the document ends."""
    temperature: float = ranged(0.0, "write 0 for the most likely token", least=0, below=math.inf)
    """Divides the logits; 0: always the most likely token. Each step draws with the same seed."""


_SAMPLES = Needs("samples.prompts", lambda section: section.prompts)
NEEDS = dict.fromkeys(("interval", "max_new_tokens", "temperature"), _SAMPLES)
"""See Needs."""


def check_samples(section: SamplesConfig, *, has_tokenizer: bool) -> list[Problem]:
    """Check [samples]. has_tokenizer: whether the run will have a tokenizer."""
    rules = Rules("samples", section)
    rule, remedy = "empty without a tokenizer: the data are tokens", "set tokenizer.path, or remove the prompts"
    rules.require("prompts", has_tokenizer or not section.prompts, rule, remedy)
    return rules.problems
