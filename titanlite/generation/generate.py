"""Generate tokens after prompts: tokenized prompts, sampling, generation, and the text of tokens one at a time."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from titanlite.data.tokenizer import Tokenizer
from titanlite.generation.kv_cache import Reading, Rereading, remembering
from titanlite.models.family import LanguageModel
from titanlite.models.randomness import row_keys, uniform
from titanlite.runtime.determinism import cumulative_sum
from titanlite.runtime.errors import ConfigError, Problem, UserError
from titanlite.runtime.text import is_visible


@dataclass(frozen=True)
class Sampling:
    """How to choose a token from a row of logits. The settings apply in this order.

    temperature: divides the logits; 0: greedy, i.e. the most likely token, the first of equal ones.
    top_k: keep the k most likely tokens, and all that tie with the last of them; None: keep all.
    top_p: of these, keep the fewest whose probabilities add up to top_p, the first of equal ones; 1: keep all.
    seed: of the draws. A draw depends only on the seed, the row's index and the number of tokens drawn before.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution to draw from: (rows, vocab_size) in promote_types(dtype, float32); 0 for excluded tokens.

    logits: (rows, vocab_size). The temperature must be above 0.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A temperature below `tiny` might round to 0. The largest score becomes 0, so that no score overflows.
    temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature
    if sampling.top_k is not None:
        last_kept = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < last_kept, -torch.inf)
    if sampling.top_p < 1:
        falling, tokens = scores.sort(dim=-1, descending=True, stable=True)
        is_tail = torch.zeros_like(falling, dtype=torch.bool)
        is_tail[:, 1:] = cumulative_sum(falling.softmax(-1))[:, :-1] >= sampling.top_p
        scores = scores.masked_fill(torch.empty_like(is_tail).scatter_(-1, tokens, is_tail), -torch.inf)
    return scores.softmax(-1)


def choose(logits: Tensor, sampling: Sampling, step: int) -> Tensor:
    """Choose a token per row: int64 (rows,). logits: (rows, vocab_size). step: number of tokens chosen before."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    cumulative = cumulative_sum(probabilities(logits, sampling).double())
    keys = row_keys(sampling.seed, step, torch.arange(len(logits), device=logits.device))
    high, low = uniform(keys, "next token", 2, dtype=torch.float64).unbind(1)  # 24 bits each
    drawn = (high + low * 2.0**-24).unsqueeze(1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(1)


_UNDECODED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text that is printed at once and never changed: `add` returns "" while a character lacks bytes.

    The returned texts, joined, equal `tokenizer.decode` of the prompt and all tokens, minus the decoded prompt. Each
    call decodes only the tokens of the last two texts, so its cost does not grow.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._byte_tokens = tokenizer.byte_tokens()
        self._ids = list(prompt)
        self._num_emitted = len(prompt)
        self._emitted = tokenizer.decode(prompt)

    def add(self, token: int) -> str:
        """The text that this token completes; "" if it completes nothing or the tokenizer lacks the id."""
        if not self._tokenizer.has(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if token in self._byte_tokens or text.endswith(_UNDECODED):
            return ""
        return self._emit(text)

    def rest(self) -> str:
        """The text held back so far, even if incomplete. Call after the last token."""
        return self._emit(self._tokenizer.decode(self._ids))

    def _emit(self, text: str) -> str:
        """The new end of `text`. Keeps its tokens as context, since some decoders treat the first token differently."""
        new = text[len(self._emitted) :]
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        self._emitted = self._tokenizer.decode(self._ids)
        return new


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
        if is_visible(prompt.text) and not tokenizer.has_text(prompt.ids[len(head) :]):
            problems.append(prompt.problem("text that the tokenizer does not remove", "write another text"))
        elif not prompt.ids:
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


COLUMNS_AT_ONCE = 512
"""Tokens per prefill step. The logits of all tokens of a prompt at once would take more memory than the model."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, up to max_new_tokens times; None for a prompt that has already hit one of
    eos_ids.

    The text of a prompt does not depend on the other prompts, up to rounding; draws depend on the prompt's index. Each
    prompt needs at least one token. Do not use the model otherwise until the iterator is exhausted or closed. Raises
    UserError if the logits are not finite.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * missing + list(prompt) for missing, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows, device=next(model.parameters()).device)
    with remembering(model, padding, longest + max_new_tokens) as reading:
        yield from _after(reading, tokens, sampling, max_new_tokens, eos_ids)


class Transcript:
    """One row of tokens that prompts and answers extend in turn. Tokens that the model has read are not read again.

    reading: of one row without padding, whose columns only this object reads.
    """

    def __init__(self, reading: Reading | Rereading) -> None:
        self._reading = reading
        self._tokens: list[int] = []

    def answer(
        self, prompt: Sequence[int], sampling: Sampling, *, max_new_tokens: int, eos_ids: Collection[int]
    ) -> Iterator[int]:
        """Yield the tokens after `prompt`, as `generate` does. The prompt is the entire row, not only its new end.

        The model reads the prompt from the first token on that differs from the row so far. The iterator may be
        abandoned.
        """
        num_read = self._reading.columns
        pairs = zip(prompt[:-1], self._tokens[:num_read], strict=False)
        shared = next((column for column, (new, old) in enumerate(pairs) if new != old), min(len(prompt) - 1, num_read))
        shared = self._reading.rewind(shared, capacity=len(prompt) + max_new_tokens)
        self._tokens = list(prompt)
        new = torch.tensor([prompt[shared:]], device=self._reading.device)
        for (token,) in _after(self._reading, new, sampling, max_new_tokens, eos_ids):
            assert token is not None, "a single row that has ended yields nothing more"
            self._tokens.append(token)
            yield token


def _after(
    reading: Reading | Rereading, tokens: Tensor, sampling: Sampling, max_new_tokens: int, eos_ids: Collection[int]
) -> Iterator[list[int | None]]:
    """See `generate`. tokens: the columns that are not read yet, at least one."""
    has_ended = [False] * len(tokens)
    for part in tokens.split(COLUMNS_AT_ONCE, dim=1):
        logits = reading.read(part)[:, -1]
    for step in range(max_new_tokens):
        chosen = choose(logits, sampling, step)
        # one copy from the device per step
        *found, all_finite = torch.cat([chosen, logits.isfinite().all().to(chosen.dtype).view(1)]).tolist()
        if not all_finite:
            raise UserError("the model's logits are not finite: its weights have diverged, or overflow in --dtype")
        yield [None if ended else token for token, ended in zip(found, has_ended, strict=True)]
        has_ended = [ended or token in eos_ids for token, ended in zip(found, has_ended, strict=True)]
        if all(has_ended) or step + 1 == max_new_tokens:
            return
        logits = reading.read(chosen.unsqueeze(1))[:, -1]
