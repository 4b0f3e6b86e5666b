"""Tokenize prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import ConfigError, Problem

_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class Prompt:
    """A prompt. argument: its command-line argument or key. ids: its tokens, with BOS if the model expects it."""

    argument: str
    text: str
    ids: tuple[int, ...] = ()

    def problem(self, rule: str, remedy: str) -> Problem:
        """A Problem with this prompt's text, shortened for display."""
        cut = len(self.text) > _SHOWN_CHARACTERS
        return Problem(self.argument, self.text[:_SHOWN_CHARACTERS] + "…" * cut, rule, remedy)


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
