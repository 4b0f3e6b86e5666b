"""A model on its mesh and its loss: all that computing needs, without what training adds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from titanlite.batch import Batch
from titanlite.models.attention import document_arguments
from titanlite.models.family import LanguageModel
from titanlite.models.randomness import row_keys
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.pipeline import Pipeline
from titanlite.parallel.tensor import parallel_loss
from titanlite.runtime.determinism import seed_microbatch


class ModelOnMesh:
    """A model that is already on its mesh, with its loss: no gradients, no optimizer.

    model_parts: the parts of the model on this rank: the whole of it, or its stages of the pipeline. loss: as
    mean_loss_shares. shard_logits: whether logits are cut over tp.
    seed: of all that the model draws.
    """

    def __init__(
        self,
        *,
        model_parts: Sequence[LanguageModel],
        pipeline: Pipeline | None,
        loss: Callable[[Tensor, Tensor, Tensor], Tensor],
        shard_logits: bool,
        mesh: Mesh,
        device: torch.device,
        seed: int,
    ) -> None:
        self.model_parts = model_parts
        self.pipeline = pipeline
        self.loss = loss
        self.shard_logits = shard_logits
        self.pp_rank = mesh.coordinate["pp"]
        # Ranks of one data rank see the same rows and, on the last stage, the same loss: one of them counts.
        self.counts_loss = mesh.is_loss_leader and (pipeline is None or pipeline.owns_last)
        self.counts_rows = mesh.is_data_leader
        self.device = device
        self.seed = seed
        self.step = 0

    def row_losses(self, batch: Batch) -> Tensor:
        """The sum of the cross-entropy of each row, (rows,), forward only; in a pipeline 0 but for the last stage."""
        keys = self.keys_of(batch)
        keys.pop("row_keys", None)  # without them nothing is drawn
        with parallel_loss(shard_logits=self.shard_logits):
            if self.pipeline is not None:
                return self.pipeline.row_losses(batch, **keys)
            one = torch.ones((), dtype=torch.int64, device=self.device)
            return self.loss(self.model_parts[0](batch.tokens, **keys), batch.labels, one)

    def keys_of(self, batch: Batch) -> dict[str, Tensor]:
        """What the model's forward takes beside the tokens, by name, a row for each row of the batch.

        positions and document_ids where the batch has positions; row_keys for a model that draws from them. Torch's
        generators, from which all others draw, are seeded.
        """
        seed_microbatch(self.seed, self.step, batch.sequences.tolist()[0], self.pp_rank, self.device)
        keys = document_arguments(batch.positions)
        if self.model_parts[0].draws:
            keys["row_keys"] = to_device(row_keys(self.seed, self.step, batch.sequences), self.device)
        return keys


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all but its sequences on the device."""
    return batch._replace(
        tokens=to_device(batch.tokens, device),
        labels=to_device(batch.labels, device),
        sources=to_device(batch.sources, device),
        positions=None if batch.positions is None else to_device(batch.positions, device),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, without waiting for the copy: from pinned memory it runs beside the host.

    Pinned here, not in the loader's thread, whose current device would be the first GPU on every rank.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
