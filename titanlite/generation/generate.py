"""Generate tokens after prompts."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from titanlite.generation.kv_cache import Reading, Rereading, remembering
from titanlite.generation.sampling import Sampling, choose
from titanlite.models.family import LanguageModel
from titanlite.runtime.errors import UserError

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
        self._reading.rewind(shared, capacity=len(prompt) + max_new_tokens)
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
