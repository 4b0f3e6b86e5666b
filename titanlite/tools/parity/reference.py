"""The reference for all layouts: one process, plain torch, float64, no code of the trainer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from titanlite.assembly.data import build_data, build_tokenizer
from titanlite.assembly.job import job_of
from titanlite.batch import IGNORE_INDEX, Batch, rows_and_tokens
from titanlite.config.schema import JobConfig
from titanlite.config.stages import batch_stages, stage_configs
from titanlite.data.steps import stage_index
from titanlite.models.attention import document_arguments
from titanlite.models.experts import Placement, end_step, mixtures_of
from titanlite.models.family import LanguageModel
from titanlite.models.init import init_parameters_
from titanlite.models.layers import RotaryEmbedding
from titanlite.models.losses import Loss
from titanlite.models.randomness import row_keys
from titanlite.models.registry import full_parameters, structure_of
from titanlite.optim.registry import build_optimizer
from titanlite.optim.schedule import build_factors, build_schedule
from titanlite.parallel.float8 import apply_float8
from titanlite.parallel.mesh import Mesh, ShardGroups
from titanlite.precision import DTYPES
from titanlite.ranks.distributed import World
from titanlite.runtime.torch_internals import TorchDispatchMode, tree_leaves
from titanlite.tools.parity.layouts import ONE_PROCESS, config_of
from titanlite.tools.parity.measure import (
    CPU,
    Measurement,
    Step,
    clipping_norm,
    hash_of,
    largest_step,
    mask_and_hash,
    own_dtypes,
    passes,
    read_tensors,
    record_status,
    reference_file,
)
from titanlite.tools.parity.operands import Operands
from titanlite.tools.parity.routing import Routing, places_of


def measure_reference(config: JobConfig, steps: int, folder: str) -> dict[str, Any]:
    """Run the reference on one rank of run_ranks; writes the gradients to `folder`.

    Plain torch: the family's model; the loss is that of all logits, summed over the global batch and divided by its
    number of valid tokens; the update is w -= lr * gradient. Returns measurements (one per pass, which differ only in
    the dtype of the hashed weights) and imprecise (the first operation below float64; None if all are float64).
    """
    with record_status("the reference", folder):
        return _measure_reference(config_of(config, ONE_PROCESS), steps, Path(folder))


def _measure_reference(config: JobConfig, steps: int, path: Path) -> dict[str, Any]:
    model = plain_model(config)
    named, mixtures = dict(model.named_parameters()), mixtures_of([model])
    weights = [
        {name: hash_of(parameter.detach().to(DTYPES[settings.training.dtype])) for name, parameter in named.items()}
        for settings in passes(config)
    ]
    routing, operands = Routing(mixtures, largest_step(config)), None
    if config.float8.recipe != "none" and len(weights) > 1:
        operands = Operands([model], largest_step(config))
    loader = build_data(job_of(config, 1), Mesh(config.parallelism, World(0, 0, 1, "cpu")), build_tokenizer(config))
    modules = ModuleTracker()
    watch = PrecisionWatch(model, modules)
    measured = []
    try:
        for step in range(steps):
            use_rotary_tables_(model, config, step + 1)
            torch.save({name: p.detach() for name, p in named.items()}, reference_file(path, "weights", step))
            batches, rows = mask_and_hash(loader, config)
            weight = config.loss.further_tokens_weight if model.predicts_further else 0.0
            objective = objective_of(config.loss.chosen, batches, weight)
            num_rows, num_tokens = rows_and_tokens(batches)
            for mixture in mixtures:
                mixture.start_step(max(num_rows, 1), max(num_tokens, 1))
            model.zero_grad()
            with modules, watch:
                mean_loss = 0.0
                for batch in batches:
                    has_places = operands is not None or mixtures
                    places = {"is_token": places_of(batch, loader.first_sequence)} if has_places else {}
                    mean_loss += forward_backward(model, batch, objective, config.debug.seed, step + 1, **places)
            gradients = {
                name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                for name, parameter in named.items()
            }
            torch.save(gradients, reference_file(path, "gradients", step))
            torch.save(routing.chosen, reference_file(path, "routing", step))
            if operands is not None:
                noted = {key: value.to(torch.float32) for key, value in operands.noted.items()}
                torch.save(noted, reference_file(path, "operands", step))
            norms: dict[str, float | None] = {name: torch.linalg.vector_norm(g).item() for name, g in gradients.items()}
            norm = nn.utils.get_total_norm(gradients.values())
            measured.append(Step(mean_loss, norm.item(), objective.num_valid, False, rows, norms))
            end_step(mixtures, torch.tensor(True), None)
            with torch.no_grad():
                for name, parameter in named.items():
                    parameter.sub_(gradients[name], alpha=config.optimizer.lr)
    finally:
        loader.close()
    updates = [measure_updates(config, steps, path), *({} for _ in weights[1:])]
    measurements = [
        Measurement(hashes, measured, own, list(own_dtypes(settings)))
        for hashes, own, settings in zip(weights, updates, passes(config), strict=True)
    ]
    return {"measurements": [asdict(one) for one in measurements], "imprecise": watch.found}


def use_rotary_tables_(model: LanguageModel, config: JobConfig, step: int) -> None:
    """Give the model the rotary tables of a newly built model of the step's training stage, if that has others."""
    before, now = (stage_configs(config)[stage_index(batch_stages(config), at)] for at in (step - 1, step))
    if before.hyper_parameters == now.hyper_parameters:
        return
    others = dict(plain_model(now).named_modules())
    for name, module in model.named_modules():
        if isinstance(module, RotaryEmbedding):
            module.cos, module.sin = (getattr(others[name], table) for table in ("cos", "sin"))


def measure_updates(config: JobConfig, steps: int, folder: Path) -> dict[str, float | None]:
    """The norm of each parameter's change by the configuration's own optimizer, given the gradients of the steps.

    Writes the updated weights to `folder`. Plain torch on full tensors; the learning rates are the schedule's.
    """
    section = config.optimizer
    before = read_tensors(reference_file(folder, "weights"))
    named = {name: nn.Parameter(value.clone()) for name, value in before.items()}
    _, structure = full_parameters(config.model)
    optimizer = build_optimizer(section, named, structure, CPU, ShardGroups(), config.debug.seed)
    schedule = build_schedule(config.lr_schedule, section.lr, config.training.steps, batch_stages(config))
    factors = build_factors(section, config.training.steps)
    for step in range(steps):
        gradients = read_tensors(reference_file(folder, "gradients", step))
        for name, parameter in named.items():
            parameter.grad = gradients[name].clone()
        max_norm = clipping_norm(config, gradients)
        if max_norm > 0:
            nn.utils.clip_grad_norm_(named.values(), max_norm)
        optimizer.set_lr(schedule(step + 1), factors(step + 1))
        optimizer.step_if(torch.ones((), dtype=torch.bool))
    torch.save({name: parameter.detach() for name, parameter in named.items()}, reference_file(folder, "updated"))
    return {name: torch.linalg.vector_norm(p.detach() - before[name]).item() for name, p in named.items()}


@dataclass(frozen=True)
class Objective:
    """The mean of the loss over num_valid tokens, plus each of its terms over its denominator, plus further_weight x
    the mean of the loss over num_further tokens after the next one."""

    loss: Loss
    num_valid: int
    denominators: Sequence[float]
    further_weight: float
    num_further: int


def objective_of(loss: Loss, batches: Sequence[Batch], further_weight: float = 0.0) -> Objective:
    """The objective of a step. batches: its global batch."""
    labels = torch.cat([batch.labels.flatten() for batch in batches])
    labels = labels[labels != IGNORE_INDEX]
    counts = [term.count(labels).double().sum().item() for term in loss.terms.values()]
    further = sum(int((labels_after_next(batch) != IGNORE_INDEX).sum()) for batch in batches)
    return Objective(loss, len(labels), counts, further_weight, further)


def labels_after_next(batch: Batch) -> Tensor:
    """The label of the next position of the same document, by a loop over documents."""
    found = torch.full_like(batch.labels, IGNORE_INDEX)
    for row, labels in enumerate(batch.labels):
        starts = [0] if batch.positions is None else (batch.positions[row] == 0).nonzero().flatten().tolist()
        for start, end in pairwise([*starts, len(labels)]):
            found[row, start : end - 1] = labels[start + 1 : end]
    return found


def forward_backward(
    model: LanguageModel, batch: Batch, objective: Objective, seed: int, step: int, **others: Tensor
) -> float:
    """Accumulate the gradient of these rows' share of the objective; returns their share of the mean loss.

    seed, step: the keys of the random numbers of a model with `draws`; step counts from 1. others: further arguments of
    the model.
    """
    keys = document_arguments(batch.positions) | others
    if model.draws:
        keys["row_keys"] = row_keys(seed, step, batch.sequences)
    if objective.further_weight:
        keys["next_tokens"] = torch.cat((batch.tokens[:, 1:], batch.tokens[:, :1]), dim=1)
    logits, labels = model(batch.tokens, **keys).flatten(0, 1), batch.labels.flatten()
    logits, of_further = logits[: len(labels)], logits[len(labels) :]
    share: Tensor = logits.sum() * 0  # a graph also without valid tokens
    total = share
    valid, loss = labels != IGNORE_INDEX, objective.loss
    if valid.any():
        logits, labels = logits[valid], labels[valid]
        share = loss.function(logits, labels).sum() / objective.num_valid
        total = share
        for values, denominator in zip(loss.term_values(logits, labels), objective.denominators, strict=True):
            if denominator:
                total = total + values.sum() / denominator
    further = labels_after_next(batch).flatten()
    if objective.further_weight and (valid := further != IGNORE_INDEX).any():
        losses = loss.function(of_further[valid], further[valid])
        total = total + objective.further_weight * losses.sum() / objective.num_further
    total.backward()
    return share.item()


class PrecisionWatch(TorchDispatchMode):
    """Finds the first operation inside `with` whose result has less than float64 precision, and its module (`found`).

    Comparing layouts with the reference cannot reveal such an operation: both run the same model code and round alike.
    """

    def __init__(self, model: nn.Module, modules: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self._model = type(model).__name__
        self._modules = modules

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result) if self.found is None else ():
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                dtype = value.dtype
                if torch.promote_types(dtype, torch.float64) != dtype:
                    inner = max(self._modules.parents, key=len)
                    self.found = f"{func} gives {dtype} in {inner.removeprefix(self._model + '.')}"
        return result


def plain_model(config: JobConfig) -> LanguageModel:
    """The family's full model in float64, with its initial weights, and its products in float8 if configured."""
    family, hyper_parameters = config.family, config.hyper_parameters
    model = family.build(hyper_parameters).to(torch.float64)
    model.tie_weights()
    structure = structure_of(family, hyper_parameters, model)
    model.init_buffers(CPU)
    init_parameters_(model, config.debug.seed, structure.init)
    apply_float8(model, structure, config.float8, None)
    for name, index in structure.blocks.items():
        for mixture in mixtures_of([model.get_submodule(name)]):
            mixture.placement = Placement(index)
    return model
