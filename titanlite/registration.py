"""The functions by which plugins add families, sources, optimizers, schedules, losses and loggers.

Each checks what it adds, with a small instance of it, and raises RegistrationError. They work until a configuration is
read, and in modules of job.plugins.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from titanlite.config.describe import type_label
from titanlite.config.fields import columns_of, fields_of
from titanlite.data.kinds import KINDS
from titanlite.data.sources.base import Source, StreamedSource, TextSource
from titanlite.data.sources.config import SourceConfig
from titanlite.metrics.about import AboutRun
from titanlite.metrics.config import LOGGERS, PLUGIN_LOGGERS, MetricsConfig
from titanlite.metrics.slow_loggers import SlowLogger
from titanlite.models.family import Family, HuggingFace, LanguageModel, ModelConfig, Structure
from titanlite.models.head import output_layers_of
from titanlite.models.linear_attention import GatedDeltaNet
from titanlite.models.losses import LOSSES, TERMS, CountFunction, Loss, Term, TokenFunction, check_loss, cross_entropy
from titanlite.models.registry import FAMILIES
from titanlite.models.transfer import roles_of
from titanlite.models.watch import STATISTICS, Statistic, Watched
from titanlite.optim.optimizer import Arguments, GatedOptimizer, OptimizerConfig, OptimizerKind, skips_by_itself
from titanlite.optim.registry import OPTIMIZERS
from titanlite.optim.schedule import DECAY_SHAPES
from titanlite.parallel.mesh import ShardGroups
from titanlite.parallel.own_code import transform_problem
from titanlite.runtime.errors import UserError
from titanlite.runtime.plugins import RegistrationError, add_entry

CPU = torch.device("cpu")
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
SIZES = ("dim", "head_dim", "vocab_size", "max_seq_len")
"""Hyper-parameters that every family has, since code outside of it reads them."""


def register_family(family: Family) -> None:
    """Add a model family, chosen by model.family; its hyper-parameters become keys of [model].

    Its first flavor is built on the meta device and compared with its structure, initial distributions and names.
    """
    check = _Check("register_family", getattr(family, "name", family))
    check.require(isinstance(family, Family), "takes a titanlite.models.family.Family")
    check.name(family.name)
    _check_hyper_parameters(check, family)
    check.require(isinstance(family.flavors, Mapping) and bool(family.flavors), "flavors must be a mapping, not empty")
    for flavor, config in family.flavors.items():
        check.require(isinstance(config, family.config_type), f"flavor {flavor!r} is no {family.config_type.__name__}")
        sizes = {name: getattr(config, name, None) for name in SIZES}
        wrong = [name for name, value in sizes.items() if type(value) is not int]
        check.require(not wrong, f"flavor {flavor!r} has no integer {' and '.join(wrong)}")
    _check_model(check, family, next(iter(family.flavors.values())))
    add_entry(FAMILIES, family.name, family, "register_family")


def register_source(source: type[Source]) -> None:
    """Add a kind of source, chosen by data.sources.0.kind: a subclass of TextSource or StreamedSource."""
    check = _Check("register_source", getattr(source, "kind", source))
    is_source = isinstance(source, type) and issubclass(source, TextSource | StreamedSource)
    check.require(is_source, "takes a subclass of TextSource or StreamedSource of titanlite.data.sources.base")
    check.require(isinstance(getattr(source, "kind", None), str), "the class needs an attribute kind, a string")
    check.name(source.kind)
    missing = sorted(getattr(source, "__abstractmethods__", ()))
    check.require(not missing, f"the class needs {', '.join(missing)}")
    has_row_name = not issubclass(source, TextSource) or isinstance(getattr(source, "row_name", None), str)
    check.require(has_row_name, 'the class needs row_name, the word for a row in messages, such as "line"')
    unknown = sorted({*source.keys} - {*fields_of(SourceConfig())})
    check.require(not unknown, f"keys has {', '.join(unknown)}, which [[data.sources]] does not have")
    add_entry(KINDS, source.kind, source, "register_source")


def register_optimizer(name: str, kind: OptimizerKind) -> None:
    """Add an optimizer, chosen by optimizer.name and in groups.

    It is built for one matrix and updates it: an update that is skipped must change nothing, and its state must be
    tensors of the parameter's shape, or scalars, since checkpoints cut the state as they cut the parameter.
    """
    check = _Check("register_optimizer", name)
    check.require(isinstance(kind, OptimizerKind), "takes a titanlite.optim.optimizer.OptimizerKind")
    check.name(name)
    unknown = sorted({*kind.options} - {"beta1", "beta2", "momentum"})
    check.require(not unknown, f"options has {', '.join(unknown)}; there are beta1, beta2 and momentum")
    _check_updates(check, kind)
    add_entry(OPTIMIZERS, name, kind, "register_optimizer")


def register_schedule(name: str, shape: Callable[[float], float]) -> None:
    """Add a shape, chosen by lr_schedule.decay, optimizer.weight_decay_shape and optimizer.momentum_shape.

    shape: the position between the first value (0), such as the peak learning rate, and the last one (1), by the
    completed fraction of the way, from 0 to 1. It may leave 0 to 1 where the values of a run are valid.
    """
    check = _Check("register_schedule", name)
    check.name(name)
    for percent in range(101):
        value = check.call(f"shape({percent / 100})", shape, percent / 100)
        is_number = isinstance(value, int | float) and math.isfinite(value)
        check.require(is_number, f"shape({percent / 100}) is {value!r}, and must be a number")
        begins = percent > 0 or abs(value) < 1e-9
        check.require(begins, f"shape(0.0) is {value!r}, and must be 0, the beginning of the way, not its end")
    add_entry(DECAY_SHAPES, name, shape, "register_schedule")


def register_loss(
    name: str, loss: TokenFunction, *, terms: Mapping[str, Term | tuple[TokenFunction, CountFunction]] | None = None
) -> None:
    """Add a loss, chosen by loss.name.

    loss: (logits, labels) -> (tokens,), the loss of each token; see TokenFunction. terms: further terms of the
    objective by name, each a function for the values of tokens and one for their denominator; see Term. titanlite sums
    all of them over the global batch and divides. They are called with small random logits: the values of a token must
    not depend on other tokens.
    """
    check = _Check("register_loss", name)
    check.name(name)
    named = {key: term if isinstance(term, Term) else Term(*term) for key, term in (terms or {}).items()}
    found = Loss(name, loss, named)
    try:
        check_loss(found)
    except UserError as error:
        check.require(False, str(error))
    add_entry(LOSSES, name, found, "register_loss")


def register_term(
    name: str,
    values: TokenFunction,
    count: CountFunction = torch.ones_like,
    *,
    of: Literal["logits", "logsumexp"] = "logits",
) -> None:
    """Add a term of the objective, chosen by loss.terms, beside any loss.

    values: ("logits" or "logsumexp" as `of` says, labels) -> (tokens,); count: its denominator; see Term. It is called
    with small random logits: the value of a token must not depend on other tokens.
    """
    check = _Check("register_term", name)
    check.name(name)
    check.require(of in ("logits", "logsumexp"), f'of must be "logits" or "logsumexp", not {of!r}')
    term = Term(values, count, of)
    try:
        check_loss(Loss("cross_entropy", cross_entropy, {name: term}))
    except UserError as error:
        check.require(False, str(error))
    add_entry(TERMS, name, term, "register_term")


def register_logger(name: str, build: Callable[[MetricsConfig, Path, AboutRun], SlowLogger]) -> None:
    """Add a logger, chosen by metrics.loggers.

    build: called on rank 0 with [metrics], the dump folder and facts of the run; returns a SlowLogger of
    titanlite.metrics.slow_loggers. A thread calls it. If `build` or the thread raises, the run continues without it.
    """
    check = _Check("register_logger", name)
    check.name(name)
    check.require(name not in LOGGERS, "this name is titanlite's own: choose another one")
    check.require(callable(build), "takes a function or class that is called with [metrics], folder and facts")
    add_entry(PLUGIN_LOGGERS, name, build, "register_logger")


def register_statistic(name: str, statistic: Statistic) -> None:
    """Add numbers of gradients and weights, chosen by metrics.statistics.

    statistic: called with the parameters of a rank by name; returns a context, inside which they are updated. It notes
    values by `titanlite.watch`.
    """
    check = _Check("register_statistic", name)
    check.name(name)
    weights = nn.Parameter(torch.ones(2, 3))
    weights.grad = torch.ones(2, 3)
    context = check.call("statistic", statistic, {"weights": weights})
    is_context = isinstance(context, AbstractContextManager)
    check.require(is_context, "must return a context manager: use contextlib.contextmanager, with one yield")
    with Watched([], None, (0, 1)).noting():
        check.call("statistic, with one parameter as a rank may have,", context.__enter__)
        check.call("statistic after its yield", context.__exit__, None, None, None)
    add_entry(STATISTICS, name, statistic, "register_statistic")


class _Check:
    """Raises RegistrationErrors about one call. name: of the entry."""

    def __init__(self, function: str, name: Any) -> None:
        self._call = f"{function}({name!r})"

    def require(self, ok: bool, text: str) -> None:
        if not ok:
            raise RegistrationError(f"{self._call}: {text}")

    def call(self, label: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns; its errors name it."""
        try:
            return function(*arguments)
        except Exception as error:
            fault = str(error) if isinstance(error, UserError) else f"{label} raises {type(error).__name__}: {error}"
            raise RegistrationError(f"{self._call}: {fault}") from error

    def name(self, name: Any) -> None:
        is_name = isinstance(name, str) and re.fullmatch(NAME, name) is not None
        self.require(is_name, "the name must have letters, digits, _, - and . only")


def _check_hyper_parameters(check: _Check, family: Family) -> None:
    kind = family.config_type
    is_frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    check.require(is_frozen, "config_type must be a frozen dataclass")
    taken = sorted({field.name for field in dataclasses.fields(kind)} & {*fields_of(ModelConfig())})
    check.require(not taken, f"{', '.join(taken)} cannot be hyper-parameters: [model] has them")
    for name, key in columns_of(kind).items():
        try:
            type_label(key.type)
        except (KeyError, TypeError):
            check.require(False, f"{name}: {key.type} is no type of TOML keys: bool, int, float, str, or a Literal")
    unknown = sorted({*family.needs} - {*columns_of(kind)})
    check.require(not unknown, f"needs has {', '.join(unknown)}, which the hyper-parameters do not have")


def _check_model(check: _Check, family: Family, config: Any) -> None:
    """Compare a model on the meta device with the other parts of its family."""
    with torch.device("meta"):
        model = check.call("build", family.build, config)
    check.require(isinstance(model, LanguageModel), "build must return a titanlite.models.family.LanguageModel")
    model.tie_weights()
    names = [name for name, _ in model.named_parameters()]
    structure = check.call("structure", family.structure, config)
    check.require(isinstance(structure, Structure), "structure must return a titanlite.models.family.Structure")
    modules = dict(model.named_modules(remove_duplicate=False))
    missing = [name for unit in (*structure.units, (*structure.blocks,)) for name in unit if name not in modules]
    check.require(not missing, f"the structure has {', '.join(missing)}, which the model does not have")
    unknown = ", ".join(name for name in structure.shared if name not in names)
    check.require(not unknown, f"the structure shares {unknown}, which is no parameter of the tied model")
    prefixes = [tuple(f"{name}." for name in unit) for unit in structure.units]
    units = Counter({name: sum(name.startswith(prefix) for prefix in prefixes) for name in names})
    wrong = [f"{name} is in {count}" for name, count in units.items() if count != 1]
    check.require(not wrong, f"each parameter must be in one unit of the structure: {'; '.join(wrong[:3])}")
    for head in output_layers_of([model]):
        own = [name for name, _ in head.named_parameters() if name != "weight"]
        check.require(not own, f"the loss gives no gradient to {', '.join(own)} of the OutputLayer: scale its input")
    fault = check.call("transform", transform_problem, model, 0)
    check.require(fault is None, f"{fault}")
    roles = check.call("roles", roles_of, model, config, structure)
    for name, module in model.named_modules():
        is_old = isinstance(module, GatedDeltaNet) and hasattr(module, "mix")
        check.require(not is_old, f"{name} has 'mix', which nothing calls: write it as its core")
    for name, parameter in model.named_parameters():
        check.require(parameter.dim() > 0, f"{name} has no dimension, and FSDP cannot shard it: use shape (1,)")
        rule = f"{name} has no role: use a layer of titanlite.models.parts, such as Column or Row, or write roles = "
        check.require(name in roles, f"{rule}{{{name.rpartition('.')[2]!r}: Role(...)}} in the class of its module")
    problems = check.call("check", family.check, config, 1, 1, 1)
    check.require(isinstance(problems, list), "check must return a list of Problem")
    sizes = {"flops_per_token": check.call("flops_per_token", family.flops_per_token, config, 1)}
    if family.boundary is not None:
        sizes["boundary"] = check.call("boundary", family.boundary, config)
    for name, number in sizes.items():
        check.require(type(number) is int and number > 0, f"{name} must return a positive integer, not {number!r}")
    if family.hugging_face is not None:
        is_format = isinstance(family.hugging_face, HuggingFace)
        check.require(is_format, "hugging_face must be None or a titanlite.models.family.HuggingFace")
        other = {*check.call("hugging_face.names", family.hugging_face.names, config)} ^ {*names}
        check.require(not other, f"hugging_face.names differs from the model's parameters: {', '.join(sorted(other))}")


def _check_updates(check: _Check, kind: OptimizerKind) -> None:
    """Update a matrix twice, by titanlite with an update before that is skipped, and by torch alone."""
    (ours, optimizer), (theirs, alone) = (_build_for_matrix(check, kind) for _ in range(2))
    gated = GatedOptimizer([optimizer])
    gated.init_state()
    for ok in (False, True, True):
        ours.grad = torch.ones(2, 3)
        gated.set_lr(0.1)
        before = ours.detach().clone()
        gated.step_if(torch.tensor(ok))
        changed = not torch.equal(ours, before)
        check.require(changed == ok, "an update must change weights, and nothing if found_inf is not 0")
        if ok:
            theirs.grad = torch.ones(2, 3)
            GatedOptimizer([alone]).set_lr(0.1)
            if skips_by_itself(alone):
                alone.found_inf = torch.zeros(())  # type: ignore[attr-defined]
            alone.step()
    check.require(
        torch.equal(ours, theirs),
        "the state must be zero before the first update: a skipped one restores it; or derive the optimizer from "
        "SkippingOptimizer of titanlite.optim.optimizer",
    )
    for key, value in optimizer.state[ours].items():
        fits = isinstance(value, torch.Tensor) and value.shape in ((), (2, 3))
        check.require(fits, f"state {key!r} must be a tensor of the parameter's shape, or a scalar tensor")


def _build_for_matrix(check: _Check, kind: OptimizerKind) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weights = nn.Parameter(torch.ones(2, 3))
    options = {"lr_factor": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.95), "momentum": kind.momentum}
    groups = [{"params": [("weights", weights)], **options}]
    optimizer = kind.build(Arguments(groups, OptimizerConfig(), CPU, ShardGroups(), 0))
    check.require(isinstance(optimizer, torch.optim.Optimizer), "build must return a torch.optim.Optimizer")
    kept = all({"lr_factor", "param_names"} <= group.keys() for group in optimizer.param_groups)
    check.require(kept, "build must pass the groups to torch's optimizer as they are, with names of parameters")
    return weights, optimizer
