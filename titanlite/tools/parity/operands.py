"""Operands of products in float8, compared with those of the reference by sequence and position, on any layout.

Below float64, rounding errors move a few operands to the next number of E4M3, up to 12 % away, and these move many in
the layers that follow. So products use the operands of the reference, and the own ones that differ are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.models.experts import Activation, Experts, mixtures_of
from titanlite.models.float8 import Float8, ProductName
from titanlite.models.init import local_region
from titanlite.models.linear import multiplied

APART = 2.0**-5
"""Two numbers of E4M3 differ by at least 1/16 of the larger one."""
SMALL = 1e-4
"""Differences below this share of the largest element of an operand do not count: a gradient that is zero up to
rounding has rows of its own scale."""


@dataclass(frozen=True)
class Place:
    """Place of a call's operands in the full model and the global batch.

    name, weight: of the products of a layer, and of its weight. rows: the numbers of the call's rows in the global
    batch, which has num_rows; -1 for filler. first: number of the first output and input of its part of the weight.
    """

    name: str
    weight: str
    rows: Tensor
    num_rows: int
    first: tuple[int, ...]


class Operands:
    """Notes the operands in a step, or replaces them by those of a reference.

    noted: by layer and product; (rows of the largest step, features), or a weight. counts: of each, on this rank, the
    elements that are another number of E4M3 than in the reference, and all; those of a weight in each microbatch.
    """

    def __init__(self, parts: Sequence[nn.Module], num_positions: int) -> None:
        self.noted: dict[str, Tensor] = {}
        self.counts: dict[str, tuple[int, int]] = {}
        self._num_positions = num_positions
        self._reference: Mapping[str, Tensor] | None = None
        self._least: dict[str, Tensor] = {}
        self._places = torch.empty(0, dtype=torch.int64)
        for part in parts:
            take = partial(self._take_places, bool(mixtures_of([part])))
            part.register_forward_pre_hook(take, with_kwargs=True, prepend=True)
            for name, module in part.named_modules():
                if isinstance(module, Experts) and "products" in getattr(module.feed_forward, "keywords", ()):
                    self._watch_experts(name, module)
                elif isinstance(settings := getattr(module, "products", None), Float8):
                    module.register_forward_pre_hook(partial(self._locate, name, settings))

    def compare_with(self, reference: Mapping[str, Tensor]) -> None:
        """Compute the next step with these operands. Resets the counts."""
        self._reference = reference
        self._least = {key: SMALL * operand.abs().max() for key, operand in reference.items()}
        self.counts = {}

    def _take_places(
        self, has_experts: bool, _part: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """They are in is_token, see places_of, also of a model without such an argument."""
        self._places = keywords["is_token"].abs() - 1  # -1 for filler
        return args, {name: value for name, value in keywords.items() if has_experts or name != "is_token"}

    def _locate(self, name: str, settings: Float8, layer: Any, args: tuple[Tensor]) -> None:
        places, size = self._places, args[0].shape[1]
        if size < places.shape[1]:  # the layer computes only the positions of this tp rank
            places = places.split(size, dim=1)[layer.tp_group.rank()]
        _, _, first = local_region(layer.weight)
        place = Place(name, name, places.flatten(), self._num_positions, first)
        layer.products = Located(**vars(settings), log=self, place=place)

    def _watch_experts(self, name: str, experts: Experts) -> None:
        forward, feed_forward = experts.forward, experts.feed_forward
        inner, outer = (each.keywords["products"] for each in feed_forward.keywords["products"])  # type: ignore[attr-defined]
        n_active, numbers = 0, self._places

        def numbering(x: Tensor, chosen: Tensor, *others: Any) -> Tensor:
            """Number the choices of the global batch; those of this rank by expert, as rows are."""
            nonlocal n_active, numbers
            n_active, places = chosen.shape[-1], self._places.flatten().unsqueeze(1)
            all_choices = torch.where(places < 0, -1, places * n_active + torch.arange(n_active))
            numbers = all_choices.flatten()[chosen.flatten().argsort(stable=True)]
            return forward(x, chosen, *others)

        def located(rows: Tensor, counts: Tensor, *weights: Tensor, activation: Activation) -> Tensor:
            first = {each: local_region(getattr(experts, each))[2] for each in ("w1", "w2", "w3")}
            num_rows = n_active * self._num_positions

            def products(settings: Float8, *names: str) -> Any:
                """One for each call, in order."""
                for expert, own in enumerate(arrived, first["w1"][0]):
                    for each in names:
                        weight = f"{name}.{each}.{expert}"
                        place = Place(f"{name}.{each}", weight, own, num_rows, first[each][1:])
                        yield partial(multiplied, products=Located(**vars(settings), log=self, place=place))

            def note(x: Tensor, *_: Any) -> Tensor:
                arrived.append(x.flatten())
                return x

            # The numbers travel as rows do, to the ranks of their experts.
            arrived: list[Tensor] = []
            noting = (lambda x, *_: x), note
            feed_forward(numbers.unsqueeze(1), counts, *weights, activation=lambda gate, _: gate, products=noting)  # type: ignore[call-arg]
            of_inner, of_outer = products(inner, "w1", "w3"), products(outer, "w2")
            calls = (lambda *args: next(of_inner)(*args)), (lambda *args: next(of_outer)(*args))
            return feed_forward(rows, counts, *weights, activation=activation, products=calls)  # type: ignore[call-arg]

        experts.forward, experts.feed_forward = numbering, located  # type: ignore[method-assign, assignment]

    def of_rows(self, key: str, own: Tensor, place: Place, first: int) -> Tensor:
        """The operand to use in place of `own`, (…, features). first: the number of the first of its features."""
        flat, is_known = own.flatten(0, -2), place.rows >= 0
        if self._reference is None:
            if key not in self.noted:
                self.noted[key] = own.new_zeros(place.num_rows, own.shape[-1])
            self.noted[key][place.rows[is_known]] = flat[is_known]
            return own
        expected = self._reference[key][place.rows, first : first + own.shape[-1]].to(own.dtype)
        return self._counted(key, flat, torch.where(is_known.unsqueeze(1), expected, flat)).view_as(own)

    def of_weight(self, key: str, own: Tensor, row: int, column: int) -> Tensor:
        """The operand to use in place of `own`, whose first element has this place in the full weight."""
        if self._reference is None:
            self.noted[key] = own
            return own
        full = self._reference[key]
        return self._counted(key, own, full[row : row + own.shape[0], column : column + own.shape[1]].to(own.dtype))

    def _counted(self, key: str, own: Tensor, expected: Tensor) -> Tensor:
        is_same = (own - expected).abs() <= (expected.abs() * APART).clamp(min=self._least[key])
        flipped, compared = self.counts.get(key, (0, 0))
        self.counts[key] = flipped + int(is_same.logical_not().sum()), compared + own.numel()
        return expected


@dataclass(frozen=True, kw_only=True)
class Located(Float8):
    """The settings of one call, whose operands are noted or replaced."""

    log: Operands
    place: Place

    def operands(self, product: ProductName, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        left, right = super().operands(product, left, right)
        name, weight = self.place.name, f"{self.place.weight}: weight of {product}"
        first_output, first_input = self.place.first
        if product == "output":
            left = self.log.of_rows(f"{name}: x of {product}", left, self.place, first_input)
            return left, self.log.of_weight(weight, right, first_output, first_input)
        left = self.log.of_rows(f"{name}: gradient of {product}", left, self.place, first_output)
        if product == "input gradient":
            return left, self.log.of_weight(weight, right, first_input, first_output)
        return left, self.log.of_rows(f"{name}: x of {product}", right, self.place, first_input)
