"""Mistakes in layers of plugins: each is refused by the name of the module, before anything is allocated."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from titanlite.models.decoder import Block
from titanlite.models.family import Family
from titanlite.models.layers import Attention, OfHeads
from titanlite.models.llama3 import LLAMA3, Llama3, attention
from titanlite.models.mixer import Mixer
from titanlite.models.parts import VECTOR, Column, Init, Role, Row, RowPart, declared_roles
from titanlite.parallel.mesh import ParallelismConfig
from titanlite.parallel.own_code import core_problem, position_problem, uncut_heads
from titanlite.parallel.tensor import form_problems
from titanlite.runtime.errors import UserError

CONFIG = replace(LLAMA3.flavors["debug"], dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=32, vocab_size=16)
HEADS = ParallelismConfig(cp=2)


class Sums(Mixer):
    """Sums of values, times the numbers of a head."""

    gathers = True
    output: type[nn.Linear] = Row

    def __init__(self, dim: int, heads: int, rates: int) -> None:
        super().__init__()
        self.heads, self.w, self.wv = heads, Column(dim, heads), Column(dim, heads * 8)
        self.rates = OfHeads(rates, VECTOR)
        self.wo = self.output(heads * 8, dim)

    def forward(self, x: Tensor, _rope: Any, mask: Any) -> Tensor:
        inputs = self.w(x).unsqueeze(-1), self.wv(x).unflatten(-1, (-1, 8))
        out: Tensor = self.wo(self.core(self.prepared(*inputs), mask, {"rates": self.rates()}).flatten(2))
        return out

    def prepared(self, rates: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rates, values

    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:  # noqa: ARG002
        rates, values = inputs
        sums: Tensor = (values * rates).cumsum(1) * by_head["rates"].unsqueeze(-1)
        return sums


class Together(Sums):
    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:
        out = super().core(inputs, seen, by_head)
        return out + out.mean(dim=2, keepdim=True)


class Any4(Sums):
    """Its rates are not those of its heads."""

    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:
        return super().core(inputs, seen, {"rates": by_head["rates"].mean().view(1)})


class Wider(Sums):
    def __init__(self, dim: int, *sizes: int) -> None:
        super().__init__(dim, *sizes)
        self.wo = Row(self.wo.in_features * 2, dim)

    def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:
        return torch.cat([super().core(inputs, seen, by_head)] * 2, dim=-1)


class Earlier(Sums):
    """The other input than the values mixes positions."""

    def prepared(self, rates: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return rates.cumsum(1), values


class Parts(Sums):
    output = RowPart


class OwnContext(Attention):
    def context(self, *_: Any, **_options: Any) -> None:
        return None


def family(kind: type[Mixer], *sizes: int) -> Family:
    def build(config: Any) -> Llama3:
        return Llama3(config, lambda index: Block(config, attention(config) if index else kind(config.dim, *sizes)))

    return LLAMA3.variant("own", build)


@pytest.mark.parametrize(
    ("kind", "sizes", "rule"),
    [
        (Sums, (4, 4), None),
        (Sums, (4, 1), None),
        (Sums, (3, 3), "inputs[0] of layers.0.attention.core has 3 heads, which cp = 2 does not divide"),
        (Sums, (4, 3), "by_head['rates'] of layers.0.attention.core has 3 heads, which cp = 2 does not divide"),
        (Any4, (4, 4), "layers.0.attention.core gives some of the heads another result than among all"),
        (Together, (4, 4), "layers.0.attention.core gives some of the heads another result than among all"),
        (Wider, (4, 4), "layers.0.attention.core has results (1, 6, 4, 16), not (1, 6, 4, 8)"),
        (Earlier, (4, 4), "positions interact outside of the core of a Mixer"),
    ],
)
def test_cores_that_cp_cannot_cut(kind: type[Mixer], sizes: tuple[int, ...], rule: str | None) -> None:
    own = family(kind, *sizes)
    with torch.device("meta"):
        found = uncut_heads(own.build(CONFIG), HEADS)
    found = found or core_problem(own, CONFIG, 2) or position_problem(own, CONFIG, of_core=True)
    assert found is None if rule is None else found is not None and rule in found, found


def test_a_context_of_its_own_is_refused_where_keys_are_gathered() -> None:
    own = family(OwnContext, 4, 4, 8)
    assert core_problem(own, CONFIG, 2) is None
    found = core_problem(own, CONFIG, 2, "gather")
    assert found == 'layers.0.attention has a context of its own: use context_parallel = "heads"'
    assert not own.build(CONFIG).layers["0"].attention.has_cache


def test_parts_that_nothing_adds_up_and_uneven_ones() -> None:
    with torch.device("meta"):
        found, *_ = form_problems(family(Parts, 4, 4).build(CONFIG), 2)
        assert found.startswith("layers.0.attention.wo is a RowPart, and no mixture of experts around it")
        found, *_ = form_problems(family(Sums, 3, 3).build(CONFIG), 2)
        assert found == "tp cuts layers.0.attention.w.weight along 3 numbers, which tp = 2 does not divide"
        assert form_problems(family(Sums, 3, 3).build(CONFIG), 3)[0].startswith("tp cuts layers.0.feed_forward.w1")


def test_mixers_of_two_kinds_have_the_context_of_their_own() -> None:
    """Both see 0, a window of none."""

    class Starts(Sums):
        def context(self, document_ids: Any, *_: Any) -> Any:
            return document_ids

        def core(self, inputs: Any, seen: Any, by_head: Any) -> Tensor:
            assert seen.dtype is torch.int64
            return super().core(inputs, seen, by_head)

    model = family(Starts, 4, 4).build(CONFIG)
    model.init_buffers(torch.device("cpu"))
    ids = torch.tensor([[0, 0, 1, 1]])
    assert model(ids, document_ids=ids).shape == (1, 4, 16)


def test_roles_are_checked_where_they_are_written() -> None:
    with pytest.raises(UserError, match="optimizer of a Role is 'Matrix': it is one of 'matrix', 'vector', 'other'"):
        Role(optimizer="Matrix")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="init of a Role is 'normal': write an Init"):
        Role("normal")  # type: ignore[arg-type]
    model = nn.Sequential(OfHeads(2, Role(Init("ones"))))
    model[0].roles = VECTOR  # type: ignore[assignment]
    with pytest.raises(UserError, match="roles of 0 are Role"):
        list(declared_roles(model))
