"""Steps on conversations whose answers have 1 to 500 tokens, and their reference: each conversation alone in a row, in
one process."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.documents import documents, documents_reference
from tests.distributed.gradients import build_on_mesh, build_without_updates, compare, has_weights
from tests.distributed.layouts import Layout
from tests.distributed.reference import plain_model
from titanlite.assembly.data import build_evaluator, build_tokenizer, build_validation_data, loader_of
from titanlite.assembly.job import job_of
from titanlite.batch import IGNORE_INDEX, Batch
from titanlite.config.schema import JobConfig
from titanlite.data.bpe import train_bpe
from titanlite.data.loader import build_loader
from titanlite.forward import ModelOnMesh
from titanlite.models.family import resolve_model
from titanlite.ranks.signals import StopRequest

ANSWERS = (1, 500, 2, 3, 90, 1, 1, 250, 17, 1, 400, 5, 40, 1, 8, 2)
"""Tokens of the answers, the end of the turn included."""

SEQ_LEN = 544
MESSAGE = ("<|im_start|>", "<|im_end|>")
CHATML = Path(__file__).parents[2] / "examples" / "chatml.jinja"


def write_data(folder: Path) -> None:
    """A tokenizer with one token per byte and the chat template of the examples, conversations, and text."""
    (folder / "tokenizer").mkdir()
    train_bpe(iter(["abc"]), 259, folder / "tokenizer", MESSAGE)
    (folder / "tokenizer" / "chat_template.jinja").write_bytes(CHATML.read_bytes())
    conversations = [
        [{"role": "user", "content": "abc"}, {"role": "assistant", "content": ("a" * n + "bca" * n)[1:n]}]
        for n in ANSWERS
    ]
    lines = [json.dumps({"messages": messages}) + "\n" for messages in conversations]
    (folder / "chat.jsonl").write_text("".join(lines))
    (folder / "text.txt").write_text("some text to train on, too\n" * 200)


def config_of(layout: Layout, folder: str, mixture: bool) -> JobConfig:
    """The layout's configuration, on the data of write_data."""
    chat = [f"data.sources.0.{key}={value}" for key, value in (("kind", "chat"), ("path", f"{folder}/chat.jsonl"))]
    text = [f"data.sources.1.{key}={value}" for key, value in (("kind", "text"), ("path", f"{folder}/text.txt"))]
    weights = ("data.sources.0.weight=3", "data.sources.1.weight=1")
    once = ("data.shuffle=false", "data.sources.0.epochs=1")  # the first step has all conversations
    return layout.config(
        *chat,
        *once,
        *((*text, *weights) if mixture else ()),
        *(f"tokenizer.path={folder}/tokenizer", "model.vocab_size=263", f"model.max_seq_len={SEQ_LEN}"),
        f"training.seq_len={SEQ_LEN}",
    )


def entire_batch(config: JobConfig) -> Batch:
    """All rows of the first step, from one loader."""
    rows = config.training.global_batch_size
    loader = build_loader(
        config.data,
        build_tokenizer(config),
        seq_len=SEQ_LEN,
        vocab_size=resolve_model(config.model)[1].vocab_size,
        global_batch_size=rows,
        local_batch_size=rows,
        data_rank=0,
        data_degree=1,
    )
    (batch,) = loader.next_step()
    loader.close()
    return batch


def mean_over_rows(model: ModelOnMesh, batch: Batch, num_valid: Tensor) -> dict[str, Tensor]:
    """The forward arguments of the mistake of an average per row: each valid token by its row's number of them."""
    arguments = CORRECT(model, batch, num_valid)
    own = (batch.labels != IGNORE_INDEX).sum(1)
    return arguments | {"num_valid": own.clamp(min=1) * ROWS}


CORRECT = ModelOnMesh.forward_arguments
ROWS = 8


def chat_step(layout: Layout, folder: str, *, mixture: bool = False, planted: bool = False) -> dict[str, Any]:
    """Errors of a step on this rank's rows, by its own loader; numbers: of valid tokens by row of the global batch."""
    config = config_of(layout, folder, mixture)
    assert config.data.document_mask is True
    batch = entire_batch(config)
    reference = documents_reference(config, batch)
    trainer, mesh = build_without_updates(config)
    same = has_weights(trainer, reference.weights)
    loader = loader_of(job_of(config, mesh.world.size), config.data, mesh, build_tokenizer(config))
    with patch.object(ModelOnMesh, "forward_arguments", mean_over_rows if planted else CORRECT):
        stats = trainer.train_step(loader.next_step())
    loader.close()
    errors = compare(trainer, stats.mean_loss, stats.grad_norm, reference, same)
    numbers = (batch.labels != IGNORE_INDEX).sum(1).tolist()
    assert int(stats.num_valid) == sum(numbers)
    return {**asdict(errors), "numbers": numbers, "sources": batch.sources.tolist()}


def chat_steps(cases: Sequence[tuple[Layout, bool]], folder: str) -> list[dict[str, Any]]:
    """Take a step for each (layout, whether it is on a mixture) on this rank."""
    return [chat_step(layout, folder, mixture=mixture) for layout, mixture in cases]


def planted_step(layout: Layout, folder: str) -> tuple[dict[str, Any], float]:
    """Errors of a step with the mistake of an average per row; the size that its loss must have, relative."""
    found = chat_step(layout, folder, planted=True)
    config = config_of(layout, folder, mixture=False)
    batch, model = entire_batch(config), plain_model(config)
    by_row = torch.zeros(len(batch.tokens), dtype=torch.float64)
    numbers = torch.tensor(found["numbers"])
    with torch.no_grad():
        for row in range(len(batch.tokens)):
            one = Batch(*(None if part is None else part[row : row + 1] for part in batch))
            for tokens, labels in documents(one):
                by_row[row] += F.cross_entropy(model(tokens)[0], labels[0], ignore_index=IGNORE_INDEX, reduction="sum")
    correct, wrong = by_row.sum() / numbers.sum(), (by_row / numbers).mean()
    return found, float((wrong - correct).abs() / correct)


def validation_counts(layouts: Sequence[Layout], folder: str, seq_len: int) -> list[tuple[int, int | None]]:
    """For each layout, (targets, conversations that are too long) of a validation on the conversations and the text."""
    found = []
    for layout in layouts:
        config = config_of(layout, folder, mixture=True)
        sources = tuple(replace(source, epochs=-1, weight=-1) for source in config.data.sources)
        config = replace(
            config,
            training=replace(config.training, seq_len=seq_len),
            validation=replace(config.validation, enable=True, sources=sources),
        )
        trainer, mesh = build_on_mesh(config)
        job, tokenizer = job_of(config, mesh.world.size), build_tokenizer(config)
        evaluator = build_evaluator(job, trainer, dist.new_group(backend="gloo"), StopRequest(), tokenizer)
        for loader in build_validation_data(job, mesh, tokenizer).values():
            totals, _ = evaluator.totals(loader, steps=-1)
            loader.close()
            found.append((totals.num_valid, totals.too_long))
    return found
