"""Read and tokenize prompts."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, Problem
from titanlite.runtime.json_files import JsonError, read_regular

_SHOWN_CHARACTERS = 60
STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt. argument: the command-line argument that gave it. ids: its tokens, with BOS if the model expects it."""

    argument: str
    text: str
    ids: tuple[int, ...] = ()

    def problem(self, rule: str, remedy: str) -> Problem:
        """A Problem with this prompt's text, shortened for display."""
        cut = len(self.text) > _SHOWN_CHARACTERS
        return Problem(self.argument, self.text[:_SHOWN_CHARACTERS] + "…" * cut, rule, remedy)


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> tuple[list[Prompt], list[Problem]]:
    """The texts, then the unchanged contents of the files; the file name - means standard input."""
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
    if not texts and not files:
        problems.append(
            Problem("--prompt", None, "required, unless --prompt-file is given", 'write --prompt "def main("')
        )
    return prompts, problems


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, starts_with_bos: bool, max_new_tokens: int, max_seq_len: int
) -> list[Prompt]:
    """Tokenize the prompts. Raises ConfigError if a prompt and max_new_tokens do not fit the model's max_seq_len."""
    if starts_with_bos and tokenizer.bos_id is None:
        rule = "a tokenizer with a BOS: the run was trained on documents that start with one"
        remedy = "set bos_token in a tokenizer_config.json beside it"
        raise ConfigError([Problem("--tokenizer", tokenizer.description, rule, remedy)])
    head = (tokenizer.bos_id,) if starts_with_bos and tokenizer.bos_id is not None else ()
    found = [
        replace(prompt, ids=(*head, *ids))
        for prompt, ids in zip(prompts, tokenizer.encode_batch([prompt.text for prompt in prompts]), strict=True)
    ]
    problems: list[Problem] = []
    for prompt in found:
        if not prompt.ids:
            rule = "at least one token: this run's documents start without BOS"
            problems.append(prompt.problem(rule, "write the beginning of a text"))
        if len(prompt.ids) >= max_seq_len:
            rule = f"fewer tokens than model.max_seq_len = {max_seq_len}; it has {len(prompt.ids)}"
            problems.append(prompt.problem(rule, "remove its beginning"))
    longest = max(len(prompt.ids) for prompt in found)
    if longest < max_seq_len < longest + max_new_tokens:
        rule = f"at most model.max_seq_len = {max_seq_len} minus the longest prompt's {longest} tokens"
        remedy = f"set it to {max_seq_len - longest}, or shorten the prompt"
        problems.append(Problem("--max-new-tokens", max_new_tokens, rule, remedy))
    if problems:
        raise ConfigError(problems)
    return found
