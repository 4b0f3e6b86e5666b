"""How the command chooses tokens: options, else the model's own defaults, else those of titanlite."""

from titanlite.generation.sampling import Sampling
from titanlite.hf.generation_defaults import GENERATION_FILE, GenerationDefaults
from titanlite.runtime.logging import log

TEMPERATURE = 0.8
ALL = 0
"""The value of --top-k that keeps all tokens."""


def choose_sampling(
    defaults: GenerationDefaults, *, temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> Sampling:
    """The options that are not None, and what they leave open; logs what the model's own defaults decide."""
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    own = {"temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p}
    taken = {name: value for name, value in own.items() if value is not None and given[name] is None}
    if taken:
        settings = ", ".join(f"{name} {value:g}" for name, value in taken.items())
        log.info("Sampling: %s, the model's own defaults (%s); options override them", settings, GENERATION_FILE)
    if defaults.not_applied:
        log.warning("%s is not applied: %s", GENERATION_FILE, ", ".join(defaults.not_applied))
    chosen = {name: taken.get(name, value) for name, value in given.items()}
    return Sampling(
        temperature=TEMPERATURE if chosen["temperature"] is None else chosen["temperature"],
        top_k=None if chosen["top_k"] in (None, ALL) else int(chosen["top_k"]),
        top_p=1.0 if chosen["top_p"] is None else chosen["top_p"],
        seed=seed,
    )
