from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.generation.tiny import CONFIG, PROMPTS, tiny
from tests.unit.models.shaken import perturbed_model
from titanlite.generation import generate as generation
from titanlite.generation.generate import Sampling, Transcript, choose, generate
from titanlite.generation.kv_cache import Reading, Rereading, remembering
from titanlite.models.attention import attend
from titanlite.models.family import LanguageModel
from titanlite.models.layers import Attention
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3_5 import Qwen35Config
from titanlite.models.registry import FAMILIES
from titanlite.runtime.errors import UserError

NEW = 30
GREEDY = Sampling()
DRAWN = Sampling(0.9, 40, 0.95, seed=11)


def written(
    model: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY, *, count: int = NEW
) -> list[list[int]]:
    """All new tokens of each prompt."""
    steps = list(generate(model, prompts, sampling, max_new_tokens=count, eos_ids=()))
    return [[token for token in row if token is not None] for row in zip(*steps, strict=True)]


def with_windows(model: Llama3, windows: tuple[int, int]) -> Llama3:
    """The model with these windows of its layers."""
    for layer, window in zip(model.layers.values(), windows, strict=True):
        layer.attention.window = window  # type: ignore[union-attr, assignment]
    return model


def without_cache(model: LanguageModel, prompt: Sequence[int], sampling: Sampling, row: int) -> list[int]:
    """Recompute the full text for each token. row: the index among the prompts, which determines the draws."""
    tokens = list(prompt)
    for step in range(NEW):
        with torch.no_grad():
            last = model(torch.tensor([tokens]))[:, -1]
        tokens.append(int(choose(last.expand(row + 1, -1), sampling, step)[row]))
    return tokens[len(prompt) :]


@cache
def texts_without_cache(sampling: Sampling) -> list[list[int]]:
    return [without_cache(tiny(), prompt, sampling, row) for row, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("at_once", [1, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (4, 512))])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_a_text_is_the_same_without_cache_and_without_other_prompts(
    sampling: Sampling, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "COLUMNS_AT_ONCE", at_once)
    model = tiny()
    found = written(model, PROMPTS, sampling)
    assert found == texts_without_cache(sampling)
    assert found == written(model, PROMPTS, sampling)
    assert found[0] == written(model, PROMPTS[:1], sampling)[0]
    assert all(len(set(tokens)) > 5 for tokens in found), "too monotonous to reveal an error"


@pytest.mark.parametrize("parts", [[9], [4, 4, 1], [1] * 9, [8, 1]])
@pytest.mark.parametrize(
    ("dtype", "windows", "cap"),
    [
        *((torch.float64, windows, 0.0) for windows in ((0, 0), (5, 0), (1, 3))),
        (torch.float64, (5, 0), 0.2),
        (torch.float32, (0, 0), 0.0),
    ],
)
def test_incremental_logits_equal_those_of_the_full_row(
    parts: list[int], dtype: torch.dtype, windows: tuple[int, int], cap: float
) -> None:
    """Rows with and without padding, read in parts, then token by token. cap: of the scores of attention."""
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    model = with_windows(tiny(dtype), windows)
    for layer in model.layers.values():
        layer.attention.cap = cap  # type: ignore[union-attr, assignment]
    texts = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(3))
    for padding in ([0, 8, 3], [0, 0, 0]):
        rows = [[0] * missing + text[: 40 - missing] for missing, text in zip(padding, texts.tolist(), strict=True)]
        columns = torch.tensor(rows).split([*parts, *[1] * 31], dim=1)
        with remembering(model, padding, 40) as reading:
            found = torch.cat([reading.read(part) for part in columns], dim=1)
            assert isinstance(reading, Reading)
            for cache, window in zip(reading.caches, windows, strict=True):
                assert cache._keys is not None
                assert cache._keys.shape[2] == (max(2 * window, window + max(parts)) if window else 40)
        assert found.isfinite().all()
        for row, missing in enumerate(padding):
            with torch.no_grad():
                expected = model(texts[row : row + 1, : 40 - missing])[0]
            error = (found[row, missing:] - expected).abs().max() / expected.abs().max()
            assert error <= bound, (row, float(error))


def hybrid() -> LanguageModel:
    """A layer of linear attention and one of full attention."""
    sizes = {"head_dim": 8, "linear_key_heads": 2, "linear_value_heads": 4, "linear_key_dim": 6, "linear_value_dim": 10}
    config = Qwen35Config(24, 2, 4, 2, 40, 61, max_seq_len=96, full_interval=2, partial_rotary_factor=0.5, **sizes)  # type: ignore[arg-type]
    return perturbed_model(FAMILIES["qwen3_5"], config).eval()


@pytest.mark.parametrize("parts", [[9], pytest.param([2, 1, 6], marks=pytest.mark.slow)])
def test_states_equal_those_of_the_full_row(parts: list[int]) -> None:
    """Rows with and without padding, which must not leave anything in states and convolutions."""
    model = hybrid()
    texts = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(3))
    for padding in ([0, 8, 3], [0, 0, 0]):
        rows = [[0] * missing + text[: 40 - missing] for missing, text in zip(padding, texts.tolist(), strict=True)]
        with remembering(model, padding, 40) as reading:
            assert isinstance(reading, Reading)
            parts_read = [reading.read(part) for part in torch.tensor(rows).split([*parts, *[1] * 31], dim=1)]
        found = torch.cat(parts_read, dim=1)
        for row, missing in enumerate(padding):
            with torch.no_grad():
                expected = model(texts[row : row + 1, : 40 - missing])[0]
            assert (found[row, missing:] - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_a_transcript_with_states_reads_all_again_after_a_change() -> None:
    model, shapes = hybrid(), []
    model.register_forward_pre_hook(lambda _module, arguments: shapes.append(arguments[0].shape[1]))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    with remembering(model, [0], 0) as reading:
        row = Transcript(reading)
        for tokens, unread in ((prompt, 9), ([*prompt[:6], 60, *prompt[7:]], 9)):
            shapes.clear()
            answer = [*row.answer(tokens, GREEDY, max_new_tokens=5, eos_ids=())]
            assert shapes[0] == unread
            assert answer == without_cache(hybrid(), tokens, GREEDY, 0)[:5]


def test_positions_count_from_a_rows_first_token() -> None:
    """The logits cannot reveal this: attention with rotary embeddings depends on distances only."""
    model, found = tiny(), []
    model.register_forward_pre_hook(lambda _module, arguments: found.append(arguments[1]))
    with remembering(model, [0, 3], 6) as reading:
        for count in (2, 3, 1):
            reading.read(torch.ones(2, count, dtype=torch.int64))
    assert torch.cat(found, dim=1).tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]]


def test_no_token_attends_to_padding() -> None:
    model, found = tiny(), []
    for filler in (0, 60):
        rows = torch.tensor([[7, 3, 50, 12], [filler, filler, filler, 5]])
        with remembering(model, [0, 3], 6) as reading:
            first = reading.read(rows)
            mask = reading.mask(4, 0)
            assert mask is not None
            assert (mask == 0).any(-1).all(), "a softmax over nothing"
            found.append([first[:, -1], reading.read(torch.tensor([[1], [2]]))])
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))


def test_each_row_ends_at_the_first_of_several_eos() -> None:
    model = tiny()
    free = written(model, PROMPTS)
    eos_ids = (free[1][6], free[2][9])
    ends = [next((n for n, token in enumerate(tokens, 1) if token in eos_ids), NEW) for tokens in free]
    assert {tokens[end - 1] for tokens, end in zip(free, ends, strict=True) if end < NEW} == {*eos_ids}
    steps = list(generate(model, PROMPTS, GREEDY, max_new_tokens=NEW, eos_ids=eos_ids))
    for row, (tokens, end) in enumerate(zip(free, ends, strict=True)):
        assert [step[row] for step in steps] == tokens[:end] + [None] * (len(steps) - end)
    assert len(steps) == max(ends)
    alone = list(generate(model, [PROMPTS[1]], GREEDY, max_new_tokens=NEW, eos_ids=eos_ids))
    assert alone == [[token] for token in free[1][: ends[1]]]


def test_each_new_token_costs_one_forward_of_one_column() -> None:
    model, shapes = tiny(), []
    model.register_forward_pre_hook(lambda _module, arguments: shapes.append(tuple(arguments[0].shape)))
    written(model, PROMPTS, count=5)
    assert shapes == [(4, 9), *[(4, 1)] * 4]


def test_a_text_may_fill_all_positions() -> None:
    (found,) = written(tiny(), PROMPTS[:1], count=CONFIG.max_seq_len - len(PROMPTS[0]))
    assert len(found) + len(PROMPTS[0]) == CONFIG.max_seq_len


def test_the_model_is_restored_afterwards() -> None:
    model = tiny()
    tokens = torch.tensor([PROMPTS[0]])
    before = model(tokens)
    steps = generate(model, PROMPTS, GREEDY, max_new_tokens=9, eos_ids=())
    next(steps)
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    assert all("core" in vars(layer) for layer in layers)
    steps.close()
    assert not any("core" in vars(layer) for layer in layers)
    after = model(tokens)
    assert torch.equal(after, before)
    after.sum().backward()


@pytest.mark.parametrize(
    ("sampling", "windows", "changes"), [(GREEDY, (0, 0), 10), (DRAWN, (0, 0), 10), (GREEDY, (3, 0), 16)]
)
def test_a_transcript_reads_only_what_has_changed(sampling: Sampling, windows: tuple[int, int], changes: int) -> None:
    """Prompts that extend the row, that change it in the middle, that are its beginning, and after an interrupt.
    changes: tokens to read after the change, all if a window before it is no longer in memory."""
    model, shapes = with_windows(tiny(), windows), []
    model.register_forward_pre_hook(lambda _module, arguments: shapes.append(arguments[0].shape[1]))
    (first,) = written(model, PROMPTS[:1], sampling, count=5)
    extended = [*PROMPTS[0], *first, 4, 9]
    changed = [*extended[:6], 60, *extended[7:]]
    with remembering(model, [0], 0) as reading:
        row = Transcript(reading)
        for prompt, unread in ((PROMPTS[0], 9), (extended, 3), (extended, 1), (changed, changes), (changed[:4], 1)):
            shapes.clear()
            answer = row.answer(prompt, sampling, max_new_tokens=5, eos_ids=())
            begun = [next(answer)]
            assert shapes == [unread]
            if prompt is not changed:  # whose answer is abandoned
                begun += answer
            assert begun == without_cache(with_windows(tiny(), windows), prompt, sampling, 0)[: len(begun)]


def test_a_model_of_another_architecture_reads_all_columns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(LanguageModel):
        """Positions may interact anywhere, as far as the cache knows."""

        def __init__(self, inner: LanguageModel) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor, *arguments: Tensor | None, **more: Tensor | None) -> Tensor:
            logits: Tensor = self.inner(tokens, *arguments, **more)
            return logits

        def tie_weights(self) -> None: ...

        def init_buffers(self, device: torch.device) -> None: ...

    monkeypatch.setattr("titanlite.generation.generate.COLUMNS_AT_ONCE", 8)
    long = [*PROMPTS, list(range(1, 61))]  # read in several parts, of which short prompts have only the last one
    assert written(Other(tiny()), long, count=5) == written(tiny(), long, count=5)
    with remembering(Other(tiny()), [0], 0) as reading:
        row = Transcript(reading)
        for prompt in ([7, 3, 50], [7, 3, 9, 9]):
            found = list(row.answer(prompt, GREEDY, max_new_tokens=5, eos_ids=()))
            assert [found] == written(tiny(), [prompt], count=5)


class Shifted(nn.Module):
    """A feed-forward layer in which a position sees the one before it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        before = nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return self.inner(x) + before  # type: ignore[no-any-return]


class Halved(Attention):
    """With a core of its own, and no cache for it."""

    def core(self, *arguments: Any) -> Tensor:
        return super().core(*arguments) / 2


class Uncalled(Attention):
    def attended(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
        return self.wo(attend(*(x.transpose(1, 2) for x in (queries, keys, values)), mask).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def window(queries: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    """Of two positions."""
    del mask
    seen = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool).tril().triu(-1)
    return nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)


@pytest.mark.parametrize("variant", ["attend", "core", "feed_forward", "forward"])
def test_own_code_that_the_cache_does_not_fit_reads_all_columns_again(variant: str) -> None:
    """Before, the cache replaced an own attention silently."""
    model = tiny()
    for layer in model.layers.values():
        if variant == "attend":
            layer.attention.attend = window
        elif variant == "core":
            layer.attention.__class__ = Halved
        elif variant == "feed_forward":
            layer.feed_forward = Shifted(layer.feed_forward)
        else:
            layer.attention.__class__ = Uncalled
    assert written(model, PROMPTS) == [without_cache(model, prompt, GREEDY, 0) for prompt in PROMPTS]
    with remembering(model, [0], 8) as reading:
        assert isinstance(reading, Rereading)
    with remembering(tiny(), [0], 8) as reading:
        assert isinstance(reading, Reading)


def test_diverged_weights_are_an_error() -> None:
    model = tiny()
    with torch.no_grad():
        model.norm.weight[3] = torch.nan
    with pytest.raises(UserError, match="the model's logits are not finite"):
        written(model, PROMPTS)
