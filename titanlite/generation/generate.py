"""Generate tokens after prompts."""

from collections.abc import Iterator, Sequence

import torch

from titanlite.generation.kv_cache import remembering
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
    eos_id: int | None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, up to max_new_tokens times; None for a prompt that has already hit eos_id.

    The text of a prompt does not depend on the other prompts, up to rounding; draws depend on the prompt's index. Each
    prompt needs at least one token. Do not use the model otherwise until the iterator is exhausted or closed. Raises
    UserError if the logits are not finite.
    """
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    rows = [[0] * missing + list(prompt) for missing, prompt in zip(padding, prompts, strict=True)]
    tokens = torch.tensor(rows, device=next(model.parameters()).device)
    has_ended = [False] * len(prompts)
    with remembering(model, padding, longest + max_new_tokens) as reading:
        for part in tokens.split(COLUMNS_AT_ONCE, dim=1):
            logits = reading.read(part)[:, -1]
        for step in range(max_new_tokens):
            chosen = choose(logits, sampling, step)
            # one copy from the device per step
            *found, all_finite = torch.cat([chosen, logits.isfinite().all().to(chosen.dtype).view(1)]).tolist()
            if not all_finite:
                raise UserError("the model's logits are not finite: its weights have diverged, or overflow in --dtype")
            yield [None if ended else token for token, ended in zip(found, has_ended, strict=True)]
            has_ended = [ended or token == eos_id for token, ended in zip(found, has_ended, strict=True)]
            if all(has_ended) or step + 1 == max_new_tokens:
                return
            logits = reading.read(chosen.unsqueeze(1))[:, -1]
