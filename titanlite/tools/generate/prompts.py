"""Read prompts."""

import sys
from collections.abc import Sequence
from pathlib import Path

from titanlite.generation.prompts import Prompt
from titanlite.runtime.errors import Problem
from titanlite.runtime.json_files import JsonError, read_regular

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
