"""The loaders of all data ranks of a mesh, in one process."""

from collections.abc import Sequence

import torch

from titanlite.batch import FILLER
from titanlite.data.config import DataConfig
from titanlite.data.loader import Loader, build_loader
from titanlite.data.streams import Origin
from titanlite.data.tokenizer import Tokenizer
from titanlite.runtime.errors import DataError

RankRow = tuple[int, Origin, list[int], list[int]]
"""Sequence, origin, tokens and labels."""


def build(section: DataConfig, tokenizer: Tokenizer | None = None, **changes: int) -> Loader:
    """The only loader of a small run; `changes` replaces arguments of build_loader."""
    sizes = {"seq_len": 16, "vocab_size": 300, "global_batch_size": 8, "local_batch_size": 1}
    return build_loader(section, tokenizer, **{**sizes, "data_rank": 0, "data_degree": 1, **changes})


def build_ranks(section: DataConfig, tokenizer: Tokenizer, degree: int, **sizes: int) -> "Ranks":
    return Ranks([build(section, tokenizer, data_rank=rank, data_degree=degree, **sizes) for rank in range(degree)])


class Ranks:
    def __init__(self, loaders: Sequence[Loader]) -> None:
        self.loaders = loaders

    def step(self) -> list[RankRow]:
        """The rows of the next step, in the run's order. Raises the DataError of the first sequence."""
        rows: list[RankRow] = []
        errors = []
        for loader in self.loaders:
            try:
                batches = loader.next_step()
            except DataError as error:
                errors.append(error)
                continue
            tokens, labels, numbers = (torch.cat([batch[n] for batch in batches]).tolist() for n in range(3))
            own = len(loader.sequences)
            assert numbers == [*loader.sequences, *[FILLER] * (len(numbers) - own)]
            rows += zip(loader.sequences, loader.origins, tokens[:own], labels[:own], strict=True)
        if errors:
            raise min(errors, key=lambda error: error.sequence)
        return sorted(rows)

    @property
    def ended(self) -> bool:
        return all(all(loader.ended) for loader in self.loaders)

    @property
    def bad_rows(self) -> int:
        return sum(loader.bad_rows for loader in self.loaders)

    def state(self) -> torch.Tensor:
        """The state of all streams."""
        first = self.loaders[0]
        state = torch.full((first.num_streams, first.state().shape[1]), -1)
        for loader in self.loaders:
            state[list(loader.stream_ids)] = loader.state()
        return state

    def load_state(self, state: torch.Tensor) -> None:
        for loader in self.loaders:
            loader.load_state(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()
