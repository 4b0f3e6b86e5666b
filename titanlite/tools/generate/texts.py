"""Prompts of the command line, files and stdin; generated texts on stdout."""

import sys
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from titanlite.data.sources.base import wide_encoding
from titanlite.generation.generate import Prompt, TextStream
from titanlite.runtime.errors import Problem
from titanlite.runtime.json_files import JsonError, read_regular
from titanlite.runtime.text import for_stdout

STDIN = "-"


def read_prompts(
    texts: Sequence[str], files: Sequence[str], *, required: bool = True
) -> tuple[list[Prompt], list[Problem]]:
    """The texts, then the unchanged contents of the files; the file name - means standard input. required:
    whether there must be one."""
    prompts = [Prompt("--prompt", text) for text in texts]
    # Python decodes command-line bytes that are not UTF-8 to surrogates.
    broken = [prompt for prompt in prompts if any("\ud800" <= character <= "\udfff" for character in prompt.text)]
    problems = [prompt.problem("text in UTF-8", "check the terminal's encoding") for prompt in broken]
    for file in files:
        try:
            data = sys.stdin.buffer.read() if file == STDIN else read_regular(Path(file))
            if b"\0" in data:
                remedy = f"save it as UTF-8: it has NULs, as {wide_encoding(data) or 'binary data'} has"
                problems.append(Problem("--prompt-file", file, "a readable text file in UTF-8", remedy))
                continue
            prompts.append(Prompt(f"--prompt-file {file}", data.decode("utf-8")))
        except JsonError as error:
            remedy = "for the output of a command, write: COMMAND | titanlite generate RUN --prompt-file -"
            problems.append(Problem("--prompt-file", file, f"a text file; it {error}", remedy))
        except OSError as error:
            reason = "the file does not exist" if isinstance(error, FileNotFoundError) else error.strerror
            problems.append(Problem("--prompt-file", file, f"a readable text file in UTF-8 ({reason})", "fix the path"))
        except UnicodeDecodeError as error:
            remedy = f"save it as UTF-8: byte {error.start} is not"
            problems.append(Problem("--prompt-file", file, "a readable text file in UTF-8", remedy))
    if required and not texts and not files:
        problems.append(
            Problem("--prompt", None, "required, unless --prompt-file is given", 'write --prompt "def main("')
        )
    return prompts, problems


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
