"""Texts that the model writes during training, as they are logged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class SampleRow(TypedDict):
    """One line of samples.jsonl."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class SamplesRecord:
    """The model after `step`: pairs of a prompt and its continuation."""

    step: int
    texts: Sequence[tuple[str, str]]

    def rows(self) -> list[SampleRow]:
        """A row of samples.jsonl per prompt."""
        return [SampleRow(step=self.step, prompt=prompt, text=text) for prompt, text in self.texts]
