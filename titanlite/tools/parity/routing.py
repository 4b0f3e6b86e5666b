"""Choices of experts, compared with those of the reference by sequence and position, on any layout."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from titanlite.batch import FILLER, Batch
from titanlite.data.loader import Loader
from titanlite.models.experts import MixtureOfExperts
from titanlite.trainer import Trainer


class Routing:
    """Notes the choices of experts in a step, or compares them with those of a reference.

    chosen: int64 (positions of the largest step, n_active), by block. reference: such choices, or None. replays:
    whether the experts of the reference compute, in place of the own choices. flipped: positions that chose other
    experts than in the reference, of `compared` ones, in all blocks of this rank. A position counts each time that it
    is routed: on several ranks, and again by recomputation.
    """

    def __init__(self, mixtures: Sequence[MixtureOfExperts], num_positions: int) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.flipped = self.compared = 0
        self._num_positions = num_positions
        self._reference: Mapping[int, Tensor] | None = None
        self._replays = False
        self._places = torch.empty(0, dtype=torch.int64)
        for mixture in mixtures:
            mixture.forward = partial(self._forward, mixture)  # type: ignore[method-assign]
            mixture.choose = partial(self._choose, mixture)  # type: ignore[method-assign]

    def compare_with(self, reference: Mapping[int, Tensor], *, replays: bool) -> None:
        """Compare the next step with these choices. Resets the counts."""
        self._reference, self._replays = reference, replays
        self.flipped = self.compared = 0

    def _forward(self, mixture: MixtureOfExperts, x: Tensor, places: Tensor) -> Tensor:
        """places: see places_of; they take the way of is_token through the model."""
        self._places = places.abs() - 1  # -1 for filler
        is_token = places > 0
        return MixtureOfExperts.forward(mixture, x, None if is_token.all() else is_token)

    def _choose(self, mixture: MixtureOfExperts, probabilities: Tensor) -> Tensor:
        chosen, block = MixtureOfExperts.choose(mixture, probabilities), mixture.placement.block
        if self._reference is None:
            noted = self.chosen.setdefault(block, chosen.new_empty(self._num_positions, chosen.shape[-1]))
            is_known = self._places >= 0
            noted[self._places[is_known]] = chosen[is_known]
            return chosen
        expected = torch.where((self._places >= 0).unsqueeze(-1), self._reference[block][self._places], chosen)
        self.flipped += int((chosen.sort().values != expected.sort().values).any(dim=-1).sum())
        self.compared += int((self._places >= 0).sum())
        return expected if self._replays else chosen


def places_of(batch: Batch, first_sequence: int) -> Tensor:
    """1 + the number of each position in the global batch, int64 (rows, seq_len); negated for padding, 0 for filler."""
    positions = torch.arange(batch.tokens.shape[1])
    places = (batch.sequences - first_sequence).unsqueeze(1) * len(positions) + positions + 1
    places[batch.sequences == FILLER] = 0
    return places if batch.lengths is None else torch.where(positions < batch.lengths.unsqueeze(1), places, -places)


def carry_places(trainer: Trainer, loader: Loader) -> None:
    """Let the batches of a trainer on CPU carry their places in the global batch that the loader has returned."""
    forward_arguments = trainer.forward_arguments

    def with_places(batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
        places = trainer.cp_shard(places_of(batch, loader.first_sequence))
        return {**forward_arguments(batch, num_valid), "is_token": places}

    trainer.forward_arguments = with_places  # type: ignore[method-assign]
