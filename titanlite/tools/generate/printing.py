"""Stream the generated texts to stdout."""

import sys
from collections.abc import Collection, Iterable, Sequence
from unicodedata import category

from titanlite.generation.decoding import TextStream
from titanlite.generation.prompts import Prompt


def print_texts(
    prompts: Sequence[Prompt],
    streams: Sequence[TextStream],
    steps: Iterable[Sequence[int | None]],
    eos_ids: Collection[int],
) -> int:
    """Print each prompt and its new tokens, one text below the other; returns the number of new tokens.

    steps: as yielded by `generate`. The first incomplete text is streamed; the texts below it wait until it is
    complete. Several texts get a heading each. A text ends at one of eos_ids, which is not shown, or when `steps` is
    exhausted; a newline follows.
    """
    count = len(prompts)
    titles = [f"--- {row} of {count}\n" if count > 1 else "" for row in range(1, count + 1)]
    waiting = [title + prompt.text for title, prompt in zip(titles, prompts, strict=True)]
    is_complete = [False] * count
    shown, num_tokens = _show(waiting, is_complete, 0), 0
    for step in steps:
        for row, token in enumerate(step):
            if token is None:
                continue
            num_tokens += 1
            is_complete[row] = token in eos_ids
            waiting[row] += streams[row].rest() + "\n" if is_complete[row] else streams[row].add(token)
        shown = _show(waiting, is_complete, shown)
    for row in range(count):
        if not is_complete[row]:
            waiting[row] += streams[row].rest() + "\n"
    _show(waiting, [True] * count, shown)
    return num_tokens


def for_stdout(text: str) -> str:
    """The text with control characters escaped if stdout is a terminal, so that a model cannot control it."""
    if not sys.stdout.isatty():
        return text
    return "".join(ascii(c)[1:-1] if category(c) == "Cc" and c not in "\n\t" else c for c in text)


def _show(waiting: list[str], is_complete: Sequence[bool], first: int) -> int:
    """Print the waiting text from index `first` up to the first incomplete text; returns the index of that text."""
    for row in range(first, len(waiting)):
        sys.stdout.write(for_stdout(waiting[row]))
        waiting[row] = ""
        if not is_complete[row]:
            break
        first = row + 1
    sys.stdout.flush()
    return first
