"""Reference for all layouts: one process, plain torch, no code of the trainer."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.plain_loss import further_term
from titanlite.batch import Batch
from titanlite.config.load import load_config
from titanlite.config.schema import JobConfig
from titanlite.data.loader import rows_of, with_filler
from titanlite.models.experts import mixtures_of
from titanlite.models.family import LanguageModel, resolve_model
from titanlite.models.init import init_parameters_
from titanlite.models.randomness import row_keys
from titanlite.models.registry import structure_of
from titanlite.parallel.float8 import apply_float8

TOKENS = Path(__file__).parents[1] / "golden" / "tokens.npy"
SEQ_LEN = 16
GLOBAL_BATCH = 16
VOCAB_SIZE = 131  # odd, so vocabulary shards are uneven
MODEL = (
    *("dim=32", "n_layers=2", "n_heads=4", "n_kv_heads=2", "ffn_dim=48", f"vocab_size={VOCAB_SIZE}"),
    "max_seq_len=64",  # each build computes rotary tables of that length
)


@cache
def small_config(world_size: int, *overrides: str) -> JobConfig:
    """Tiny llama3 in float64 with plain SGD and no clipping; overrides are `section.key=value`."""
    settings = [
        *(f"model.{value}" for value in MODEL),
        "data.sources.0.kind=tokens",
        f"data.sources.0.path={TOKENS}",
        f"training.seq_len={SEQ_LEN}",
        f"training.global_batch_size={GLOBAL_BATCH}",
        "training.local_batch_size=1",
        "training.dtype=float64",
        "training.max_norm=0.0",
        "optimizer.name=SGD",
        "lr_schedule.warmup_steps=0",
        "lr_schedule.decay=none",
    ]
    values = {item.split("=", 1)[0]: item.split("=", 1)[1] for item in (*settings, *overrides)}
    return load_config([f"--{key}={value}" for key, value in values.items()], world_size=world_size, device_type="cpu")


def global_batch(masks: str, seed: int = 0, rows: int = GLOBAL_BATCH) -> Batch:
    """All rows of step `seed` (from 0). `masks` selects the labels that are IGNORE_INDEX:

    uneven: each row has a random share of valid labels (0 to 100 %); row 0 has no valid label.
    silent_ranks: like uneven, and odd rows have no valid label; with 2 or 4 data ranks, half of the ranks have no
    valid label.
    none: no row has a valid label.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (rows, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    share = torch.rand(rows, 1, generator=generator)
    share[0], share[2] = 0.0, 1.0
    masked = torch.rand(rows, SEQ_LEN, generator=generator) >= share
    if masks == "silent_ranks":
        masked[1::2] = True
    if masks == "none":
        masked[:] = True
    labels[masked] = -100
    return Batch(
        tokens[:, :-1].contiguous(),
        labels,
        torch.arange(seed * rows, (seed + 1) * rows),
        torch.zeros(rows, dtype=torch.int64),
    )


def rank_batches(
    batch: Batch, rank: int, degree: int, accumulation: int, *, num_streams: int = 0, rows: int = 0, together: int = 1
) -> list[Batch]:
    """The microbatches of one data rank, `rows` rows in total: those of the streams s with s // together mod degree ==
    rank, in order, and filler after them. By default, there is a stream for each row of the batch, and no filler."""
    is_own = batch.sequences % (num_streams or len(batch.tokens)) // together % degree == rank
    own = rows_of(batch, is_own.nonzero().flatten())
    if len(own.tokens) < rows:
        lengths = torch.full_like(own.sequences, SEQ_LEN) if own.lengths is None else own.lengths
        own = with_filler(own._replace(lengths=lengths), rows, VOCAB_SIZE)
    local = {name: tensor for name, tensor in own._asdict().items() if tensor is not None}
    parts = zip(*(tensor.chunk(accumulation) for tensor in local.values()), strict=True)
    return [Batch(**dict(zip(local, part, strict=True))) for part in parts]


@dataclass(frozen=True)
class Reference:
    """Results of one step, and the weights before its update."""

    loss: Tensor
    grad_norm: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def plain_model(config: JobConfig) -> LanguageModel:
    """Unsharded model of the configuration with initial weights."""
    family, hyper_parameters = resolve_model(config.model)
    model = family.build(hyper_parameters).to(getattr(torch, config.training.dtype))
    model.tie_weights()
    model.init_buffers(torch.device("cpu"))
    structure = structure_of(family, hyper_parameters, model)
    init_parameters_(model, config.debug.seed, structure.init)
    apply_float8(model, structure, config.float8, None)
    for mixture in mixtures_of([model]):
        rows = config.training.global_batch_size
        mixture.start_step(rows, rows * config.training.seq_len)
    return model


_references: dict[tuple[Any, ...], Reference] = {}


def reference_step(config: JobConfig, batch: Batch, step: int = 1) -> Reference:
    """Loss, gradient norm and gradients of the global batch with initial weights, cached per process.

    step: step number, used for random draws.
    """
    tensors = (batch.tokens, batch.labels, batch.sequences, batch.lengths)
    rows = tuple(tensor.numpy().tobytes() for tensor in tensors if tensor is not None)
    key = (
        repr(config.model),
        repr(config.float8),
        repr(config.loss),
        config.training.dtype,
        config.debug.seed,
        step,
        rows,
    )
    if key not in _references:
        _references[key] = _reference_step(config, batch, step)
    return _references[key]


def _reference_step(config: JobConfig, batch: Batch, step: int) -> Reference:
    model = plain_model(config)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    loss = backward(model, config, batch, step)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    return Reference(loss, norm, gradients, weights)


def backward(model: LanguageModel, config: JobConfig, batch: Batch, step: int) -> Tensor:
    """Add the gradients of the mean loss of the global batch to those of a plain model; returns the loss."""
    keys: dict[str, Any] = {}
    if model.draws:
        keys["row_keys"] = row_keys(config.debug.seed, step, batch.sequences)
    if batch.lengths is not None:
        keys["is_token"] = torch.arange(batch.tokens.shape[1]) < batch.lengths.unsqueeze(1)
        for mixture in mixtures_of([model]):
            mixture.start_step(int((batch.lengths > 0).sum()), int(batch.lengths.sum()))
    logits, term = further_term(model, batch, config.loss.further_tokens_weight, **keys)
    total = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
    loss = total / max(1, int((batch.labels != -100).sum()))
    (loss + term).backward()
    return loss.detach()
