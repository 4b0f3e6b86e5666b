"""Texts that the model writes during training, as they are logged."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from titanlite.runtime.durability import replace_file
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import open_regular
from titanlite.runtime.json_files import JsonError, parse_json


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


def keep_samples(path: Path, last_step: int) -> None:
    """Remove rows of later steps, and damaged ones, from samples.jsonl. Raises UserError if it cannot be rewritten."""
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines(keepends=True)
        kept = [line for line in lines if _step(line) <= last_step]
        if kept != lines:
            replace_file(path, b"".join(kept))
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot rewrite {path}: {error.strerror or error}: rename or remove it") from None


def _step(line: bytes) -> float:
    try:
        row: SampleRow = parse_json(line, SampleRow)
    except JsonError:
        return float("inf")
    return row["step"]
