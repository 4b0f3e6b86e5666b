"""What the model goes on from."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, Problem

_SHOWN_CHARACTERS = 60
STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """argument: of the command line, that gave the text. ids: its tokens, with a BOS where the model expects one."""

    argument: str
    text: str
    ids: tuple[int, ...] = ()

    def problem(self, rule: str, remedy: str) -> Problem:
        """That its text is not as the rule says."""
        cut = len(self.text) > _SHOWN_CHARACTERS
        return Problem(self.argument, self.text[:_SHOWN_CHARACTERS] + "…" * cut, rule, remedy)


def read_prompts(texts: Sequence[str], files: Sequence[str]) -> tuple[list[Prompt], list[Problem]]:
    """The texts, then what the files hold, as it is; STDIN is one of them."""
    prompts = [Prompt("--prompt", text) for text in texts]
    # Python makes surrogates of bytes on the command line that are not UTF-8.
    broken = [prompt for prompt in prompts if any("\ud800" <= character <= "\udfff" for character in prompt.text)]
    problems = [prompt.problem("text in UTF-8", "look at the terminal's encoding") for prompt in broken]
    for file in files:
        try:
            data = sys.stdin.buffer.read() if file == STDIN else Path(file).read_bytes()
            prompts.append(Prompt(f"--prompt-file {file}", data.decode("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem("--prompt-file", file, "a file of text in UTF-8 that can be read", str(error)))
    if not texts and not files:
        problems.append(Problem("--prompt", None, "needed, or --prompt-file", '--prompt "def main("'))
    return prompts, problems


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, starts_with_bos: bool, max_new_tokens: int, max_seq_len: int
) -> list[Prompt]:
    """The prompts with their tokens. Raises ConfigError where they, or what is to follow them, do not fit the model."""
    if starts_with_bos and tokenizer.bos_id is None:
        rule = "names a BOS: the run was trained on documents that start with one"
        remedy = "a tokenizer_config.json beside it says bos_token"
        raise ConfigError([Problem("--tokenizer", tokenizer.description, rule, remedy)])
    head = (tokenizer.bos_id,) if starts_with_bos and tokenizer.bos_id is not None else ()
    found = [
        replace(prompt, ids=(*head, *ids))
        for prompt, ids in zip(prompts, tokenizer.encode_batch([prompt.text for prompt in prompts]), strict=True)
    ]
    problems: list[Problem] = []
    for prompt in found:
        if not prompt.ids:
            rule = "a token at least: this run's documents start without BOS"
            problems.append(prompt.problem(rule, "write how the text begins"))
        if len(prompt.ids) >= max_seq_len:
            rule = f"fewer tokens than model.max_seq_len = {max_seq_len}; it has {len(prompt.ids)}"
            problems.append(prompt.problem(rule, "leave out its beginning"))
    longest = max(len(prompt.ids) for prompt in found)
    if longest < max_seq_len < longest + max_new_tokens:
        rule = f"with the longest prompt's {longest} tokens at most model.max_seq_len = {max_seq_len}"
        problems.append(
            Problem("--max-new-tokens", max_new_tokens, rule, f"{max_seq_len - longest}, or a shorter prompt")
        )
    if problems:
        raise ConfigError(problems)
    return found
