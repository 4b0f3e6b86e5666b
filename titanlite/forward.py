"""Forward pass of a model on its mesh, with the loss, for training and evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.models.attention import document_arguments
from titanlite.models.experts import mixtures_of
from titanlite.models.family import LanguageModel
from titanlite.models.head import count_misses, output_layers_of
from titanlite.models.losses import CROSS_ENTROPY
from titanlite.models.randomness import row_keys, seed_microbatch
from titanlite.parallel.data import wrapped_modules
from titanlite.parallel.mesh import Mesh, part_of_rows
from titanlite.parallel.pipeline import Pipeline


@dataclass(kw_only=True, eq=False)
class ModelOnMesh:
    """A parallelized model, without gradients and optimizer.

    model_parts: this rank's parts of the model: the full model, or its pipeline stages. seed: of all random numbers of
    the model.
    """

    model_parts: Sequence[LanguageModel]
    pipeline: Pipeline | None
    mesh: Mesh
    device: torch.device
    seed: int
    step: int = 0

    def __post_init__(self) -> None:
        # Ranks with the same data rank read the same rows and, on the last stage, compute the same loss: count it once.
        self.counts_loss = self.mesh.is_loss_leader and (self.pipeline is None or self.pipeline.owns_last)
        self.counts_rows = self.mesh.is_data_leader
        self.mixtures = mixtures_of(self.model_parts)
        self.heads_with_terms = [head for head in output_layers_of(self.model_parts) if head.computation.num_terms]

    def row_losses(self, batch: Batch) -> Tensor:
        """Summed loss of each row, (rows,), without backward; 0 except on the last stage of a pipeline."""
        arguments = self.forward_arguments(batch, torch.ones((), dtype=torch.int64, device=self.device))
        for name in ("row_keys", "next_tokens", "further_labels"):  # no random numbers, and no further tokens
            arguments.pop(name, None)
        forward = self.model_parts[0] if self.pipeline is None else self.pipeline.row_losses
        losses: Tensor = forward(self.cp_shard(batch.tokens), **arguments)
        return self.sum_over_cp(losses)

    def row_misses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """As row_losses, and the number of labels of each row that are not the most likely token, both (rows,)."""
        with count_misses(output_layers_of(self.model_parts)) as counts:
            losses = self.row_losses(batch)
        misses = torch.cat(counts).to(losses.dtype) if counts else torch.zeros_like(losses)
        return losses, self.sum_over_cp(misses)

    def cp_shard(self, rows: Tensor) -> Tensor:
        """This rank's columns of `rows`, (rows, seq_len): its positions on the cp axis."""
        return part_of_rows(
            rows, self.mesh.coordinate["cp"], self.mesh.degrees["cp"], self.mesh.section.context_parallel
        )

    def sum_over_cp(self, losses: Tensor) -> Tensor:
        """The losses of entire rows, (rows,), from those of this rank's positions. With cp, an all-reduce over it."""
        if self.mesh.cp_group is not None:
            losses = losses.contiguous()
            dist.all_reduce(losses, group=self.mesh.cp_group)
        return losses

    def forward_arguments(self, batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward, each with one row per row of the batch; seeds torch's generators.

        num_valid: int64 scalar. The arguments are labels and num_valid; positions and document_ids if the batch has
        positions; is_token if this rank has experts and the batch has padding; row_keys if the model draws from them;
        next_tokens and further_labels if it predicts further tokens.
        Models without row_keys draw from torch's generators. With cp, labels, positions and is_token are those of this
        rank, document_ids those of entire rows, as attention needs them.
        """
        coordinate, cp = self.mesh.coordinate, self.mesh.degrees["cp"]
        part = coordinate["pp"] * cp + coordinate["cp"]
        seed_microbatch(self.seed, self.step, batch.sequences.tolist()[0], part, self.device)
        arguments = document_arguments(batch.positions)
        arguments |= {"labels": self.cp_shard(batch.labels), "num_valid": num_valid.expand(len(batch.labels))}
        if cp > 1:
            arguments["positions"] = self.cp_shard(arguments.get("positions", positions_of(batch.tokens)))
            if self.mesh.section.context_parallel == "gather":  # its mask is also that of causal attention
                arguments.setdefault("document_ids", torch.zeros_like(batch.tokens))
        if self.mixtures and batch.lengths is not None and int(batch.lengths.min()) < batch.tokens.shape[1]:
            is_token = positions_of(batch.tokens) < to_device(batch.lengths, self.device).unsqueeze(1)
            arguments["is_token"] = self.cp_shard(is_token)
        if self.model_parts[0].draws:
            arguments["row_keys"] = to_device(row_keys(self.seed, self.step, batch.sequences), self.device)
        if self.model_parts[0].predicts_further:
            following = next_tokens(batch), further_labels(batch)
            arguments |= dict(zip(("next_tokens", "further_labels"), map(self.cp_shard, following), strict=True))
        return arguments


def next_tokens(batch: Batch) -> Tensor:
    """The token after each one, of entire rows; at the last position, which has no further label, any one."""
    return batch.tokens.roll(-1, dims=1)


def further_labels(batch: Batch) -> Tensor:
    """The label of the next position, of entire rows; IGNORE_INDEX where that is of another document."""
    labels = batch.labels.roll(-1, dims=1)
    labels[:, -1] = IGNORE_INDEX
    if batch.positions is None:
        return labels
    return labels.masked_fill(batch.positions.roll(-1, dims=1) == 0, IGNORE_INDEX)


@contextmanager
def forward_only(model: ModelOnMesh) -> Iterator[None]:
    """Context for evaluation: eval mode, no gradients. Restores modes, torch's random state and sharding on exit."""
    parts, device = model.model_parts, model.device
    modes = [part.training for part in parts]
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        for part in parts:
            part.eval()
        try:
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):
                part.train(mode)
                # Free gathered parameters; otherwise they would be reused, outdated, after the next update.
                for module in wrapped_modules(part):
                    module.reshard()


@contextmanager
def cross_entropy_in(model: ModelOnMesh) -> Iterator[None]:
    """Inside, the model's loss is the cross-entropy, also if it is trained by a registered loss."""
    heads = output_layers_of(model.model_parts)
    before = [head.computation for head in heads]
    for head in heads:
        head.computation = replace(head.computation, loss=CROSS_ENTROPY)
    try:
        yield
    finally:
        for head, computation in zip(heads, before, strict=True):
            head.computation = computation


def positions_of(tokens: Tensor) -> Tensor:
    """Positions of rows of one document each: int64, the shape of `tokens`, (rows, seq_len)."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to the device. `sequences`, the numbers of its rows in the run, and `lengths` stay on the host,
    which reads them."""
    return batch._replace(
        tokens=to_device(batch.tokens, device),
        labels=to_device(batch.labels, device),
        sources=to_device(batch.sources, device),
        positions=None if batch.positions is None else to_device(batch.positions, device),
    )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device asynchronously, from pinned memory.

    Pinned here, not in the loader's thread, where the current device would be the first GPU on every rank.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
