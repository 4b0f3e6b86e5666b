"""Packed rows of several documents, and their reference: each document as a separate row, in one process."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed.gradients import build_without_updates, compare, has_weights, local_batches
from tests.distributed.layouts import Layout
from tests.distributed.reference import SEQ_LEN, VOCAB_SIZE, Reference, plain_model
from tests.plain_loss import further_labels, further_term
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.models.layers import RotaryEmbedding

LENGTHS = ([SEQ_LEN], [1, SEQ_LEN - 1], [5, 1, 7, 3], [8, 8], [1] * SEQ_LEN, [13, 2, 1], [2, 3, 4, 7], [SEQ_LEN - 1, 1])
"""Document lengths by row; the table repeats if there are more rows."""


def packed_batch(rows: int) -> Batch:
    """Packed rows. No label crosses a document boundary; each row has a random share of valid labels (0 to 100 %)."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB_SIZE, (rows, SEQ_LEN + 1), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in LENGTHS[row % len(LENGTHS)]]) for row in range(rows)])
    share = torch.rand(rows, 1, generator=generator)
    share[0], share[1], share[3] = 1.0, 0.0, 1.0
    labels = tokens[:, 1:].clone()
    labels[torch.rand(rows, SEQ_LEN, generator=generator) >= share] = IGNORE_INDEX
    labels[:, :-1][positions[:, 1:] == 0] = IGNORE_INDEX
    numbers = torch.arange(rows)
    return Batch(tokens[:, :-1].contiguous(), labels, numbers, torch.zeros_like(numbers), positions)


def documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, labels) of each document, each of shape (1, document length)."""
    assert batch.positions is not None
    for tokens, labels, positions in zip(batch.tokens, batch.labels, batch.positions, strict=True):
        edges = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        for start, end in pairwise(edges):
            yield tokens[None, start:end], labels[None, start:end]


_references: dict[tuple[Any, ...], Reference] = {}


def documents_reference(config: JobConfig, batch: Batch) -> Reference:
    """Reference of a packed batch with each document as a separate row; cached per process and model."""
    rows = tuple(tensor.numpy().tobytes() for tensor in batch if tensor is not None)
    key = (repr(config.model), config.training.dtype, config.debug.seed, rows)
    if key not in _references:
        _references[key] = _documents_reference(config, batch)
    return _references[key]


def _documents_reference(config: JobConfig, batch: Batch) -> Reference:
    """Compute the reference without positions or mask."""
    model = plain_model(config)
    num_valid = int((batch.labels != IGNORE_INDEX).sum())
    mean_loss = torch.zeros((), dtype=torch.float64)
    for tokens, labels in documents(batch):
        numbers = torch.zeros(1, dtype=torch.int64)
        alone = Batch(tokens, labels, numbers, numbers)
        logits, further = further_term(model, alone, config.loss.further_tokens_weight)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
        loss /= num_valid
        own, every = (int((further_labels(each) != IGNORE_INDEX).sum()) for each in (alone, batch))
        (loss + further * own / every).backward()
        mean_loss += loss.detach()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    return Reference(mean_loss, norm, gradients, {name: p.detach() for name, p in model.named_parameters()})


def documents_step(layout: Layout) -> dict[str, Any]:
    """Errors of a step with packed rows, and whether each model part used the batch's positions ("restarts").

    Rotary embeddings depend on position differences only, so gradients do not show whether positions restart.
    """
    torch._dynamo.reset()
    batch = packed_batch(layout.rows)
    config = layout.config()
    reference = documents_reference(config, batch)
    trainer, mesh = build_without_updates(config)
    same = has_weights(trainer, reference.weights)
    used = [positions_seen(part) for part in trainer.model_parts]
    local = local_batches(config, mesh, batch)
    stats = trainer.train_step(local)
    positions = torch.cat([trainer.cp_shard(part.positions) for part in local if part.positions is not None])
    restarts = all(torch.equal(torch.cat(seen), positions) for seen in used)
    errors = compare(trainer, stats.mean_loss, stats.grad_norm, reference, same)
    return {**asdict(errors), "restarts": restarts}


def positions_seen(part: nn.Module) -> list[Tensor]:
    """List that collects the positions of each microbatch in the part's forward pass."""
    seen: list[Tensor] = []
    (rope,) = (module for module in part.modules() if isinstance(module, RotaryEmbedding))
    missing = torch.full((1, SEQ_LEN), -1)
    rope.register_forward_pre_hook(lambda _module, args: seen.append(missing if args[0] is None else args[0]))
    return seen


def documents_steps(layouts: Sequence[Layout]) -> list[dict[str, Any]]:
    """Take a step in each layout on this rank."""
    return [documents_step(layout) for layout in layouts]
