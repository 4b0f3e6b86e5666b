"""Generation compared with transformers: the same tokens, the same candidates and probabilities."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.generation.tiny import PROMPTS, tiny
from tests.unit.models.shaken import perturbed_model
from tests.unit.models.test_transformers import CASES, transformers_model
from titanlite.generation.generate import Sampling, generate, probabilities
from titanlite.models.llama3 import LLAMA3, Llama3
from titanlite.models.registry import FAMILIES

pytestmark = pytest.mark.slow  # importing transformers takes seconds, so the functions import it

NEW = 40
PAD = 0


def counterpart(model: Llama3) -> Any:
    """The model of transformers with the same weights. Its default would end texts at token 2."""
    return transformers_model(LLAMA3, model.config, model, attn_implementation="sdpa", eos_token_id=None).eval()


def greedy_transformers(other: Any, prompts: list[list[int]], eos_ids: list[int]) -> list[list[int]]:
    """The new tokens of each prompt up to the first of eos_ids. Prompts are padded on the left."""
    from transformers import GenerationConfig

    longest = max(map(len, prompts))
    tokens = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=eos_ids or None, pad_token_id=PAD)
    found: Tensor = other.generate(tokens, attention_mask=mask, generation_config=settings)
    rows = found[:, longest:].tolist()
    ends = [next((n for n, token in enumerate(row, 1) if token in eos_ids), NEW) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


def greedy_titanlite(model: Llama3, prompts: list[list[int]], eos_ids: list[int]) -> list[list[int]]:
    steps = list(generate(model, prompts, Sampling(), max_new_tokens=NEW, eos_ids=eos_ids))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True, "rope_scaling_factor": 1.0, "n_kv_heads": 4}, {"n_kv_heads": 1}]
)
def test_greedy_tokens_are_the_same(changes: dict[str, int | float | bool]) -> None:
    model = tiny(**changes)
    other = counterpart(model)
    free = greedy_titanlite(model, PROMPTS, [])
    assert free == greedy_transformers(other, PROMPTS, [])
    assert all(len(set(tokens)) > 5 for tokens in free), "too monotonous to reveal an error"
    eos_ids = [free[1][7], free[2][5]]
    found = greedy_titanlite(model, PROMPTS, eos_ids)
    assert found == greedy_transformers(other, PROMPTS, eos_ids)
    assert len(found[1]) <= 8
    assert len(found[2]) <= 6
    assert len(set(map(len, found))) > 1, "all texts end at the same step"
    assert [greedy_titanlite(model, [prompt], [])[0] for prompt in PROMPTS] == free


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_candidates_and_probabilities_are_the_same(temperature: float) -> None:
    """Of equal logits only the number of candidates is compared, since transformers chooses among them arbitrarily."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    generator = torch.Generator().manual_seed(4)
    smooth = 4 * torch.randn(30, 500, generator=generator, dtype=torch.float64)
    for top_k, top_p, logits in product([None, 1, 7, 1000], [1.0, 0.97, 0.6, 1e-6], (smooth, smooth.round())):
        warpers = [TemperatureLogitsWarper(temperature)]
        warpers += [] if top_k is None else [TopKLogitsWarper(top_k)]
        warpers += [] if top_p == 1.0 else [TopPLogitsWarper(top_p)]
        expected = LogitsProcessorList(warpers)(torch.zeros(30, 1, dtype=torch.int64), logits.clone()).softmax(-1)
        found = probabilities(logits, Sampling(temperature, top_k, top_p))
        if logits is not smooth:
            found, expected = found.sort().values, expected.sort().values
        assert torch.equal(found > 0, expected > 0)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_greedy_tokens_with_linear_attention_are_the_same(name: str) -> None:
    """Each prompt alone, and of titanlite also as one batch."""
    model = perturbed_model(FAMILIES[name], replace(CASES[name], max_seq_len=96))
    other = transformers_model(FAMILIES[name], model.config, model, eos_token_id=None).eval()
    found = [greedy_titanlite(model, [prompt], [])[0] for prompt in PROMPTS[:2]]
    assert found == [greedy_transformers(other, [prompt], [])[0] for prompt in PROMPTS[:2]]
    assert all(len(set(tokens)) > 5 for tokens in found), "too monotonous to reveal an error"
    assert found == greedy_titanlite(model, PROMPTS[:2], [])
